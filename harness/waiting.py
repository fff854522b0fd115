"""Waiting for a fact: the one way in which tests and benchmarks wait for real processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Only something that is broken takes as long as this, also on a busy machine.
WAIT_S = 180.0
LOOK_S = 0.02
# After a long wait it looks less often: most looks are requests, which cost CPU time.
LOOK_SHARE = 0.05


def until(
    fact: Callable[[], T],
    what: str = "not so",
    more: Callable[[], object] = str,
    *,
    within_s: float = WAIT_S,
    look_s: float = LOOK_S,
) -> T:
    """What the fact is once it is true. If it does not become true, the error says `what` was
    waited for, or is wrong, and `more` is asked for the rest of the story."""
    since = time.monotonic()
    while not (found := fact()):
        waited_s = time.monotonic() - since
        assert waited_s < within_s, f"waited {within_s:g} s: {what}\n{more()}"
        time.sleep(max(look_s, LOOK_SHARE * waited_s))
    return found


async def until_async(
    fact: Callable[[], T], what: str = "not so", more: Callable[[], object] = str
) -> T:
    """The same, while the event loop runs on."""
    since = time.monotonic()
    while not (found := fact()):
        waited_s = time.monotonic() - since
        assert waited_s < WAIT_S, f"waited {WAIT_S:g} s: {what}\n{more()}"
        await asyncio.sleep(max(LOOK_S, LOOK_SHARE * waited_s))
    return found
