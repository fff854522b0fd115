"""The accounts of the ledger: every GPU-millisecond of a node is in exactly one of them."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Account(enum.StrEnum):
    """docs/ledger.md says, second by second, what goes into which account."""

    USEFUL = "useful"
    SERVING = "serving"
    WARM = "warm"
    STARTUP = "startup"
    CHECKPOINT = "checkpoint"
    STRAGGLER = "straggler"
    RECOMPUTE = "recompute"
    PREEMPTED = "preempted"
    IDLE = "idle"
    FREE = "free"
    FRAGMENTED = "fragmented"
    RESERVED = "reserved"
    CLOSED = "closed"
    QUARANTINED = "quarantined"
    LOST = "lost"
    ASLEEP = "asleep"


class About(NamedTuple):
    """`load`: where a GPU's power lies between idle and busy in this account, in thousandths, if it
    was not measured; None: the GPU counts as off."""

    title: str
    group: str
    load: int | None


ABOUT: dict[Account, About] = {
    Account.USEFUL: About("useful work", "used", 1000),
    Account.SERVING: About("serving, busy", "used", 1000),
    Account.WARM: About("serving, warm but idle", "overhead", 0),
    Account.STARTUP: About("start-up", "overhead", 200),
    Account.CHECKPOINT: About("checkpoint stall", "overhead", 200),
    Account.ASLEEP: About("falling asleep or waking", "overhead", 200),
    Account.STRAGGLER: About("waiting for stragglers", "overhead", 500),
    Account.RECOMPUTE: About("lost to failures, done again", "wasted", 1000),
    Account.PREEMPTED: About("lost to preemption", "wasted", 1000),
    Account.IDLE: About("allotted but idle", "wasted", 0),
    Account.FREE: About("free, nothing waits", "unused", 0),
    Account.FRAGMENTED: About("free but unusable", "unused", 0),
    Account.RESERVED: About("reserved", "unused", 0),
    Account.CLOSED: About("closed by an operator", "away", 0),
    Account.QUARANTINED: About("quarantined", "away", 0),
    Account.LOST: About("lost or unreachable", "away", None),
}

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

# One GPU-thousandth for one millisecond is one GPU-microsecond: the unit of all amounts. They are
# whole numbers, so that sums are exact.
GPU_US_PER_GPU_MS = 1000
GPU_US_PER_GPU_HOUR = HOUR_MS * GPU_US_PER_GPU_MS


class Place(NamedTuple):
    """Where an amount is booked; `job` is empty for time that no job holds."""

    hour: int
    node: str
    job: str
    account: Account


class Move(NamedTuple):
    """A job's amount in `useful` on a node since hour `since`, except `firm` of that hour, belongs
    to another account: the work turned out to be lost."""

    job: str
    node: str
    since: int
    firm: int
    to: Account


# Whose amounts a report of the ledger shows.


class Only(NamedTuple):
    """Whose amounts are wanted; None: anybody's, "": of what has no name."""

    tenant: str | None = None
    user: str | None = None
    job: str | None = None

    @property
    def given(self) -> bool:
        return self != EVERYBODY

    def fits(self, tenant: str, user: str, job: str) -> bool:
        pairs = ((self.tenant, tenant), (self.user, user), (self.job, job))
        return all(wanted in (None, there) for wanted, there in pairs)

    @property
    def condition(self) -> tuple[str, tuple[str, ...]]:
        """More words for a query, and their values."""
        named = {'owners."user"': self.user, "owners.tenant": self.tenant, "owners.job": self.job}
        own = {column: value for column, value in named.items() if value is not None}
        return "".join(f"AND {column} = ? " for column in own), tuple(own.values())


EVERYBODY = Only()
