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
from urllib.parse import urlsplit

import msgspec

from shoal.client.reaching import HEADS_MAX
from shoal.link.channel import Dialled, NotLeading, Refused, Unanswered, dial
from shoal.link.wire import Link, LinkFile
from shoal.machine.files import LINK_FILE, LINK_PROBLEM, write_private

log = logging.getLogger("shoal.agent")

PING_S = 5.0
SILENT_S = 20.0  # the head answers every ping: without an answer for this long, it is not there
# The same where another head may lead meanwhile.
PING_OFTEN_S, SILENT_SHORT_S = 1.5, 6.0
# Pauses between attempts, each a random part of a span that doubles. When a head comes back, a
# thousand agents must not dial it at one moment.
SPAN_FIRST_S = 1.0
SPAN_MAX_S = 10.0
SPAN_REFUSED_S = 60.0  # a key that is refused is seldom accepted a moment later
SPAN_SHORT_S = 2.0  # after a link that was open, though not for long; between several heads
HEALTHY_AFTER_S = 10.0
LOOK_S = 0.5  # at the file, while a link is not tried


class Dialling:
    """Keeps the link of a node's folder. `connect` makes the agent's end of each connection."""

    def __init__(self, directory: Path, connect: Callable[[], Link]) -> None:
        self._directory = directory
        self._connect = connect
        self._problem = ""
        self._turned_away = ""
        self._alive: list[str] = []  # heads that answered, the last one first
        self._several = False

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
                most_s = SPAN_SHORT_S if self._several else SPAN_MAX_S
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

    def learn(self, heads: tuple[str, ...]) -> None:
        """The URLs of all heads, from the one that leads. They are kept for the next life, too."""
        with contextlib.suppress(OSError, ValueError):  # the next link says it again
            file = read_link_file(self._directory)
            secure = all(url.startswith("https:") for url in file.urls)
            known = tuple(url for url in heads[:HEADS_MAX] if may_dial(url, secure))
            if known and known != file.heads:
                file = msgspec.structs.replace(file, heads=known)
                write_private(self._directory / LINK_FILE, msgspec.json.encode(file))
                self._several = True

    async def _reach(self) -> Dialled:
        """By the first URL that answers, beginning with those that did so before. A head that does
        not lead says which one does."""
        file = read_link_file(self._directory)
        problem = Problem(f"{LINK_FILE} names no URL of the head; join again", -1)
        ways = file.ways
        self._several = bool(file.heads)
        left = sorted(ways, key=lambda url: self._alive.index(url) if url in self._alive else 99)
        while left:
            url = left.pop(0)
            try:
                made = await dial(url, file, self._connect)
                self._answered(url)
                return made
            except Refused:
                self._answered(url)
                raise
            except NotLeading as error:
                self._answered(url)
                problem = worse(problem, url, error)
                if error.leader in left:
                    left.remove(error.leader)
                    left.insert(0, error.leader)
            except (OSError, TimeoutError) as error:
                if not isinstance(error, Unanswered) and url in self._alive:
                    self._alive.remove(url)
                problem = worse(problem, url, error)
        raise problem

    def _answered(self, url: str) -> None:
        self._alive = [url, *(one for one in self._alive if one != url)][:HEADS_MAX]

    async def _hold(self, line: Dialled) -> None:
        """Until it is lost. A link that is open at our end alone is noticed by its silence."""
        self._note("")
        self._turned_away = ""
        try:
            while not line.lost.done():
                ping_s, silent_s = PING_S, SILENT_S
                if self._several:
                    ping_s, silent_s = PING_OFTEN_S, SILENT_SHORT_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(line.lost), ping_s)
                    return
                if time.monotonic() - line.heard_at > silent_s:
                    log.warning("the head has not answered for %g s; dialling again", silent_s)
                    self._alive = self._alive[1:]  # it is tried last
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


class Problem(OSError):
    """Why no head was reached: what the one says that came closest."""

    def __init__(self, text: str, closeness: int) -> None:
        super().__init__(text)
        self.closeness = closeness


def worse(before: Problem, url: str, error: Exception) -> Problem:
    """The later one, unless the one before tells more: a certificate can be replaced, and a head
    that answers is more than one that does not."""
    closeness = 2 if isinstance(error, ssl.SSLError) else int(isinstance(error, NotLeading))
    return max(Problem(f"{url}: {problem_text(error)}", closeness), before, key=_closeness)


def _closeness(problem: Problem) -> int:
    return problem.closeness


def may_dial(url: str, secure: bool) -> bool:
    """Never less safely than by the URLs with which the machine joined."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        return False
    return named and (parts.scheme == "https" or (parts.scheme == "http" and not secure))


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
