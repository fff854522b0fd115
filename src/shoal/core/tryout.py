"""Tries a policy on a small cluster and on a copy of the real one before it takes effect."""

from __future__ import annotations

import msgspec

from shoal.core.invariants import verify
from shoal.core.nodebook import NodeBook
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.image import decoded, encoded
from shoal.core.state.load import restore
from shoal.core.state.state import Functions, State
from shoal.core.step import step
from shoal.model.commands import Command, Envelope
from shoal.model.ids import in_order
from shoal.model.job import JobSpec, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Report, Submit

ROUNDS = 24
ROUND_MS = 400_000  # longer than the shipped policies leave a job alone before they stop it
NODES = 4
SHIPPED = Policy()


def problem(policy: Policy, functions: Functions, image: bytes, now_ms: int) -> str | None:
    """What goes wrong under the policy, as `field: sentence`. `image` is a snapshot of
    the state; it may be empty."""
    wrong = _failure(policy, functions, image, now_ms)
    if wrong is None:
        return None
    for field in ("placement", "order"):
        named = getattr(policy, field)
        plain = msgspec.structs.replace(policy, **{field: getattr(SHIPPED, field)})
        ours = named in FUNCTIONS.orders or named in FUNCTIONS.placements
        if not ours and _failure(plain, functions, image, now_ms) is None:
            return f"{field}: {named} fails when it is tried out: {wrong}"
    return f"policy: fails when it is tried out: {wrong}"


def _failure(policy: Policy, functions: Functions, image: bytes, now_ms: int) -> str | None:
    try:
        _on_a_small_cluster(policy, functions)
        if image:
            state = restore(decoded(image))
            done = step(state, Report(), policy, now_ms, functions)
            verify(state)
            msgspec.json.encode(done.events)
    except Exception as error:  # a user's function may fail in any way
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _on_a_small_cluster(policy: Policy, functions: Functions) -> None:
    """Gangs, shares, priorities and tenants come and go; no step may fail or break an invariant."""
    state, now_ms = State(), ROUND_MS
    books = {f"n{number}": _book(number) for number in range(1, NODES + 1)}
    numbers = dict.fromkeys(books, 0)
    for turn in range(ROUNDS):
        requests = tuple(Submit(spec) for spec in _specs(turn, policy))
        reports = tuple(book.report() for book in books.values())
        report = Report(requests=requests, nodes=reports)
        done = step(state, report, policy, now_ms, functions)
        verify(state)
        decoded(encoded(state.snapshot()))
        by_node: dict[str, list[Command]] = {}
        for command in done.commands:
            by_node.setdefault(command.node, []).append(command)
        for node, commands in by_node.items():
            numbers[node] += 1
            books[node].take(Envelope(1, numbers[node], tuple(commands)))
        for book in books.values():
            _end_some(book, turn)
        now_ms += ROUND_MS


def _book(number: int) -> NodeBook:
    spec = NodeSpec(
        id=f"n{number}",
        gpus=8,
        cpu_milli=64_000,
        memory_mb=256_000,
        gpu_model="small" if number % 2 else "large",
        gpu_memory_mb=80_000,
        place=f"b1/r{number % 2}",
    )
    return NodeBook(spec, 1)


def _specs(turn: int, policy: Policy) -> list[JobSpec]:
    """Jobs of every kind, a few more than fit."""
    if turn >= ROUNDS // 2:
        return []
    tenants = [tenant.name for tenant in policy.tenants[:8]] or ["default"]
    tenant = tenants[turn % len(tenants)]
    command = ("work",)
    return [
        JobSpec(command=command, gpus=8, members=2, tenant=tenant, preemptible=True),
        JobSpec(
            command=command, gpus=1, members=3, members_max=6, tenant=tenant, priority=turn % 3
        ),
        JobSpec(command=command, gpus=1, gpu_milli=300, estimate_ms=60_000),
        JobSpec(
            command=command,
            gpus=4,
            preemptible=True,
            checkpoint_ms=60_000,
            time_limit_ms=3_600_000,
            gpu_models=("large",),
        ),
    ]


def _end_some(book: NodeBook, turn: int) -> None:
    """Members that are being stopped end; of the others every third ends by itself."""
    ending: list[MemberRef] = list(book.stopping)
    running = [ref for ref in book.alive if ref not in book.stopping]
    ending += [ref for ref in running if (sum(in_order(ref.job)) + turn) % 3 == 0]
    for ref in ending:
        if ref in book.alive:
            book.exited(ref, 0)
