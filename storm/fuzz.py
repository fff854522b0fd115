"""One seed, one history: a storm of faults in which nothing may go wrong, then a calm in which
everything must go right. `python -m storm.fuzz 17` prints the history of seed 17."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from shoal.core.policies import SHIPPED
from shoal.core.scheduling.score import PLACEMENTS
from shoal.model.health import Standing
from shoal.model.job import JobSpec
from shoal.model.node import JOINED, NodeHealth, NodeIntent, NodeSpec
from shoal.model.policy import Policy, Tenant
from shoal.model.tree import Tree, TreeGpu
from storm.arrays import Arrays
from storm.budgets import Budgets
from storm.captruth import capped
from storm.datasets import with_data
from storm.ends import Ends
from storm.fabrictruth import with_places
from storm.faults import BadNetwork, Faults
from storm.flows import Flows
from storm.labels import Labels
from storm.leases import Leases
from storm.liars import Liars
from storm.lives import Untruth
from storm.people import People
from storm.replacing import Replacing
from storm.services import Services
from storm.sleepers import SeededNights, Sleepers, equipped, with_sleep
from storm.suppliers import Suppliers, with_supply
from storm.timeline import Timeline
from storm.truth import Truth
from storm.users import SeededFates, Users
from storm.wiring import Wiring
from storm.world import World

GPU_KINDS: tuple[dict[str, Any], ...] = (
    {"gpu_model": "small", "gpu_memory_mb": 40},
    {"gpu_model": "large", "gpu_memory_mb": 80},
)
# Heartbeats and all other messages make about a tenth of this.
STEPS_PER_SECOND_MAX = 100
FENCED_PART = 0.3  # of the histories have an engine that can end silent nodes


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much happens in one history; the numbers are upper bounds."""

    nodes: int = 5
    jobs: int = 18
    faults: int = 14
    storm_ms: int = 30_000
    # By far the longest that any mix of these jobs takes on one node, one after the other.
    calm_ms: int = 1_800_000
    services_part: float = 0.25  # of the histories have services
    replacing_part: float = 0.4  # ... have users who put a job in the place of another
    sleep_part: float = 0.3  # of the histories have nodes that can put jobs to sleep
    keepers_part: float = 0.25  # ... have keepers that are killed while processes live on
    liars_part: float = 0.25  # ... have nodes that lie about members of others
    data_part: float = 0.25  # ... have jobs whose nodes fetch data sets
    hangs_part: float = 0.2  # ... have mounts that do not answer for a while
    leases_part: float = 0.2  # ... have jobs with leases


class History(msgspec.Struct, frozen=True):
    """The result of a run: its log, and how often each thing happened."""

    log: list[bytes]
    counts: Counter[str]
    steps: int
    end_ms: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\n".join(self.log)).hexdigest()


class SeedFailed(AssertionError):
    """Names the seed, so that the reader can run that history again."""


def run_seed(seed: int, size: Size | None = None, *, checked: bool = True) -> History:
    """`checked` False runs the same history without verifying the state after every step."""
    return Run(seed, size or Size(), checked=checked).finish()


class Run:
    def __init__(self, seed: int, size: Size, *, checked: bool = True) -> None:
        self.seed = seed
        self.size = size
        self.counts: Counter[str] = Counter()
        rng = self._rng("cluster")
        self.policy = capped(self._rng("caps"), _draw_policy(rng))
        self.policy = with_supply(self._rng("supply"), self.policy)
        self.policy = with_places(self._rng("places"), self.policy)
        nodes = _with_trees(self._rng("trees"), _draw_nodes(rng, size))
        self.sleeps = self._rng("does it sleep").random() < size.sleep_part
        if self.sleeps:
            nodes = equipped(self._rng("beds"), nodes)
            self.policy = with_sleep(self._rng("sleep rules"), self.policy)
        slowest_ms = 2 * self.policy.grace_ms
        self.network = BadNetwork(self._rng("network"), self.counts, slowest_ms)
        timeline = Timeline()
        self.truth = Truth(timeline, self.policy)
        nights = SeededNights(f"{seed}/nights", nodes, self.truth.sleep, self.counts)
        self.world = World(
            self.policy,
            SeededFates(f"{seed}/fates"),
            timeline=timeline,
            witness=self.truth,
            network=self.network,
            heartbeat_ms=rng.choice((500, 1_000)),
            batch_ms=rng.choice((0, 5, 20)),
            checked=checked,
            nights=nights,
        )
        self.truth.health.saved = self.world.saved
        fences = self._rng("fences").random() < FENCED_PART
        self.world.controller.fences = self.truth.fences = fences
        self._people_the_world(nodes, nights)
        for spec in nodes:
            late_ms = rng.choice((0, 0, 0, rng.randrange(size.storm_ms)))
            self.world.timeline.at(late_ms, partial(self.world.add_node, spec))

    def _people_the_world(self, nodes: list[NodeSpec], nights: SeededNights) -> None:
        """Everybody who does something there, each with a stream of their own."""
        self.users = Users(
            self.world,
            nodes,
            self._rng("users"),
            self.counts,
            self._other_policy,
        )
        self.faults = Faults(
            self.world,
            self.network,
            nodes,
            self.policy.grace_ms,
            self._rng("faults"),
            self.counts,
        )
        self.services = Services(
            self.world,
            self.network,
            self.truth.lives,
            nodes,
            self.policy,
            self._rng("services"),
            self.counts,
        )
        self.budgets = Budgets(self.world, self.truth.budgets, self._rng("budgets"), self.counts)
        self.ends = Ends(self.world, self.truth.ends, nodes, self._rng("ends"), self.counts)
        self.suppliers = Suppliers(
            self.world, self.truth.supply, self.policy, self._rng("suppliers"), self.counts
        )
        self.wiring = Wiring(self.world, self.truth.fabric, nodes, self._rng("wiring"), self.counts)
        self.labels = Labels(self.world, nodes, self._rng("labels"), self.counts)
        self.sleepers = Sleepers(
            self.world,
            self.users,
            self.truth.lives,
            self.truth.sleep,
            nights,
            self._rng("sleepers"),
            self.counts,
        )
        self.liars = Liars(self.world, self.truth.lives, nodes, self._rng("liars"), self.counts)
        data = self._rng("data")
        self.data = data if data.random() < self.size.data_part else None
        self.users.wish = self._wish
        self.users.wired = self.wiring.place
        self.people = People(self.world, self._rng("people"), self.counts)
        self.arrays = Arrays(self.world, self._rng("arrays"), self.counts)
        self.flows = Flows(self.world, self.users, self._rng("flows"), self.counts)
        self.replacing = Replacing(self.world, self.users, self._rng("replacing"), self.counts)
        self.leases = Leases(self.world, self.network, nodes, self._rng("leases"), self.counts)
        self.truth.services.has_work = self.services.has_work
        self.truth.services.hangs = self.services.hangs

    def finish(self) -> History:
        timeline = self.world.timeline
        try:
            self._storm()
            self._calm()
        except AssertionError as error:
            raise SeedFailed(
                f"seed {self.seed} at {timeline.now_ms} ms: {error}; "
                f"to see it again: python -m storm.fuzz {self.seed}"
            ) from error
        return History(
            self.world.disk.log, self.counts, self.world.controller.steps, timeline.now_ms
        )

    def _rng(self, purpose: str) -> random.Random:
        """One stream for each purpose, so that more of one thing does not change another."""
        return random.Random(f"{self.seed}/{purpose}")

    def _wish(self, spec: JobSpec) -> JobSpec:
        spec = self.labels.wish(spec)
        spec = with_data(self.data, spec) if self.data is not None else spec
        return self.sleepers.wish(spec) if self.sleeps else spec

    def _other_policy(self, now: Policy) -> Policy:
        at_ms = self.world.timeline.now_ms
        if self.sleeps:
            now = with_sleep(self._rng(f"sleep rules at {at_ms}"), now)
        other = _other_policy(self._rng(f"policy at {at_ms}"), now)
        other = with_places(self._rng(f"places at {at_ms}"), other)
        return capped(self._rng(f"caps at {at_ms}"), other)

    def _storm(self) -> None:
        size, rng = self.size, self._rng("sizes")
        if self.sleeps:
            self.sleepers.plan(size.storm_ms)
        self.users.plan(rng.randrange(size.jobs) + 1, size.storm_ms)
        self.users.plan_leaving(self._rng("leaving"), size.storm_ms)
        self.faults.plan(rng.randrange(size.faults + 1), size.storm_ms)
        self.faults.plan_sickness(self._rng("sickness"), size.storm_ms)
        if self._rng("does a mount hang").random() < size.hangs_part:
            self.faults.plan_hangs(self._rng("hangs"), size.storm_ms)
        self.faults.plan_clock(self._rng("clock"), size.storm_ms)
        self.faults.plan_store(self._rng("store"), size.storm_ms)
        if self._rng("is a keeper killed").random() < size.keepers_part:
            self.faults.plan_keepers(self._rng("keepers"), size.storm_ms)
        if self._rng("does a node lie").random() < size.liars_part:
            self.liars.plan(size.storm_ms)
        if rng.random() < size.services_part:
            self.services.plan(size.storm_ms)
        if any(tenant.has_budget for tenant in self.policy.tenants):
            self.budgets.plan(size.storm_ms)
        self.people.plan(size.storm_ms)
        self.ends.plan(size.storm_ms)
        self.suppliers.plan(size.storm_ms)
        self.labels.plan(size.storm_ms)
        self.wiring.plan(size.storm_ms)
        self.flows.plan(size.storm_ms)
        self.arrays.plan(size.storm_ms)
        if self._rng("is one replaced").random() < size.replacing_part:
            self.replacing.plan(size.storm_ms)
        if self._rng("are there leases").random() < size.leases_part:
            self.leases.plan(size.storm_ms)
        self.world.start_controller()
        self.world.timeline.run(size.storm_ms)

    def _calm(self) -> None:
        """Bounded: what does not settle in `calm_ms` is stuck."""
        self.faults.stop()
        self.ends.stop()
        self.labels.stop()
        self.truth.health.calm_ms = self.world.timeline.now_ms
        self.users.calm_down()
        self.budgets.calm_down()
        self.flows.calm_down()
        self.leases.calm_down()
        self.services.calm_down()
        self.suppliers.calm_down()
        self.wiring.calm_down()
        if self.sleeps:
            self.sleepers.calm_down()
        timeline = self.world.timeline
        self._settle(self.services.unsettled)
        self.services.stop_all()
        self._settle(self._unsettled)
        self.people.verify()
        steps, seconds = self.world.controller.steps, timeline.now_ms // 1000
        if steps > STEPS_PER_SECOND_MAX * seconds:
            raise Untruth(f"{steps} steps in {seconds} s: messages answer each other for ever")

    def _settle(self, unsettled: Callable[[], str]) -> None:
        timeline = self.world.timeline
        timeline.run(timeline.now_ms + self.size.calm_ms, done=lambda: not unsettled())
        if left := unsettled():
            raise Untruth(f"stuck: {left}")

    def _unsettled(self) -> str:
        """The first thing that has not come to its end, in words; empty when all is well."""
        if self.users.open_questions:
            return f"unanswered: {list(self.users.open_questions)}"
        if self.arrays.open_questions or self.truth.arrays.unfinished:
            open_ = [*self.arrays.open_questions, *self.truth.arrays.unfinished]
            return f"arrays unanswered or unfinished: {open_}"
        if self.flows.open_questions:
            return f"unanswered: {list(self.flows.open_questions)}"
        if self.replacing.open_questions:
            return f"unanswered: {list(self.replacing.open_questions)}"
        if self.leases.open_questions:
            return f"unanswered: {list(self.leases.open_questions)}"
        if self.people.open_questions:
            return f"{self.people.open_questions} questions of an admin are unanswered"
        if self.truth.unfinished:
            return f"unfinished: {list(self.truth.unfinished)}"
        if self.truth.lives.living:
            return f"alive: {', '.join(map(str, self.truth.lives.living))}"
        if not self.world.controller.readable:
            return "the controller recovers"
        if schedules := self.world.controller.state.schedules:
            return f"still due: {list(schedules)}"
        if services := self.world.controller.state.services:
            return f"still served: {list(services)}"
        if left := self.suppliers.unsettled() or self.wiring.unsettled():
            return left
        nodes = self.world.controller.state.nodes
        for name, machine in self.world.machines.items():
            if machine.spec.order and not machine.up:
                continue  # its order has ended
            node = nodes.get(name)
            if node is None or node.incarnation != machine.incarnation:
                return f"{name} is not known as it is"
            if node.health is not NodeHealth.READY or node.intent is not NodeIntent.OPEN:
                return f"{name} is {node.health.value} and {node.intent.value}"
            if node.record.standing is not Standing.OK:
                return f"{name} is {node.record.standing.value}, though it is well"
            if machine.book is None or machine.book.exits:
                return f"{name} still keeps exits that nobody wants"
        return ""


def _draw_policy(rng: random.Random) -> Policy:
    """Short times, so that little virtual time holds many of them."""
    return msgspec.structs.replace(
        _other_policy(rng, Policy()),
        silent_after_ms=rng.choice((1_500, 2_500)),
        grace_ms=rng.choice((4_000, 6_000)),
        losses_max=rng.choice((0, 1, 100, 100)),
        hang_after_ms=rng.choice((1_000, 3_000)),
        hangs_max=rng.choice((1, 2, 3)),
        retest_ms=rng.choice((1_000, 5_000)),
        spares=rng.choice((0, 0, 0, 1, 1, 2)),
        backoff_ms_max=rng.choice((500, 5_000)),
        port_count=rng.choice((3, 50)),
        placements_per_step_max=rng.choice((1, 2, 200)),
    )


def _other_policy(rng: random.Random, policy: Policy) -> Policy:
    """Other rules for the order of the queue; promises about nodes and retries stay."""
    shipped = rng.choice(list(SHIPPED.values()))
    tenants = rng.choice(
        (
            (),
            (Tenant(name="red", weight=3), Tenant(name="blue", quota_gpus=2)),
            (Tenant(name="red", budget_gpu_hours=9), Tenant(name="blue", budget_money=9_000_000)),
            (
                Tenant(name="all", budget_gpu_hours=20),
                Tenant(name="red", parent="all", budget_gpu_hours=12),
                Tenant(name="blue", parent="all", quota_gpus=2),
            ),
            (
                Tenant(name="all", quota_gpus=3),
                Tenant(name="red", parent="all"),
                Tenant(name="blue", parent="all"),
            ),
        )
    )
    return msgspec.structs.replace(
        policy,
        name=shipped.name,
        order=shipped.order,
        preempt=shipped.preempt,
        tenants=tenants,
        run_ms_min=rng.choice((0, 500, 3_000)),
        move_cost_ms=rng.choice((0, 2_000, 60_000)),
        reservations=rng.choice((shipped.reservations, 0, 1, 3)),
        placement=rng.choice([*PLACEMENTS]),
        patience_ms=rng.choice((0, 3_000, 10_000, 600_000)),
        idle_warn_ms=rng.choice((0, 600, 1_500)),
        idle_reclaim_ms=rng.choice((0, 1_000, 2_500)),
        idle_ends=rng.random() < 0.5,
        budget_stops=rng.random() < 0.5,
    )


def _draw_nodes(rng: random.Random, size: Size) -> list[NodeSpec]:
    return [
        NodeSpec(
            id=f"n{number}",
            gpus=rng.choice((0, 1, 2, 4, 8)),
            cpu_milli=rng.choice((2_000, 4_000, 8_000)),
            memory_mb=rng.choice((500, 1_000, 2_000)),
            **rng.choice(GPU_KINDS),
            place=rng.choice((f"b{number % 2}/r{number % 3}", "b0/r0", "b1")),
            address=f"10.0.0.{number}",
            checkpoints=f"root {number % 2}" if number < 4 else "",
            containers="podman" if number % 3 else "",
            origin=JOINED if number % 4 == 3 else "",
            labels={"zone": f"z{number % 2}"} if number % 5 else {},
        )
        for number in range(1, 1 + rng.randint(1, rng.choice((2, size.nodes))))
    ]


def _with_trees(rng: random.Random, nodes: list[NodeSpec]) -> list[NodeSpec]:
    """Some nodes say how their GPUs are joined, and some of these are wrong about how many there
    are."""
    found = []
    for node in nodes:
        gpus = tuple(
            TreeGpu(
                numa=rng.randint(-1, 1),
                switches=tuple(rng.sample(range(3), rng.randint(0, 2))),
                nvlink=rng.randint(-1, 1),
            )
            for _ in range(node.gpus if rng.random() < 0.9 else rng.randint(0, 9))
        )
        told = rng.random() < 0.5
        found.append(msgspec.structs.replace(node, tree=Tree(gpus)) if told else node)
    return found


def _print_history(seed: int) -> None:
    run = Run(seed, Size())
    try:
        history = run.finish()
    except SeedFailed as failure:
        print(*(line.decode() for line in run.world.disk.log), sep="\n")
        print(failure)
        raise SystemExit(1) from failure
    print(*(line.decode() for line in history.log), sep="\n")
    print(f"{history.steps} steps, {history.end_ms} ms, {dict(sorted(history.counts.items()))}")


if __name__ == "__main__":
    _print_history(int(sys.argv[1]))
