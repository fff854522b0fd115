"""The node's side of leases: until when its members may live, by a clock that nobody sets.

Pure, as `NodeBook`, which it is a part of. A lease names a report of this node and a time that
counts from when that was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from shoal.model.commands import Launch, Lease
from shoal.model.job import MemberRef
from shoal.model.report import Leased

SENT_KEPT = 128  # reports: a controller that lags further behind gets through with a later one


class Kept(NamedTuple):
    until_ms: int  # by the cluster's clock
    deadline_ms: int  # by the node's


class LeaseBook:
    def __init__(self) -> None:
        self.clock: Callable[[], int] = int  # of the node, in ms; it counts while it is suspended
        self.lapsed: dict[MemberRef, int] = {}  # members that were stopped, and their leases
        self._sent: dict[int, int] = {}  # report -> when, at the latest, it was not sent yet
        self._kept: dict[MemberRef, Kept] = {}

    def reports(self, sequence: int) -> None:
        """A report is about to be made."""
        self._sent[sequence] = self.clock()
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]

    def take(self, ref: MemberRef, lease: Lease | msgspec.UnsetType) -> bool:
        """Whether it is known how long the member may live. A lease only becomes longer."""
        if lease is msgspec.UNSET:
            return True
        sent_ms = self._sent.get(lease.sequence)
        if sent_ms is None:
            return False
        before = self._kept.get(ref)
        if before is None or before.until_ms < lease.until_ms:
            self._kept[ref] = Kept(lease.until_ms, sent_ms + lease.for_ms)
        return True

    def left_ms(self, launch: Launch) -> int | None:
        """Until it has to be told to end, so that its grace time is over in time; None: it has no
        lease."""
        kept = self._kept.get(launch.ref)
        if kept is None:
            return None
        return kept.deadline_ms - launch.stop_grace_ms - self.clock()

    def lapse(self, ref: MemberRef) -> None:
        self.lapsed[ref] = self._kept[ref].until_ms

    def forget(self, ref: MemberRef) -> int:
        """Its lease, if it was stopped for that."""
        self._kept.pop(ref, None)
        return self.lapsed.pop(ref, 0)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def told(self) -> tuple[Leased, ...]:
        return tuple(Leased(ref, kept.until_ms) for ref, kept in self._kept.items())
