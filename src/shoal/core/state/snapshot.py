"""The state without its indexes: what is stored of it."""

from __future__ import annotations

import msgspec

from shoal.core.health.baseline import Fleet
from shoal.core.health.failures import Book
from shoal.core.scheduling.fragments import Task
from shoal.core.state.accounts import Account
from shoal.core.state.estimates import Group
from shoal.core.state.records import Ages, Reservation, Wear
from shoal.model.budget import BudgetLevel
from shoal.model.health import Record, Standing
from shoal.model.job import Job
from shoal.model.node import NodeHealth, NodeIntent, NodeSpec
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from shoal.model.service import Service


class Node(msgspec.Struct, kw_only=True):
    """A node as the controller sees it. `index` is its place in join order and never changes."""

    spec: NodeSpec
    index: int
    incarnation: int
    health: NodeHealth = NodeHealth.JOINING
    intent: NodeIntent = NodeIntent.OPEN
    dead: bool = False  # lost for certain: this incarnation can never speak again
    since_ms: int = 0
    why: str = ""
    record: Record = Record()  # what is thought of its work
    leaving: bool = False  # its intent is its own: it wants to go

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def schedulable(self) -> bool:
        return (
            self.health is NodeHealth.READY
            and self.intent is NodeIntent.OPEN
            and self.record.standing is not Standing.QUARANTINED
        )


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state without its indexes: what is stored, and what two equal states agree on."""

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
    mix: list[tuple[Task, int]] = []
    failures: Book = msgspec.field(default_factory=Book)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    services: list[Service] = []
    budgets: dict[str, BudgetLevel] = {}
    drift_ms: int = 0
