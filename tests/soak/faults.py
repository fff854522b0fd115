"""What a soak does to a cluster. A fault begins, lasts a while and ends; then everything that it
broke is there again, as an operator would have done it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable

import msgspec
from harness.clocks import SteppedClock
from harness.hosts import Host

from tests.soak.world import FILLER, SMALL, World

STEP_S = (3600, -3600, 90, -90)


def nothing() -> None:
    pass


class Fault(msgspec.Struct, frozen=True):
    """`hurts`: hosts whose gateway or node may fail a request meanwhile. `last_s`: how long until
    its end begins, at least and at most. `again`: what an operator starts when all is over."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    hurts: tuple[str, ...]
    last_s: tuple[float, float] = (0.5, 8.0)
    again: Callable[[], None] = nothing


def all_faults(world: World) -> list[Callable[[random.Random], Fault]]:
    """Makers of faults, so that each is drawn as often as another. Each gets dice of its own."""
    heads, nodes = world.heads, list(world.nodes.values())
    makers: list[Callable[[random.Random], Fault]] = []
    for part in ("controller", "supervisor", "haproxy"):
        makers.append(lambda dice, part=part: killed(world, dice.choice(heads), part))  # type: ignore[misc]
    for part in ("agent", "keeper", "starter", "member"):
        makers.append(lambda dice, part=part: killed(world, dice.choice(nodes), part))  # type: ignore[misc]
    for part in ("controller", "haproxy"):
        makers.append(lambda dice, part=part: stopped(world, dice.choice(heads), part))  # type: ignore[misc]
    for part in ("agent", "member"):
        makers.append(lambda dice, part=part: stopped(world, dice.choice(nodes), part))  # type: ignore[misc]
    makers += [
        lambda dice: power_off(world, dice.choice(nodes)),
        lambda dice: power_off(world, dice.choice(heads)),
        lambda dice: link(world, dice.choice([*heads, *nodes]), "cut", dice),
        lambda dice: link(world, dice.choice([*heads, *nodes]), "slow", dice),
        lambda dice: link(world, dice.choice([*heads, *nodes]), "lossy", dice),
        lambda _: full_disk(world),
        lambda _: read_only(world),
    ]
    if world.servers:
        makers += [
            lambda _: database_killed(world),
            lambda _: database_restarted(world),
            lambda _: database_failed_over(world),
            lambda dice: database_link(world, dice.choice(heads), "cut"),
            lambda dice: database_link(world, dice.choice(heads), "slow"),
        ]
    if (stepped := world.clock) is not None:
        makers.append(lambda dice: clock(world, stepped, dice.choice(STEP_S)))
    return makers


def killed(world: World, host: Host, part: str) -> Fault:
    def begin() -> None:
        _signal(world.find(host, part)[:1], signal.SIGKILL)

    name = f"kill -9 of {part} on {host.name}"
    return Fault(name, begin, nothing, (host.name,), again=_again(world, host))


def stopped(world: World, host: Host, part: str) -> Fault:
    found: list[int] = []

    def begin() -> None:
        found.extend(world.find(host, part)[:1])
        _signal(found, signal.SIGSTOP)

    def end() -> None:
        _signal(found, signal.SIGCONT)

    name = f"{part} on {host.name} stopped (SIGSTOP)"
    return Fault(name, begin, end, (host.name,), again=_again(world, host))


def power_off(world: World, host: Host) -> Fault:
    def end() -> None:
        world.power_on(host)

    name, again = f"power-off of {host.name}", _again(world, host)
    return Fault(name, host.power_off, end, (host.name,), (1.0, 15.0), again)


def link(world: World, host: Host, how: str, dice: random.Random) -> Fault:
    acts: dict[str, Callable[[], None]] = {
        "cut": host.cut,
        "slow": lambda: host.slow(dice.choice(("256kbit", "2mbit"))),
        "lossy": lambda: host.lose(dice.choice((0.05, 0.2))),
    }
    return Fault(f"{how} link of {host.name}", acts[how], host.mend, (host.name,), (2.0, 20.0))


def full_disk(world: World) -> Fault:
    """To the last block, as a runaway job would."""
    filler = str(world.nodes[SMALL].home / FILLER)

    def begin() -> None:
        world.nodes[SMALL].run("dd", "if=/dev/zero", f"of={filler}", "bs=64k")

    def end() -> None:
        world.on_small("rm", "-f", filler)

    return Fault(f"full disk of {SMALL}", begin, end, (SMALL,), (3.0, 15.0))


def read_only(world: World) -> Fault:
    """As after an error of the disk. It takes a repair and a start of the machine to end it."""
    host = world.nodes[SMALL]

    def begin() -> None:
        world.on_small("mount", "-o", "remount,abort", str(host.home))

    def end() -> None:
        host.power_off()
        world.repair_small()
        world.power_on(host)

    name, again = f"read-only disk of {SMALL}", _again(world, host)
    return Fault(name, begin, end, (SMALL,), (3.0, 12.0), again)


def database_killed(world: World) -> Fault:
    def begin() -> None:
        world.servers[0].kill()

    def end() -> None:
        world.servers[0].start()

    return Fault("kill -9 of PostgreSQL", begin, end, (), (0.5, 6.0))


def database_restarted(world: World) -> Fault:
    return Fault(
        "restart of PostgreSQL", lambda: world.servers[0].restart(), lambda: None, (), (0.1, 1.0)
    )


def database_failed_over(world: World) -> Fault:
    """The server is gone, and its replica takes over. Then that gets a replica, too."""

    def begin() -> None:
        lost = world.servers.pop(0)
        lost.kill()
        world.servers[0].promote()

    return Fault("fail-over of PostgreSQL to its replica", begin, world.add_replica, (), (1.0, 5.0))


def database_link(world: World, head: Host, how: str) -> Fault:
    relays = world.relays[head.name]

    def begin() -> None:
        for relay in relays:
            if how == "cut":
                relay.cut()
            else:
                relay.delay_s = 0.1

    def end() -> None:
        for relay in relays:
            relay.mend()

    return Fault(f"{how} link of {head.name} to PostgreSQL", begin, end, (), (2.0, 12.0))


def clock(world: World, stepped: SteppedClock, step_s: int) -> Fault:
    name = f"clock of {world.heads[-1].name} set by {step_s:+d} s"
    return Fault(name, lambda: stepped.set_by(step_s), lambda: stepped.set_by(0), (), (3.0, 15.0))


def _again(world: World, host: Host) -> Callable[[], None]:
    """Start what does not start by itself: a supervisor or a starter that was killed has nobody who
    looks after it but the operator, or systemd."""

    def end() -> None:
        if host in world.heads:
            if not world.find(host, "supervisor"):
                world.shoal(host, "up")
        elif not world.find(host, "starter"):
            world.join(host)

    return end


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
