"""An agent on another machine dials the head, and dials again whenever the link is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.channel import Dialled, Refused, dial
from shoal.files import write_private
from shoal.folder import LINK_FILE, LINK_PROBLEM
from shoal.wire import Link, LinkFile

log = logging.getLogger("shoal.agent")

PING_S = 5.0
SILENT_S = 20.0  # the head answers every ping: without an answer for this long, it is not there
# Pauses between attempts, each a random part of a span that doubles. When a head comes back, a
# thousand agents must not dial it at one moment.
SPAN_FIRST_S = 1.0
SPAN_MAX_S = 10.0
SPAN_REFUSED_S = 60.0  # a key that is refused is seldom accepted a moment later
SPAN_SHORT_S = 2.0  # after a link that was open, though not for long
HEALTHY_AFTER_S = 10.0
LOOK_S = 0.5  # at the file, while a link is not tried


class Dialling:
    """Keeps the link of a node's folder. `connect` makes the agent's end of each connection."""

    def __init__(self, directory: Path, connect: Callable[[], Link]) -> None:
        self._directory = directory
        self._connect = connect
        self._problem = ""
        self._turned_away = ""

    async def keep(self) -> None:
        """For ever. The file is read each time, because a key or a certificate may be replaced."""
        span_s = SPAN_FIRST_S
        while True:
            since, most_s = time.monotonic(), SPAN_MAX_S
            try:
                line = await self._reach()
                most_s = SPAN_SHORT_S
                await self._hold(line)
                if self._turned_away:
                    most_s = SPAN_REFUSED_S
            except Refused as error:
                most_s = SPAN_REFUSED_S
                self._note(f"the head does not accept this node's key ({error}); join again")
            except (OSError, TimeoutError, ValueError) as error:
                self._note(problem_text(error))
            if time.monotonic() - since > HEALTHY_AFTER_S:
                span_s = SPAN_FIRST_S
            await self._rest(pause_s(span_s))
            span_s = next_span_s(span_s, most_s)

    def turned_away(self, why: str) -> None:
        """By the head, over the link that is about to end."""
        self._turned_away = why
        self._note(f"{why}; join again with another --name and --home")

    async def _rest(self, seconds: float) -> None:
        """Shorter if the machine joins again meanwhile, which gives it another key."""
        before, until = self._changed_ns(), time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
            if self._changed_ns() != before:
                return

    def _changed_ns(self) -> int:
        with contextlib.suppress(OSError):
            return (self._directory / LINK_FILE).stat().st_mtime_ns
        return 0

    async def _reach(self) -> Dialled:
        """By the first URL that answers."""
        file = read_link_file(self._directory)
        problem: Exception = ValueError(f"{LINK_FILE} names no URL of the head; join again")
        for url in file.urls:
            try:
                return await dial(url, file, self._connect)
            except Refused:
                raise
            except (OSError, TimeoutError) as error:
                problem = OSError(f"{url}: {problem_text(error)}")
        raise problem

    async def _hold(self, line: Dialled) -> None:
        """Until it is lost. A link that is open at our end alone is noticed by its silence."""
        self._note("")
        self._turned_away = ""
        try:
            while not line.lost.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(line.lost), PING_S)
                    return
                if time.monotonic() - line.heard_at > SILENT_S:
                    log.warning("the head has not answered for %g s; dialling again", SILENT_S)
                    return
                assert line.channel is not None
                line.channel.ping()
        finally:
            line.abort()

    def _note(self, problem: str) -> None:
        """One line in the log for each kind of problem, and a file for whoever looks."""
        if problem == self._problem:
            return
        self._problem = problem
        log.warning("%s", problem) if problem else log.info("linked to the head")
        path = self._directory / LINK_PROBLEM
        with contextlib.suppress(OSError):
            if problem:
                write_private(path, problem.encode())
            else:
                path.unlink(missing_ok=True)


def pause_s(span_s: float) -> float:
    return random.uniform(span_s / 10, span_s)


def next_span_s(span_s: float, most_s: float) -> float:
    return min(most_s, span_s * 2)


def read_link_file(directory: Path) -> LinkFile:
    try:
        return msgspec.json.decode((directory / LINK_FILE).read_bytes(), type=LinkFile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{directory / LINK_FILE} is damaged ({error}); join again") from None


def problem_text(error: Exception) -> str:
    """In one line that says what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the head's certificate is not accepted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "the head does not answer"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
