"""Everything that goes wrong in a world, decided by a seed: a network that fails, and a plan."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.report import CheckNode, SetIntent
from storm.controller import Moment
from storm.disk import Fault
from storm.network import Network
from storm.node import StormNode
from storm.world import World

SHORTEST_MS = 50
STORE_PART = 0.3  # of the histories have a store that fails
SICK_PART = 0.35  # of the histories have nodes that can start nothing
SLOW_ON_MS = 20_000  # slow nodes are mended later, because it takes long to find them


class Cut(enum.Flag):
    """The direction in which nothing gets through."""

    NONE = 0
    REPORTS = enum.auto()
    COMMANDS = enum.auto()
    BOTH = REPORTS | COMMANDS


class BadNetwork(Network):
    """Loses, repeats and delays messages, and so reorders them; how often depends on the seed."""

    def __init__(self, rng: random.Random, counts: Counter[str], slowest_ms: int) -> None:
        self.calm = False
        self.cuts: dict[str, Cut] = {}
        self._rng = rng
        self._counts = counts
        self._slowest_ms = slowest_ms
        self._loss = rng.choice((0.0, 0.02, 0.15))
        self._repeat = rng.choice((0.0, 0.05, 0.2))
        self._late = rng.choice((0.0, 0.05, 0.2))
        self._very_late = rng.choice((0.0, 0.0, 0.02, 0.2))

    def slow_down(self) -> None:
        """Many messages take seconds."""
        self._very_late = 0.2

    def to_controller(self, node: str) -> tuple[int, ...]:
        return self._travel("report", Cut.REPORTS in self.cuts.get(node, Cut.NONE))

    def to_node(self, node: str) -> tuple[int, ...]:
        return self._travel("command", Cut.COMMANDS in self.cuts.get(node, Cut.NONE))

    def death_notice(self) -> int:
        return self._delay_ms("death notice")

    def _travel(self, what: str, cut: bool) -> tuple[int, ...]:
        if self.calm:
            return (1,)
        if cut or self._rng.random() < self._loss:
            self._counts[f"{what} lost"] += 1
            return ()
        if self._rng.random() < self._repeat:
            self._counts[f"{what} repeated"] += 1
            return (self._delay_ms(what), self._delay_ms(what))
        return (self._delay_ms(what),)

    def _delay_ms(self, what: str) -> int:
        if self.calm:
            return 1
        luck = self._rng.random()
        if luck < self._very_late:
            self._counts[f"{what} very late"] += 1
            return self._rng.randrange(1_000, self._slowest_ms)
        if luck < self._very_late + self._late:
            self._counts[f"{what} late"] += 1
            return self._rng.randrange(50, 1_000)
        return self._rng.randrange(1, 10)


class Faults:
    """Does harm as planned; `stop` ends it and mends what was broken.

    Outages are drawn to be shorter or longer than the grace period, and about as long."""

    def __init__(
        self,
        world: World,
        network: BadNetwork,
        nodes: Sequence[NodeSpec],
        grace_ms: int,
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._network = network
        self._rng = rng
        self._counts = counts
        self._stopped = False
        self._whole = {spec.id: spec for spec in nodes}
        self._outages_ms = (grace_ms // 10, grace_ms // 2, grace_ms, 2 * grace_ms)

    def plan(self, count: int, until_ms: int) -> None:
        kinds: tuple[Callable[[], None], ...] = (
            self._kill_known,
            self._kill_unknown,
            self._reboot,
            self._change_hardware,
            self._remove,
            self._cut,
            self._cut,
            self._cut,
            self._crash_controller,
            self._crash_controller,
            self._lose_trace,
            self._keep_snapshot,
            self._slow_down,
            self._slow_down,
            self._break,
        )
        # A few kinds at a time reach deeper than a little of everything.
        kinds = tuple(self._rng.sample(kinds, self._rng.randrange(1, len(kinds) + 1)))
        for _ in range(count):
            fault = self._rng.choice(kinds)
            self._world.timeline.at(self._rng.randrange(until_ms), partial(self._do, fault))

    def plan_sickness(self, rng: random.Random, until_ms: int) -> None:
        """In some histories nodes fall sick: nothing can be started there, programs are missing, or
        half of the ports are taken. Drawn from a stream of its own, so that the rest of the history
        stays the same."""
        if rng.random() > SICK_PART:
            return
        for _ in range(rng.randrange(1, 5)):
            what = rng.choice(("sick", "sick", "bare", "hogged"))
            at_ms, node = rng.randrange(until_ms), rng.choice(list(self._whole))
            long_ms = rng.randrange(SHORTEST_MS, until_ms)
            self._world.timeline.at(at_ms, partial(self._do, partial(self._set, node, what, True)))
            self._world.timeline.at(at_ms + long_ms, partial(self._set, node, what, False))

    def plan_hangs(self, rng: random.Random, until_ms: int) -> None:
        """A mount hangs for a while, on one node or on all."""
        for _ in range(rng.randrange(1, 4)):
            at_ms, long_ms = rng.randrange(until_ms), rng.randrange(SHORTEST_MS, until_ms)
            nodes = list(self._whole)
            for node in nodes if rng.random() < 0.3 else [rng.choice(nodes)]:
                begin = partial(self._do, partial(self._set, node, "hung", True))
                self._world.timeline.at(at_ms, begin)
                self._world.timeline.at(at_ms + long_ms, partial(self._set, node, "hung", False))

    def plan_keepers(self, rng: random.Random, until_ms: int) -> None:
        """Keepers are killed while descendants of members live on."""
        for _ in range(rng.randrange(1, 4)):
            kill = partial(self._kill_keeper, rng.choice(list(self._whole)), rng.randrange(3_000))
            self._world.timeline.at(rng.randrange(until_ms), partial(self._do, kill))

    def _kill_keeper(self, node: str, linger_ms: int) -> None:
        machine = self._world.machines.get(node)
        if machine is not None and machine.up:
            self._counts["keeper killed"] += 1
            self._world.kill_keeper(node, linger_ms)
            self._world.timeline.after(linger_ms + SHORTEST_MS, partial(self._boot, machine))

    def plan_store(self, rng: random.Random, until_ms: int) -> None:
        """In some histories the controller's store fails at times. It has its own stream, too."""
        if rng.random() > STORE_PART:
            return
        for _ in range(rng.randrange(1, 7)):
            kind = rng.choice((self._fail_commits, self._fail_commits, self._fail_snapshot))
            faults = [rng.choice(list(Fault)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
            loads = rng.choice((0, 0, 0, 1, 3))
            harm = partial(kind, faults, loads)
            self._world.timeline.at(rng.randrange(until_ms), partial(self._do, harm))

    def _fail_commits(self, faults: list[Fault], loads: int) -> None:
        """The next commits fail, and then the next loads, too."""
        self._world.disk.commit_faults.extend(faults)
        self._world.disk.load_faults += loads
        self._counts["load failed"] += loads
        for fault in faults:
            self._counts[f"commit failed {fault.value}"] += 1

    def _fail_snapshot(self, faults: list[Fault], _: int) -> None:
        self._world.disk.snapshot_faults.append(faults[0])
        self._counts[f"snapshot failed {faults[0].value}"] += 1
        self._keep_snapshot()

    def plan_clock(self, rng: random.Random, until_ms: int) -> None:
        """In some histories the controller's clock is set. It has its own stream, too."""
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            drift_ms = rng.choice((-86_400_000, 3_600_000, 86_400_000, 0))
            jump = partial(self._set_clock, drift_ms)
            self._world.timeline.at(rng.randrange(until_ms), partial(self._do, jump))

    def _set_clock(self, drift_ms: int) -> None:
        self._counts["clock set"] += 1
        self._world.controller.drifted(drift_ms)

    def _set(self, node: str, what: str, value: bool) -> None:
        machine = self._world.machines.get(node)
        if machine is not None:
            self._counts[f"node {what}"] += value
            setattr(machine, what, value)

    def stop(self) -> None:
        """Faults stop, links heal, and nodes and the controller come back as they were."""
        self._stopped = True
        self._network.calm = True
        for machine in self._world.machines.values():
            machine.broken = machine.sick = machine.bare = machine.hogged = machine.hung = False
        self._world.timeline.after(SLOW_ON_MS, self._mend_slow)
        self._world.controller.crash_at = None
        self._world.disk.mend()
        self._world.start_controller()
        # An operator does not remove a node and switch it on in the same instant.
        self._world.timeline.after(SHORTEST_MS, self._mend_nodes)

    def _mend_slow(self) -> None:
        for machine in self._world.machines.values():
            machine.slow = False

    def _mend_nodes(self) -> None:
        for node, machine in self._world.machines.items():
            if machine.spec.order:
                continue
            if machine.up and machine.spec != self._whole[node]:
                self._world.power_off(node, known=False)
            if not machine.up:
                self._world.boot(node, self._whole[node])

    def _do(self, fault: Callable[[], None]) -> None:
        if not self._stopped:
            fault()

    def _later(self, action: Callable[[], None]) -> None:
        """After an outage of some length, unless everything has been mended by then."""
        outage_ms = self._rng.randrange(*self._rng.choice(self._ranges_ms()))
        self._world.timeline.after(outage_ms, lambda: self._do(action))

    def _ranges_ms(self) -> list[tuple[int, int]]:
        short, half, grace, long = self._outages_ms
        return [
            (SHORTEST_MS, short),
            (short, half),
            (half, grace + short),
            (grace, long),
            (grace, long),
        ]

    def _victim(self, *, ordered: bool = False) -> StormNode | None:
        """`ordered`: also of the nodes that a supplier brought, which it ends and starts itself."""
        up = [
            machine
            for machine in self._world.machines.values()
            if machine.up and (ordered or not machine.spec.order)
        ]
        return self._rng.choice(up) if up else None

    def _kill_known(self) -> None:
        self._kill(known=True)

    def _kill_unknown(self) -> None:
        self._kill(known=False)

    def _kill(self, *, known: bool) -> None:
        victim = self._victim()
        if victim is not None:
            self._counts["node killed, known" if known else "node killed, unknown"] += 1
            self._world.power_off(victim.spec.id, known=known)
            self._later(lambda: self._boot(victim))

    def _boot(self, machine: StormNode) -> None:
        if not machine.up:
            self._world.boot(machine.spec.id)

    def _reboot(self) -> None:
        """Faster than any timeout, and without a report of its death."""
        victim = self._victim()
        if victim is not None:
            self._counts["node rebooted"] += 1
            self._world.power_off(victim.spec.id, known=False)
            self._world.boot(victim.spec.id)

    def _change_hardware(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._counts["hardware changed"] += 1
            spec = victim.spec
            less = msgspec.structs.replace(
                spec, gpus=max(0, spec.gpus - 1), memory_mb=spec.memory_mb // 2
            )
            self._world.power_off(spec.id, known=self._rng.random() < 0.5)
            self._world.boot(spec.id, less)

    def _remove(self) -> None:
        """An operator removes a node that is off; it may join again one day."""
        victim = self._victim()
        if victim is not None:
            self._counts["node removed"] += 1
            self._world.power_off(victim.spec.id, known=False)
            remove = SetIntent(victim.spec.id, NodeIntent.REMOVED)
            self._world.ask(
                remove, lambda _: None, patience_ms=SHORTEST_MS
            )  # it stays off until then
            self._later(lambda: self._boot(victim))

    def _cut(self) -> None:
        victim = self._victim(ordered=True)
        if victim is not None:
            node = victim.spec.id
            cut = self._rng.choice((Cut.BOTH, Cut.BOTH, Cut.REPORTS, Cut.COMMANDS))
            self._counts[f"link cut: {(cut.name or '').lower()}"] += 1
            self._network.cuts[node] = cut
            self._later(lambda: self._heal(node))

    def _heal(self, node: str) -> None:
        self._network.cuts.pop(node, None)

    def _crash_controller(self) -> None:
        if self._world.controller.up:
            moment = self._rng.choice(list(Moment))
            down_ms = self._rng.choice((0, 10, 500, self._outages_ms[-1]))
            self._counts[f"controller crashed {moment.value}"] += 1
            self._counts["controller down for long"] += down_ms > self._outages_ms[1]
            self._world.crash_controller(moment, down_ms)

    def _lose_trace(self) -> None:
        victim = self._victim()
        if victim is not None and victim.processes:
            self._counts["process vanished"] += 1
            self._world.lose_trace(victim.spec.id, self._rng.choice(list(victim.processes)))

    def _slow_down(self) -> None:
        """It takes long to be sure that a node is slow, so some stay slow until all is mended."""
        busy = [machine for machine in self._world.machines.values() if machine.trains]
        victim = self._rng.choice(busy) if busy else self._victim()
        if victim is not None:
            self._counts["node slow"] += 1
            victim.slow = True
            if self._rng.random() < 0.3:
                self._later(lambda: setattr(victim, "slow", False))

    def _break(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._counts["node broken"] += 1
            victim.broken = True
            self._world.ask(CheckNode(victim.spec.id), lambda _: None)
            if self._rng.random() < 0.5:
                self._later(lambda: setattr(victim, "broken", False))

    def _keep_snapshot(self) -> None:
        if self._world.controller.readable:
            self._counts["snapshot kept"] += 1
            self._world.controller.keep_snapshot()
