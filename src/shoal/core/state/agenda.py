"""What the next steps still have to look at, and when they last tried. It paces the step."""

from __future__ import annotations

from shoal.core.books.stoppable import Stoppable
from shoal.core.state.queue import Gang, Lane


class Agenda:
    """Any phase may write here; nothing of it is stored. A new agenda looks at everything: that
    costs time and may decide something earlier, but is never wrong."""

    def __init__(self) -> None:
        self.attention: dict[str, None] = {}  # jobs that `heal` must look at
        self.look_ms: int | None = 0  # when to look at the whole queue again
        self.partial = 0  # cycles since then that looked at parts of the queue
        self.fresh: dict[Lane, None] = {}  # lanes that a job joined since the last cycle
        self.turn_for: str | None = None  # the job that has the next turns
        self.beds: dict[str, None] = {}  # sleepers that may have room to wake
        self.hopeless: set[Gang] = set()  # do not fit until a node gains room for them
        # Gangs in the queue that are not hopeless; None: not counted yet.
        self.hopeful: dict[Gang, None] | None = None
        self.no_gap: set[tuple[Gang, tuple[str, ...]]] = set()  # fit only on nodes of these jobs
        # Lanes in which no job found a gap beside the nodes reserved for these jobs.
        self.stuck: dict[Lane, tuple[str, ...]] = {}
        self.looked_ms: dict[str, int] = {}  # blocked job -> when an opening was last sought
        self.moves_ms: dict[str, int] = {}  # blocked job -> when a move was last tried for it
        self.stoppable = Stoppable()  # running jobs that may be stopped, by entitlement
        self.ends_ms: int | None = 0  # when to look at the nodes that end
        self.watch_ms: int | None = None  # when to look for jobs that hang
        self.supply_ms: int | None = 0  # when to look at supplies and orders again
        self.supplied_ms = 0  # when that was last done
        # Waits to report: heap of (when, job number, since when it waits, after how long); None:
        # look at all waiting jobs.
        self.waits: list[tuple[int, int, int, int]] | None = None
        self.waits_max = 0  # more are mostly of jobs that no longer wait
        self.windows: dict[str, int] = {}  # array -> how many elements may wait at a time
        self.serve_ms: int | None = None  # when to look at the services again
        # Services that may have something to do; None: all of them, or there are none.
        self.unserved: dict[str, None] | None = None
        self.late_ms: dict[str, int] = {}  # other service -> when a replica of it is too late

    def look_again(self, at_ms: int) -> None:
        """Look at the whole queue at that time: a job may be able to start then."""
        if self.look_ms is None or at_ms < self.look_ms:
            self.look_ms = at_ms

    def look_at_ends(self, at_ms: int) -> None:
        if self.ends_ms is None or at_ms < self.ends_ms:
            self.ends_ms = at_ms

    def joined(self, lane: Lane) -> None:
        self.fresh[lane] = None
        self.stuck.pop(lane, None)
        if self.hopeful is not None and lane.gang not in self.hopeless:
            self.hopeful[lane.gang] = None

    def left(self, lane: Lane, *, empty: bool, last: bool) -> None:
        """`empty`: nobody is left in the lane; `last`: nor in another one of its gang."""
        self.stuck.pop(lane, None)
        if empty:
            self.fresh.pop(lane, None)
        if last and self.hopeful is not None:
            self.hopeful.pop(lane.gang, None)

    def despair(self, gang: Gang) -> None:
        """It fits nowhere until a node gains room for it."""
        self.hopeless.add(gang)
        if self.hopeful is not None:
            self.hopeful.pop(gang, None)

    def hope(self) -> None:
        """Any gang may fit somewhere now."""
        self.hopeless = set()
        self.hopeful = None

    def other_gaps(self) -> None:
        """Reservations have changed: there may now be room beside them."""
        self.no_gap.clear()
        self.stuck.clear()
