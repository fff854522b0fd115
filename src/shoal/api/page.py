"""The handlers that the page needs, and the dependencies that they share with all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from shoal.api.access import Access
from shoal.api.feed import Feed, Page, TooMany
from shoal.api.forms import Forms
from shoal.api.handling import handles
from shoal.api.http import Connection, Request, Stream
from shoal.api.moment import MomentApi
from shoal.api.oidc import OpenId, SignIns
from shoal.api.plan import Planner, Plans
from shoal.api.principal import SCOPE, Principal
from shoal.api.problems import Refusal
from shoal.api.queue import Foresight, Waiting
from shoal.api.quotas import STREAM_RETRY_S
from shoal.api.reach import RECORD, Reach
from shoal.api.routing import Provide
from shoal.api.simulate import Simulations, Simulator
from shoal.api.status_page import PublicPage, PublicStatus
from shoal.api.timeline import Timeline
from shoal.api.tls import Certificate
from shoal.api.web import Files, Sessions
from shoal.calls.page import PageCalls
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores

# `GET /v1/stream`: the cluster as server-sent events, a snapshot first and then what changes.


BEAT_S = 2.0  # a page gets something at least this often


class Live:
    in_schema = False  # it never ends

    @handles(PageCalls.stream)
    async def stream(self, feed: Feed, request: Request, who: Principal) -> Stream:
        try:
            tenant = "" if who.sees_all else who.tenant
            page = feed.open(request.headers.get("last-event-id", ""), tenant)
        except TooMany as error:
            raise Refusal(503, str(error), retry_s=STREAM_RETRY_S) from None
        return Stream(
            pieces(feed, page),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )


async def pieces(feed: Feed, page: Page) -> AsyncGenerator[bytes, None]:
    """Runs until the page closes, is too slow, or the controller ends."""
    try:
        yield b"retry: 1000\n\n"
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    piece = await page.pieces.get()
            except TimeoutError:
                yield feed.beat()
                continue
            if piece is None:
                return
            yield piece + feed.beat()
    finally:
        feed.close(page)


HANDLERS: tuple[type, ...] = (
    Files,
    Sessions,
    PublicStatus,
    OpenId,
    Live,
    Waiting,
    Timeline,
    MomentApi,
    Forms,
    Simulations,
    Plans,
    Certificate,
)


def provided(
    loop: ControlLoop, access: Access, feed: Feed, home: Path | None, stores: Stores | None
) -> dict[str, Provide]:
    public_page = PublicPage()
    simulator, foresight, planner = Simulator(loop, home), Foresight(), Planner()
    # A standby forwards all sign-ins.
    settings = stores.settings if stores is not None and stores.leads else None
    sign_ins = SignIns(settings, loop.clock.now_ms, loop.alarms)

    def reach_of(connection: Connection) -> Reach:
        return Reach(loop, connection.scope[SCOPE], connection.scope.get(RECORD))

    return {
        "reach": reach_of,
        "access": lambda _: access,
        "feed": lambda _: feed,
        "foresight": lambda _: foresight,
        "sign_ins": lambda _: sign_ins,
        "openid_on": lambda _: sign_ins.on,
        "simulator": lambda _: simulator,
        "planner": lambda _: planner,
        "public_page": lambda _: public_page,
    }
