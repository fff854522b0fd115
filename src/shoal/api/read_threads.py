"""Threads that read the past, so that the loop never waits for a long list.

One thread reads long lists and encodes them as JSON, one after the other; short answers have their
own threads. The loop only sends the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from litestar import MediaType, Response

Result = TypeVar("Result")

LONG_ROWS = 500  # a longer list counts as long
ROWS_AT_ONCE = 100  # live jobs per piece; then the loop gets a turn

_short = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reading")
_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading-long")
_encode = msgspec.json.Encoder().encode


async def aside(work: Callable[[], Result], rows: int = 0) -> Result:
    """The work must not touch what belongs to the loop, above all the state."""
    pool = _long if rows > LONG_ROWS else _short
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def json_list(parts: list[bytes]) -> bytes:
    return b"[" + b",".join(part[1:-1] for part in parts if len(part) > len(b"[]")) + b"]"


def respond(body: bytes, headers: dict[str, str] | None = None) -> Response[Any]:
    return Response(body, media_type=MediaType.JSON, headers=headers)


def encoded(value: object) -> bytes:
    return _encode(value)
