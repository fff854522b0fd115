"""The public status page, if it is switched on: plain HTML, made at most once in 10 s."""

from __future__ import annotations

import datetime
from html import escape

import msgspec

from shoal.api.audit import quiet
from shoal.api.feed_rows import service_line
from shoal.api.handling import aside, handles
from shoal.api.http import Request, Response
from shoal.api.principal import THE_OPERATOR
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.web import HEADERS
from shoal.calls.cluster import ClusterCalls
from shoal.calls.page import PageCalls
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.status_page import StatusPage
from shoal.ports import StoreError

NAME = "status-page.json"  # a setting
FRESH_MS = 10_000
UP, SLOW, DOWN = "Operational", "Degraded", "Down"
RESOLVED = ", resolved"
WORDS = {"starting": "Starting", "stopping": DOWN}


class PublicPage:
    """Whoever asks, the cluster is looked at and the setting is read once in a while."""

    def __init__(self) -> None:
        self.body: bytes | None = None
        self.until_ms = 0

    def forget(self) -> None:
        self.until_ms = 0


class StatusPages:
    @handles(ClusterCalls.status_page)
    async def show(self, stores: Stores | None) -> StatusPage:
        return await aside(lambda: _read(stores))

    @handles(ClusterCalls.set_status_page)
    async def change(
        self, stores: Stores | None, public_page: PublicPage, data: StatusPage
    ) -> StatusPage:
        if stores is None:
            raise Refusal(404, "this cluster has no home")
        settings = stores.settings
        await aside(lambda: settings.set(NAME, msgspec.json.encode(data)))
        public_page.forget()
        return data


class PublicStatus:
    in_schema = False

    @handles(PageCalls.public_status, media_type="text/html")
    async def status(
        self,
        request: Request,
        loop: ControlLoop,
        stores: Stores | None,
        public_page: PublicPage,
    ) -> Response[bytes]:
        now_ms = loop.clock.now_ms()
        if now_ms >= public_page.until_ms:
            public_page.until_ms = now_ms + FRESH_MS  # the others get what there is meanwhile
            wanted = await aside(lambda: _read(stores))
            public_page.body = _page(loop, wanted, now_ms) if wanted.on else None
        if public_page.body is None:
            quiet(request.scope)
            raise Refusal(404, "Not Found")  # as for any path that there is not
        headers = {**HEADERS, "cache-control": f"public, max-age={FRESH_MS // 1000}"}
        return Response(public_page.body, media_type="text/html", headers=headers)


def _read(stores: Stores | None) -> StatusPage:
    try:
        found = stores.settings.get(NAME) if stores is not None else None
        return msgspec.json.decode(found, type=StatusPage) if found else StatusPage()
    except (StoreError, msgspec.DecodeError):
        return StatusPage()  # what cannot be read is shown to nobody


def _page(loop: ControlLoop, wanted: StatusPage, now_ms: int) -> bytes:
    lines = [
        ("Cluster", _cluster(loop)),
        *((name, _service(loop, name)) for name in wanted.services),
    ]
    worst = [word for _, word in lines if word != UP]
    verdict = "All systems operational" if not worst else "Some systems are not operational"
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{word}</td></tr>" for name, word in lines)
    notes = "".join(
        f"<li><b>{_moment(one.at_ms)}{RESOLVED if one.over else ''}</b>: {escape(one.text)}</li>"
        for one in wanted.incidents
    )
    title = escape(wanted.title or "Status")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><link rel="stylesheet" href="/web/style.css"></head><body><main>'
        f"<h1>{title}</h1><p>{verdict}</p>"
        f'<table><thead><tr><th scope="col">System</th><th scope="col">Status</th></tr></thead>'
        f"<tbody>{rows}</tbody></table><h2>Incidents</h2>"
        + (f"<ul>{notes}</ul>" if notes else "<p>None reported.</p>")
        + f"<p>As of {_moment(now_ms)}.</p></main></body></html>"
    ).encode()


def _cluster(loop: ControlLoop) -> str:
    """Not how many nodes there are, nor which."""
    nodes = [one for one in loop.state.nodes.values() if one.intent is not NodeIntent.REMOVED]
    lost = sum(one.health is NodeHealth.LOST for one in nodes)
    return DOWN if nodes and lost == len(nodes) else SLOW if lost else UP


def _service(loop: ControlLoop, name: str) -> str:
    service = loop.state.services.get(name)
    if service is None:
        return DOWN
    line = service_line(Reach(loop, THE_OPERATOR, None), service)
    if line.state == "failing":
        return SLOW if line.ready else DOWN
    return WORDS.get(line.state, UP)


def _moment(ms: int) -> str:
    return f"{datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC):%Y-%m-%d %H:%M} UTC"
