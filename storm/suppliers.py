"""Suppliers in the storm: slow, refusing, forgetful ones, whose machines crash and whose orders end
by themselves; commands to them get lost or come twice. In the calm they are prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shoal.model.identity import NodeKey, order_key_id
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Answer, Cancel, SetKey, Submit
from shoal.model.supply import (
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyCommand,
    SupplyReport,
)
from storm.supplytruth import TOKEN_OF, SupplyTruth
from storm.world import World

SUPPLY_PART = 0.3  # of the histories have nodes that are ordered
ENGINE = "stormy"
LOOK_MS = 1_000
REMEMBERED_MS = 60_000  # how long the supplier shows orders that have ended
ASK_AGAIN_MS = 1_500
STOLEN_MS = (700, 5_000)  # after a boot, somebody else shows the join token of its order
HASH = "0" * 64


class Held(msgspec.Struct):
    """An order as the supplier has it."""

    command: Provision
    status: OrderStatus
    ended_ms: int = 0


def with_supply(rng: random.Random, policy: Policy) -> Policy:
    """In some histories the policy has supplies. Drawn from a stream of its own."""
    if rng.random() > SUPPLY_PART:
        return policy
    lot = rng.choice((1, 1, 2))
    first = Supply(
        name="gpu",
        engine=ENGINE,
        gpus=rng.choice((2, 8)),
        gpu_model="large",
        gpu_memory_mb=80,
        cpu_milli=rng.choice((0, 8_000)),
        memory_mb=2_000,
        lot=lot,
        least=rng.choice((0, 0, lot)),
        most=lot * rng.choice((1, 2, 3)),
        idle_ms=rng.choice((1_000, 4_000)),
        price=rng.choice((0, 2_000_000)),
    )
    if first.price and rng.random() < 0.5:
        first = msgspec.structs.replace(first, ceiling=first.price * max(first.least, first.lot))
    second = Supply(
        name="cpu", engine=ENGINE, cpu_milli=16_000, memory_mb=4_000, most=2, idle_ms=2_000, price=1
    )
    return msgspec.structs.replace(policy, supply=rng.choice(((first,), (first, second))))


class Suppliers:
    def __init__(
        self,
        world: World,
        truth: SupplyTruth,
        policy: Policy,
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._truth = truth
        self._policy = policy
        self._rng = rng
        self._counts = counts
        self._calm = False
        self._down_until_ms = 0
        self._orders: dict[str, Held] = {}
        self._refusal = rng.choice((0.0, 0.1, 0.5))
        self._loss = rng.choice((0.0, 0.1, 0.3))
        self._slow_ms = rng.choice((200, 3_000, 15_000))
        self._keys = 0
        self.open_questions: dict[str, None] = {}
        self._accepted: dict[str, str] = {}
        world.controller.supply = self.take

    def plan(self, until_ms: int) -> None:
        """Jobs that only ordered nodes can hold, or that need more than there is; and harm."""
        if not self._policy.supply:
            return
        rng, timeline = self._rng, self._world.timeline
        one = self._policy.supply[0]
        timeline.after(rng.randrange(LOOK_MS), self._look)
        for number in range(rng.randrange(1, 7)):
            lots = one.ceiling // one.price // one.lot if one.ceiling else one.most // one.lot
            spec = JobSpec(
                command=("works", str(rng.choice((30, 1_000, 6_000)))),
                gpus=rng.choice((1, one.gpus)),
                gpu_models=("large",),
                members=rng.choice((1, 1, max(1, lots * one.lot))),
                restart=rng.choice((Restart.ON_NODE_LOSS, Restart.ON_FAILURE)),
                retries=3,
            )
            submit = Submit(spec, f"supply-{number}")
            timeline.at(rng.randrange(until_ms), partial(self._submit, submit))
            if rng.random() < 0.3:
                timeline.at(rng.randrange(until_ms), partial(self._cancel, submit.key))
        for _ in range(rng.randrange(6)):
            harm = rng.choice((self._end_one, self._crash_one, self._go_down))
            timeline.at(rng.randrange(until_ms), partial(self._do, harm))

    def calm_down(self) -> None:
        self._calm = True
        self._down_until_ms = 0

    def unsettled(self) -> str:
        """Orders beyond the least, in words."""
        if not self._policy.supply:
            return ""
        if self.open_questions:
            return f"unanswered: {list(self.open_questions)}"
        state = self._world.controller.state
        for one in self._policy.supply:
            mine = [order for order in state.orders.values() if order.supply.name == one.name]
            nodes = sum(len(order.nodes) for order in mine)
            if nodes != one.least:
                return f"{one.name} has {nodes} nodes, not {one.least}: {mine}"
            for order in mine:
                if len(state.brought.get(order.id, ())) < len(order.nodes):
                    return f"{order.id} has not brought its nodes: {order}"
        return ""

    # -- what reaches it -------------------------------------------------------------------

    def take(self, commands: Sequence[SupplyCommand]) -> None:
        for command in commands:
            held = self._orders.get(getattr(command, "order", ""))
            if isinstance(command, Release) and held is not None:
                self._truth.released(command.order, held.command.nodes)
            if isinstance(command, Provision | Release):
                for delay_ms in self._travel():
                    if isinstance(command, Release) and not self._calm:
                        delay_ms += self._rng.randrange(self._slow_ms // 2)
                    self._world.timeline.after(delay_ms, partial(self._obey, command))

    def _travel(self) -> tuple[int, ...]:
        if self._calm:
            return (1,)
        if self._rng.random() < self._loss:
            self._counts["supply command lost"] += 1
            return ()
        if self._rng.random() < self._loss:
            self._counts["supply command repeated"] += 1
            return (self._rng.randrange(1, 50), self._rng.randrange(1, 2_000))
        return (self._rng.randrange(1, 50),)

    def _obey(self, command: Provision | Release) -> None:
        if isinstance(command, Release):
            held = self._orders.get(command.order)
            if held is not None and held.status.phase is not OrderPhase.ENDED:
                self._truth.ends(command.order, held.command.nodes)
                self._end(held, "CANCELLED", failed=False)
        elif command.order not in self._orders:
            refused = not self._calm and self._rng.random() < self._refusal
            self._counts["order refused" if refused else "order taken"] += 1
            phase = OrderPhase.ENDED if refused else OrderPhase.PENDING
            status = OrderStatus(order=command.order, phase=phase, reason="Q", failed=refused)
            held = Held(command, status, self._world.timeline.now_ms)
            self._orders[command.order] = held
            delay_ms = 50 if self._calm else self._rng.randrange(10, self._slow_ms)
            self._truth.holds(self._running())
            if not refused:
                self._ask_key(
                    NodeKey(id=order_key_id(command.order), hash=HASH, order=command.order)
                )
                self._world.timeline.after(delay_ms, lambda: self._start(held))

    def _running(self) -> dict[str, Provision]:
        return {
            order: held.command
            for order, held in self._orders.items()
            if held.status.phase in (OrderPhase.PENDING, OrderPhase.RUNNING)
        }

    # -- machines --------------------------------------------------------------------------

    def _start(self, held: Held) -> None:
        if held.status.phase is not OrderPhase.PENDING:
            return
        held.status = OrderStatus(order=held.command.order, phase=OrderPhase.RUNNING)
        for number, name in enumerate(held.command.nodes):
            late_ms = 0 if self._calm else self._rng.randrange(1_000)
            self._world.timeline.after(late_ms, partial(self._boot, held, name, number))

    def _boot(self, held: Held, name: str, number: int) -> None:
        if held.status.phase is not OrderPhase.RUNNING:
            return
        one = held.command.supply
        spec = NodeSpec(
            id=name,
            gpus=one.gpus,
            gpu_model=one.gpu_model,
            gpu_memory_mb=one.gpu_memory_mb,
            cpu_milli=one.cpu_milli or 4_000,
            memory_mb=one.memory_mb,
            address=f"10.1.0.{number}",
            origin=one.name,
            order=held.command.order,
        )
        if name in self._world.machines:
            self._world.machines[name].exits = ()  # another machine, with another disk
            self._world.boot(name, spec)
        else:
            self._world.add_node(spec)
        for delay_ms in (0, *STOLEN_MS):  # by the machine, and by whoever reads its token there
            self._world.timeline.after(delay_ms, partial(self._join, name, held.command.order))

    def _join(self, node: str, order: str) -> None:
        self._keys += 1
        self._ask_key(NodeKey(id=f"{self._keys:08d}", hash=HASH, node=node), order)

    def _ask_key(self, key: NodeKey, order: str = "") -> None:
        who = f"{TOKEN_OF}{order}" if order else "the controller"
        self._world.ask(SetKey(key, who=who, order=order), lambda _: None)

    def _end(self, held: Held, reason: str, *, failed: bool) -> None:
        order = held.command.order
        held.ended_ms = self._world.timeline.now_ms
        for name in held.command.nodes:
            if self._is_on(name) and self._world.machines[name].spec.order == order:
                self._world.power_off(name, known=False)
        held.status = OrderStatus(order=order, phase=OrderPhase.ENDED, reason=reason, failed=failed)

    def _is_on(self, name: str) -> bool:
        return name in self._world.machines and self._world.machines[name].up

    # -- reports ---------------------------------------------------------------------------

    def _look(self) -> None:
        now_ms = self._world.timeline.now_ms
        self._orders = {
            order: held
            for order, held in self._orders.items()
            if held.status.phase is not OrderPhase.ENDED or now_ms - held.ended_ms < REMEMBERED_MS
        }
        down = now_ms < self._down_until_ms
        report = SupplyReport(
            engine=ENGINE,
            orders=() if down else tuple(held.status for held in self._orders.values()),
            problem="no answer" if down else "",
        )
        if self._world.controller.up and (self._calm or self._rng.random() >= self._loss):
            self._world.controller.supplied(report)
        self._world.timeline.after(LOOK_MS, self._look)

    # -- users -----------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> None:
        self.open_questions[submit.key] = None

        def answered(answer: Answer) -> None:
            self.open_questions.pop(submit.key, None)
            self._accepted[submit.key] = getattr(answer, "id", "")

        def ask() -> None:
            if submit.key in self.open_questions:
                self._world.ask(submit, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def _cancel(self, key: str) -> None:
        if self._accepted.get(key):
            self._world.ask(Cancel(self._accepted[key]), lambda _: None)

    # -- harm ------------------------------------------------------------------------------

    def _do(self, harm: Callable[[], None]) -> None:
        if not self._calm:
            harm()

    def _end_one(self) -> None:
        """A time limit, a preemption, an admin."""
        live = [h for h in self._orders.values() if h.status.phase is not OrderPhase.ENDED]
        if live:
            self._counts["order ended by itself"] += 1
            self._end(self._rng.choice(live), "TIMEOUT", failed=self._rng.random() < 0.5)

    def _crash_one(self) -> None:
        """A machine dies, and its order with it, which the supplier sees later."""
        up = {
            name: held
            for held in self._orders.values()
            for name in held.command.nodes
            if held.status.phase is OrderPhase.RUNNING and self._is_on(name)
        }
        if up:
            self._counts["ordered node died"] += 1
            name = self._rng.choice(list(up))
            held = up[name]
            self._world.power_off(name, known=self._rng.random() < 0.5)
            notice_ms = self._rng.randrange(100, 10_000)
            self._world.timeline.after(notice_ms, lambda: self._fail(held))

    def _fail(self, held: Held) -> None:
        if held.status.phase is OrderPhase.RUNNING:
            self._end(held, "NODE_FAIL", failed=True)

    def _go_down(self) -> None:
        self._counts["supplier down"] += 1
        self._down_until_ms = self._world.timeline.now_ms + self._rng.randrange(1_000, 20_000)
