"""The facts: what events wrote, and what a snapshot stores."""

from __future__ import annotations

import msgspec

from shoal.core.books.baseline import Fleet
from shoal.core.books.failures import FailureBook
from shoal.core.books.foresight import Mix
from shoal.core.books.vacancy import Footprint
from shoal.core.state.accounts import Account, Accounts
from shoal.core.state.estimates import Estimates, Group
from shoal.core.state.records import Ages, Reservation, Wear
from shoal.model.away import Stray
from shoal.model.budget import BudgetLevel
from shoal.model.fabric import Fabric
from shoal.model.health import Record, Standing
from shoal.model.identity import Identity
from shoal.model.job import Job
from shoal.model.labels import NODE, changed, taint_pairs, taint_text
from shoal.model.node import End, NodeHealth, NodeIntent, NodeSpec
from shoal.model.notice import Rule
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from shoal.model.schedule import Schedule
from shoal.model.service import Service
from shoal.model.supply import Order, Setback


class Node(msgspec.Struct, kw_only=True):
    """A node as the controller sees it. `index` is its place in join order and never changes."""

    spec: NodeSpec
    index: int
    incarnation: int
    health: NodeHealth = NodeHealth.JOINING
    intent: NodeIntent = NodeIntent.OPEN
    dead: bool = False  # lost for certain: this incarnation can never report again
    since_ms: int = 0
    why: str = ""
    record: Record = Record()  # its standing and the reasons for it
    leaving: bool = False  # the node itself asked to leave
    own_end: End | None = None  # as the node itself says
    set_end: End | None = None  # as an operator wants it
    # What was intended before it was drained because its end was near; None: it was not.
    closed_from: NodeIntent | None = None
    intent_why: str = ""  # who set its intent, and why; empty: an earlier version did
    intent_ms: int = 0
    # What people have changed of the labels and taints that the node reports; None: removed.
    labels_set: dict[str, str | None] = {}
    # How fast members' state moved to its memory and back, as last seen; 0: not seen yet.
    sleep_mb_s: int = 0
    wake_mb_s: int = 0
    taints_set: dict[str, str | None] = {}

    @property
    def labels(self) -> dict[str, str]:
        return changed(self.spec.labels, {**self.labels_set, NODE: self.spec.id})

    def label(self, key: str) -> str | None:
        """As in `labels`, without making all of them."""
        if key == NODE:
            return self.spec.id
        return self.labels_set[key] if key in self.labels_set else self.spec.labels.get(key)

    @property
    def taints(self) -> tuple[str, ...]:
        if not self.taints_set:
            return self.spec.taints
        pairs = changed(taint_pairs(self.spec.taints), self.taints_set)
        return tuple(taint_text(key, value) for key, value in pairs.items())

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def end(self) -> End | None:
        """The earlier of its ends."""
        if self.own_end is None or self.set_end is None:
            return self.own_end or self.set_end
        return min(self.own_end, self.set_end, key=lambda end: end.at_ms)

    @property
    def ends_ms(self) -> int | None:
        return None if self.end is None else self.end.at_ms

    @property
    def ends_why(self) -> str:
        return "" if self.end is None else self.end.why

    @property
    def schedulable(self) -> bool:
        return (
            self.health is NodeHealth.READY
            and self.intent is NodeIntent.OPEN
            and self.record.standing is not Standing.QUARANTINED
        )


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The facts as they are stored. Two states are equal if their snapshots are."""

    epoch: int
    next_job: int
    next_port: int
    submitted: int
    finished: int
    jobs: list[Job]
    nodes: list[Node]
    policy: Policy = Policy()
    accounts: dict[str, Account] = {}
    estimates: dict[str, Group] = {}
    ages: Ages = msgspec.field(default_factory=Ages)
    wear: Wear = msgspec.field(default_factory=Wear)
    reservations: dict[str, Reservation] = {}
    claims: dict[str, tuple[Slice, ...]] = {}
    mix: list[tuple[Footprint, int]] = []
    failures: FailureBook = msgspec.field(default_factory=FailureBook)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    services: list[Service] = []
    budgets: dict[str, BudgetLevel] = {}
    held_keys: dict[str, tuple[str, int]] = {}
    drift_ms: int = 0
    identity: Identity = msgspec.field(default_factory=Identity)
    next_order: int = 1
    orders: list[Order] = []
    setbacks: dict[str, Setback] = {}
    asked: list[str] = []
    schedules: list[Schedule] = []
    rules: list[Rule] = []
    next_rule: int = 1
    arrays: list[Job] = []
    restored_job: int = 0
    restored_attempt: int = 0
    strays: dict[str, Stray] = {}
    fabric: Fabric = Fabric()


class Facts:
    """Only `apply` changes these; tests/test_architecture.py verifies that."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next_job = 1
        self.next_port = 0
        # Jobs below this number are older than the last restore. Nodes may have seen attempts of
        # theirs that the log does not show, so the next one has this number at least.
        self.restored_job = self.restored_attempt = 0
        self.submitted = self.finished = 0  # how many jobs
        self.drift_ms = 0  # how far the machine's clock was ahead of ours when last reported
        self.policy = Policy()
        self.jobs: dict[str, Job] = {}  # live jobs only: finished ones are in the store
        self.arrays: dict[str, Job] = {}  # with `elements`, of which some are pending or live
        self.nodes: dict[str, Node] = {}
        self.services: dict[str, Service] = {}
        self.accounts = Accounts(self.policy)
        self.identity = Identity()  # tenants, users and tokens
        self.estimates = Estimates()
        self.ages = Ages()
        self.wear = Wear()
        self.mix = Mix()  # the kinds of jobs that were submitted
        self.failures = FailureBook()  # by a job's own error: separates bad nodes from bad jobs
        self.fleet = Fleet()  # what nodes usually measure
        self.fabric = Fabric()  # what the network between nodes was measured to be
        self.reservations: dict[str, Reservation] = {}  # of blocked jobs
        self.claims: dict[str, tuple[Slice, ...]] = {}  # of jobs that others are stopped for
        self.next_order = 1
        self.orders: dict[str, Order] = {}  # that have not ended, oldest first
        self.setbacks: dict[str, Setback] = {}  # of supplies whose last orders failed
        self.next_rule = 1
        self.rules: dict[str, Rule] = {}  # for notices, oldest first
        self.schedules: dict[str, Schedule] = {}  # by TENANT/NAME
        self.strays: dict[str, Stray] = {}  # JOB/ATTEMPT: hand-overs that were given up
        self.asked: dict[str, None] = {}  # labels and taints that some job asked about

    def snapshot(self) -> Snapshot:
        return Snapshot(
            epoch=self.epoch,
            next_job=self.next_job,
            next_port=self.next_port,
            submitted=self.submitted,
            finished=self.finished,
            jobs=list(self.jobs.values()),
            nodes=list(self.nodes.values()),
            policy=self.policy,
            accounts=self.accounts.own,
            estimates=self.estimates.groups,
            ages=self.ages,
            wear=self.wear,
            reservations=self.reservations,
            claims=self.claims,
            mix=list(self.mix.counts.items()),
            failures=self.failures,
            fleet=self.fleet,
            services=list(self.services.values()),
            budgets=self.accounts.budgets,
            held_keys=self.accounts.held_keys,
            drift_ms=self.drift_ms,
            identity=self.identity,
            next_order=self.next_order,
            orders=list(self.orders.values()),
            setbacks=self.setbacks,
            asked=list(self.asked),
            schedules=list(self.schedules.values()),
            rules=list(self.rules.values()),
            next_rule=self.next_rule,
            arrays=list(self.arrays.values()),
            restored_job=self.restored_job,
            restored_attempt=self.restored_attempt,
            strays=self.strays,
            fabric=self.fabric,
        )
