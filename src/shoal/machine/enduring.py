"""Tasks that must not end: when one fails, that is logged, and it begins again after a pause."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("shoal")

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
# Work that ran this long without a failure has recovered: the next pause is short again.
WELL_AFTER_S = 60.0


async def enduring(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work until it returns or is cancelled; an exception only makes it begin again.

    Nobody notices an asyncio task that dies, until it is collected. All tasks that a cluster
    cannot do without run in here.
    """
    pause_s = PAUSE_FIRST_S
    while True:
        since = time.monotonic()
        try:
            await work()
            return
        except Exception as error:
            if time.monotonic() - since > WELL_AFTER_S:
                pause_s = PAUSE_FIRST_S
            if isinstance(error, OSError):  # the machine is at fault: its message says enough
                log.error("%s failed: %s; again in %g s", what, error, pause_s)
            else:
                log.exception("%s failed; again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_MAX_S, pause_s * 2)
