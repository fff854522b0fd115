"""Ends what a sender has open as soon as the sender would no longer be let in (ADR 86).

Every request is entered here by the guard that lets it in, so no route can forget to. People change
by events, and each such event has all that is open looked at again; a token or a session that
expires has a timer. A stream is cut: its task is cancelled, whatever it waits for. A plain request
is left to its answer, unless it is still being sent: then it never begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.api.principal import Principal, Proof
from shoal.api.problems import Refusal
from shoal.calls.call import Needs
from shoal.ports import StoreError

ENDED = "the token ended while this was under way; ask an admin for another, then: shoal login"
REFUSED = 4403  # the code with which a websocket is closed
# A timer is set anew this often, because the clock that tokens expire by may be set.
TIMER_S_MAX = 60.0
AGAIN_S = 1.0  # while the state cannot be read

Stands = Callable[[Proof], Principal | None]


class Entry:
    """One request, from the moment it comes until it is over."""

    __slots__ = ("needs", "proof", "started", "stream", "task", "timer", "void", "watcher")

    def __init__(self) -> None:
        self.watcher: Watcher | None = None  # None: its sender is not known, so it has no authority
        self.proof: Proof | None = None
        self.needs = Needs.OPEN
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.stream = self.started = self.void = False

    def end(self) -> None:
        self.void = True
        if self.stream and self.task is not None:
            self.task.cancel()

    def leave(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.watcher is not None:
            self.watcher.entries.discard(self)

    def becomes_stream(self) -> None:
        """From now on nobody knows when it ends."""
        if self.void:
            raise Refusal(401, ENDED)
        self.stream = True
        if self.watcher is not None:
            self.watcher.time(self)


class Watcher:
    """`stands`: who a request's sender is by now; None: nobody."""

    def __init__(self, stands: Stands, now_ms: Callable[[], int]) -> None:
        self.entries: set[Entry] = set()
        self._stands, self._now_ms = stands, now_ms

    def enter(self, entry: Entry, proof: Proof, needs: Needs, *, stream: bool) -> None:
        entry.watcher, entry.proof, entry.needs = self, proof, needs
        entry.task = asyncio.current_task()
        self.entries.add(entry)
        if stream:
            entry.becomes_stream()

    def look(self) -> None:
        """People have changed."""
        for entry in [entry for entry in self.entries if not self._holds(entry)]:
            self.entries.discard(entry)
            entry.end()

    def time(self, entry: Entry) -> None:
        """Look at it when what it showed expires."""
        until_ms = entry.proof.until_ms if entry.proof is not None else 0
        if until_ms and not entry.void:
            left_s = min(TIMER_S_MAX, max(0, until_ms - self._now_ms()) / 1000)
            self._later(entry, left_s)

    def _later(self, entry: Entry, delay_s: float) -> None:
        entry.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        try:
            holds = self._holds(entry)
        except StoreError:
            self._later(entry, AGAIN_S)  # nobody can say so now
            return
        if holds:
            self.time(entry)
        else:
            self.entries.discard(entry)
            entry.end()

    def _holds(self, entry: Entry) -> bool:
        """A sender who sees less than before has lost what it was given then."""
        if entry.proof is None:
            return True
        then, now = entry.proof.who, self._stands(entry.proof)
        return now is then or (
            now is not None
            and now.may(entry.needs)
            and (now.admin or not then.admin)
            and (now.user, now.tenant, now.node) == (then.user, then.tenant, then.node)
        )
