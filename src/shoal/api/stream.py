"""`GET /v1/stream`: the cluster as server-sent events, a snapshot first and then what changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from litestar import Controller, Request
from litestar.response import Stream

from shoal.api.feed import Feed, Page, TooMany
from shoal.api.handling import handles
from shoal.api.principal import Principal
from shoal.api.problems import Refusal
from shoal.api.quotas import STREAM_RETRY_S
from shoal.calls.page import PageCalls

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
