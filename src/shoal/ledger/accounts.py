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
    Account.USEFUL: About("Useful work", "used", 1000),
    Account.SERVING: About("Serving, busy", "used", 1000),
    Account.WARM: About("Serving, idle", "overhead", 0),
    Account.STARTUP: About("Startup", "overhead", 200),
    Account.CHECKPOINT: About("Checkpointing", "overhead", 200),
    Account.ASLEEP: About("Suspending or resuming", "overhead", 200),
    Account.STRAGGLER: About("Waiting for stragglers", "overhead", 500),
    Account.RECOMPUTE: About("Lost to failures", "wasted", 1000),
    Account.PREEMPTED: About("Lost to preemption", "wasted", 1000),
    Account.IDLE: About("Allocated, idle", "wasted", 0),
    Account.FREE: About("Free, no demand", "unused", 0),
    Account.FRAGMENTED: About("Free, fragmented", "unused", 0),
    Account.RESERVED: About("Reserved", "unused", 0),
    Account.CLOSED: About("Drained or cordoned", "away", 0),
    Account.QUARANTINED: About("Quarantined", "away", 0),
    Account.LOST: About("Unreachable", "away", None),
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


class Meter(NamedTuple):
    """Who used tokens of which service. `caller`: the id of a key, "" for everybody without one;
    `tenant`: whose key it is; `owner`: the tenant of the service."""

    service: str
    owner: str
    caller: str
    tenant: str


class Tokens(NamedTuple):
    """`prompt` is with those that were `cached`."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, other: Tokens) -> Tokens:
        return Tokens(*(max(0, a - b) for a, b in zip(self, other, strict=True)))


class Debt(NamedTuple):
    """For whose jobs, and to whom."""

    neighbor: str
    tenant: str


class Owed(NamedTuple):
    """What a neighbor has counted for jobs of ours that it ran. `money`: in millionths."""

    jobs: int = 0
    gpu_ms: int = 0
    money: int = 0

    def plus(self, other: Owed) -> Owed:
        return Owed(*(a + b for a, b in zip(self, other, strict=True)))


class Move(NamedTuple):
    """A job's amount in `useful` on a node since hour `since`, except `firm` of that hour, belongs
    to another account: the work turned out to be lost."""

    job: str
    node: str
    since: int
    firm: int
    to: Account


class Sum(NamedTuple):
    """A key's time in one account, on machines that cost the same, and the energy that was measured
    for a part of it."""

    key: str | int
    label: str
    rate: int
    account: Account
    gpu_us: int
    measured_us: int = 0
    energy_mj: float = 0.0


# Whose amounts a report of the ledger shows.


class Only(NamedTuple):
    """Whose amounts are wanted; None: anybody's, "": of what has no name."""

    tenant: str | None = None
    user: str | None = None
    job: str | None = None
    array: str | None = None  # the elements of this one

    @property
    def given(self) -> bool:
        return self != EVERYBODY

    def fits(self, tenant: str, user: str, job: str) -> bool:
        pairs = ((self.tenant, tenant), (self.user, user), (self.job, job))
        mine = self.array is None or job.startswith(f"{self.array}.")
        return mine and all(wanted in (None, there) for wanted, there in pairs)

    @property
    def condition(self) -> tuple[str, tuple[str, ...]]:
        """More words for a query, and their values."""
        named = {'owners."user"': self.user, "owners.tenant": self.tenant, "owners.job": self.job}
        own = {column: value for column, value in named.items() if value is not None}
        words, values = "".join(f"AND {column} = ? " for column in own), tuple(own.values())
        if self.array is not None:
            return f"{words}AND owners.job LIKE ? ", (*values, f"{self.array}.%")
        return words, values


EVERYBODY = Only()
