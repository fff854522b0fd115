"""`GET /v1/stream`: the cluster as server-sent events, a snapshot first and then what changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from litestar import Controller, Request, get
from litestar.response import Stream

from shoal.api.feed import Feed, Page, TooMany
from shoal.api.problems import Refusal


class Live(Controller):
    path = "/v1/stream"
    include_in_schema = False  # it never ends

    @get()
    async def stream(self, feed: Feed, request: Request[Any, Any, Any]) -> Stream:
        try:
            page = feed.open(request.headers.get("last-event-id", ""))
        except TooMany as error:
            raise Refusal(503, str(error)) from None
        return Stream(
            _pieces(feed, page),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )


async def _pieces(feed: Feed, page: Page) -> AsyncIterator[bytes]:
    """Until the page goes away, or is too slow, or the controller ends."""
    try:
        yield b"retry: 1000\n\n"
        while (piece := await page.pieces.get()) is not None:
            yield piece
    finally:
        feed.close(page)
