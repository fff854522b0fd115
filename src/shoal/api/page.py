"""The handlers that the page needs, and the dependencies that they share with all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from litestar import Controller, Request
from litestar.di import Provide
from litestar.response import Stream

from shoal.api.access import Access
from shoal.api.feed import Feed, Page, TooMany
from shoal.api.forms import Forms
from shoal.api.handling import handles
from shoal.api.moment import MomentApi
from shoal.api.oidc import OpenId, SignIns
from shoal.api.plan import Planner, Plans
from shoal.api.principal import Principal, principal_of
from shoal.api.problems import Refusal
from shoal.api.queue import Foresight, Waiting
from shoal.api.quotas import STREAM_RETRY_S
from shoal.api.reach import Reach
from shoal.api.simulate import Simulations, Simulator
from shoal.api.timeline import Timeline
from shoal.api.tls import Certificate
from shoal.api.web import Files, Sessions
from shoal.calls.page import PageCalls
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores

# `GET /v1/stream`: the cluster as server-sent events, a snapshot first and then what changes.


BEAT_S = 2.0  # a page gets something at least this often


class Live(Controller):
    include_in_schema = False  # it never ends

    @handles(PageCalls.stream)
    async def stream(self, feed: Feed, request: Request[Any, Any, Any], who: Principal) -> Stream:
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


HANDLERS: tuple[type[Controller], ...] = (
    Files,
    Sessions,
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
    simulator, foresight, planner = Simulator(loop, home), Foresight(), Planner()
    # A standby forwards all sign-ins.
    settings = stores.settings if stores is not None and stores.leads else None
    sign_ins = SignIns(settings, loop.clock.now_ms, loop.alarms)

    async def provide_feed() -> Feed:
        await loop.settled()
        return feed

    async def provide_reach(who: Principal) -> Reach:
        """Needs `who`, so that it is provided last: handlers start from the stored state."""
        await loop.settled()
        return Reach(loop, who)

    return {
        "who": Provide(principal_of, sync_to_thread=False),
        "reach": Provide(provide_reach),
        "access": Provide(lambda: access, sync_to_thread=False),
        "feed": Provide(provide_feed),
        "foresight": Provide(lambda: foresight, sync_to_thread=False),
        "sign_ins": Provide(lambda: sign_ins, sync_to_thread=False),
        "openid_on": Provide(lambda: sign_ins.on, sync_to_thread=False),
        "simulator": Provide(lambda: simulator, sync_to_thread=False),
        "planner": Provide(lambda: planner, sync_to_thread=False),
    }
