"""Postings: amounts by hour, node, job and account, also of time that no job holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shoal.ledger.accounts import HOUR_MS, Account, Debt, Meter, Move, Owed, Place, Tokens
from shoal.ledger.book_state import (
    BookState,
    GpuKind,
    Hardware,
    Job,
    Member,
    Node,
    Owner,
    Tally,
    Want,
)
from shoal.model.resources import WHOLE_GPU_MILLI

Part = tuple[Account, int, bool]  # account, ms, and whether the work in it is saved


class Addition(msgspec.Struct):
    """Amounts to add, in GPU-microseconds. `owners` and `machines` are the new ones."""

    amounts: dict[Place, int] = {}
    capacity: dict[tuple[int, str], int] = {}
    owners: dict[str, Owner] = {}
    machines: dict[str, Hardware] = {}
    # By hour, node and job, which is "" for nobody: mJ, and the GPU time that drew them.
    energy: dict[tuple[int, str, str], tuple[int, int]] = {}
    naps: dict[tuple[int, str], tuple[int, int]] = {}  # of jobs: ms asleep, and GPU time lent out
    tokens: dict[tuple[int, Meter], Tokens] = {}  # by hour
    # What neighbors ran, by hour: beside the capacity, which is of our own nodes.
    owed: dict[tuple[int, Debt], Owed] = {}

    def __bool__(self) -> bool:
        booked = self.amounts or self.capacity or self.energy or self.naps or self.tokens
        return bool(booked or self.owners or self.machines or self.owed)


Posting = Addition | Move


class Postings:
    """Collects postings, to be stored once each and in order."""

    def __init__(self, cluster: BookState | None = None, hour_ms: int = HOUR_MS) -> None:
        self.cluster = cluster or BookState()
        self.hour_ms = hour_ms
        self._entries: list[Posting] = []
        self.adds = Addition()

    # -- what comes out --------------------------------------------------------------------

    def drain(self) -> list[Posting]:
        """Everything that is certain by now and was not taken before."""
        entries = self._entries
        if self.adds:
            entries.append(self.adds)
        self._entries, self.adds = [], Addition()
        return entries

    def give_back(self, entries: list[Posting]) -> None:
        """These could not be stored; they are the first to be drained again."""
        self._entries = entries + self._entries

    def add(self, hour: int, node: str, job: str, account: Account, amount: int) -> None:
        if amount:
            place = Place(hour, node, job, account)
            amounts = self.adds.amounts
            amounts[place] = amounts.get(place, 0) + amount

    def move(self, move: Move) -> None:
        """Moves what was added before, and nothing that is added later."""
        self.turn()
        self._entries.append(move)

    def turn(self) -> None:
        """Later amounts go into a new addition."""
        if self.adds:
            self._entries.append(self.adds)
            self.adds = Addition()

    # -- members ---------------------------------------------------------------------------

    def book_member(self, job_id: str, job: Job, member: Member, parts: Iterable[Part]) -> None:
        """Book these consecutive parts of its time: (account, ms, whether the work is saved)."""
        for account, ms, firm in parts:
            end_ms = member.mark_ms + ms
            while member.mark_ms < end_ms:
                hour = member.mark_ms // self.hour_ms
                until_ms = min(end_ms, (hour + 1) * self.hour_ms)
                amount = (until_ms - member.mark_ms) * member.milli
                self.add(hour, member.node, job_id, account, amount)
                if account is Account.USEFUL:
                    _tally(job, member.node, hour, amount, firm)
                member.mark_ms = until_ms

    def saved(self, job: Job) -> None:
        """All its work up to now is saved."""
        hour = self.cluster.now_ms // self.hour_ms
        job.saved = True
        for tally in job.tallies.values():
            tally.firm = tally.useful if tally.hour == hour else 0
            tally.hour = tally.since = hour
            tally.useful = tally.firm

    def undone(self, job_id: str, job: Job, to: Account) -> None:
        """The work since it last saved is lost."""
        hour = self.cluster.now_ms // self.hour_ms
        for node_id, tally in job.tallies.items():
            self.move(Move(job_id, node_id, tally.since, tally.firm, to))
            tally.firm = tally.firm if tally.since == hour else 0
            tally.hour = tally.since = hour
            tally.useful = tally.firm


def _tally(job: Job, node_id: str, hour: int, amount: int, firm: bool) -> None:
    tally = job.tallies.get(node_id)
    if tally is None:
        tally = job.tallies[node_id] = Tally(hour, 0, hour, 0)
    if hour > tally.hour:
        tally.hour, tally.useful = hour, 0
    if hour == tally.hour:
        tally.useful += amount
    if firm:
        if hour > tally.since:
            tally.since, tally.firm = hour, amount
        elif hour == tally.since:
            tally.firm += amount


# The memo of naps: how long jobs slept, and the GPU time that they lent out by sleeping.


class Nap(NamedTuple):
    slept_ms: int = 0
    lent_us: int = 0  # GPU-microseconds

    def plus(self, other: Nap) -> Nap:
        return Nap(self.slept_ms + other.slept_ms, self.lent_us + other.lent_us)


def settle_naps(postings: Postings) -> None:
    for job_id, job in postings.cluster.jobs.items():
        if job.asleep_ms >= 0:
            settle_nap(postings, job_id, job)


def settle_nap(postings: Postings, job_id: str, job: Job) -> None:
    """Note its sleep up to now, before what it lends changes. This never spans two hours, because
    all naps are settled when an hour ends."""
    now_ms, hour = postings.cluster.now_ms, job.asleep_ms // postings.hour_ms
    passed_ms, job.asleep_ms = now_ms - job.asleep_ms, now_ms
    lent = sum(member.lent for member in job.members.values())
    if passed_ms and lent:
        naps, key = postings.adds.naps, (hour, job_id)
        slept_ms, lent_us = naps.get(key, (0, 0))
        naps[key] = (slept_ms + passed_ms, lent_us + passed_ms * lent)


# GPU time that no job holds: free, wanted but unusable, set aside or out of reach.


def settle_nodes(postings: Postings) -> None:
    for node_id, node in postings.cluster.nodes.items():
        settle_node(postings, node_id, node)


def settle_node(postings: Postings, node_id: str, node: Node) -> None:
    """Book the node's free time and capacity up to now. This never spans two hours, because all
    nodes are settled when an hour ends."""
    now_ms = postings.cluster.now_ms
    passed_ms = now_ms - node.mark_ms
    kind = postings.cluster.kinds[node.kind]
    wanted_ms, node.wanted_at = kind.wanted_ms - node.wanted_at, kind.wanted_ms
    hour, node.mark_ms = node.mark_ms // postings.hour_ms, now_ms
    if not passed_ms or not node.known or not node.gpus:
        return
    capacity = postings.adds.capacity
    key = (hour, node_id)
    capacity[key] = capacity.get(key, 0) + node.gpus * WHOLE_GPU_MILLI * passed_ms
    free, claimed = room_of(node)
    if node.away is not None:
        postings.add(hour, node_id, "", node.away, (free + claimed) * passed_ms)
        return
    postings.add(hour, node_id, "", Account.RESERVED, claimed * passed_ms)
    if node.whole:
        postings.add(hour, node_id, "", Account.FRAGMENTED, free * passed_ms)
    elif node.reserved:
        postings.add(hour, node_id, "", Account.RESERVED, free * passed_ms)
    else:
        postings.add(hour, node_id, "", Account.FRAGMENTED, free * wanted_ms)
        postings.add(hour, node_id, "", Account.FREE, free * (passed_ms - wanted_ms))


def new_node(postings: Postings, node_id: str, model: str, gpus: int, memory_mb: int) -> Node:
    """A node, or its next life, joins; its time is booked from now on."""
    cluster = postings.cluster
    key = f"{model}/{memory_mb}"
    if key not in cluster.kinds:
        cluster.kinds[key] = GpuKind(model, memory_mb)
        judge_wants(postings.cluster)
    before = cluster.nodes.get(node_id)
    node = Node(
        gpus=gpus,
        kind=key,
        mark_ms=cluster.now_ms,
        wanted_at=cluster.kinds[key].wanted_ms,
        held=[0] * gpus,
        claimed=[0] * gpus,
    )
    if before is not None:
        node.quarantined, node.reserved = before.quarantined, before.reserved
        node.intent = "open" if before.intent == "removed" else before.intent
    cluster.nodes[node_id] = node
    postings.turn()  # its time so far belongs to its old hardware
    postings.adds.machines[node_id] = Hardware(model, gpus)
    return node


def room_of(node: Node) -> tuple[int, int]:
    """The thousandths of its GPUs that no job holds: free, and claimed for a job."""
    if not any(node.claimed):  # nearly always true, and much cheaper
        return node.gpus * WHOLE_GPU_MILLI - sum(node.held), 0
    free = claimed = 0
    for held, wanted in zip(node.held, node.claimed, strict=True):
        left = WHOLE_GPU_MILLI - held
        taken = min(wanted, left)
        claimed += taken
        free += left - taken
    return free, claimed


def stands(cluster: BookState, job: Job) -> None:
    """The job wants GPUs from now on."""
    if job.gpus and not job.queued:
        job.queued = True
        _want(cluster, job, 1)


def leaves(cluster: BookState, job: Job) -> None:
    if job.queued:
        job.queued = False
        _want(cluster, job, -1)


def _want(cluster: BookState, job: Job, change: int) -> None:
    wants = cluster.wants
    key = "\n".join((job.owner.tenant, str(job.memory_mb), *job.models))
    want = wants.get(key)
    if want is None:
        want = wants[key] = Want(job.owner.tenant, job.models, job.memory_mb)
    want.jobs += change
    if want.jobs == 0:
        del wants[key]
    if want.jobs <= 1:
        judge_wants(cluster)


def is_held(cluster: BookState, tenant: str) -> bool:
    """Whether its budget, or that of a tenant above it, is used up."""
    for _ in range(len(cluster.parents) + 1):
        if tenant in cluster.held:
            return True
        tenant = cluster.parents.get(tenant, "")
    return False


def judge_wants(cluster: BookState) -> None:
    """Update which kinds of GPUs are wanted by a job that may start."""
    wants = [w for w in cluster.wants.values() if not is_held(cluster, w.tenant)]
    for kind in cluster.kinds.values():
        kind.wanted = any(
            kind.memory_mb >= want.memory_mb and (not want.models or kind.model in want.models)
            for want in wants
        )
