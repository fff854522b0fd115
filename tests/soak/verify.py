"""What has to be true when a soak is over."""

from __future__ import annotations

import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
from harness.clients import whole_log
from harness.history import Launched, Op, check
from harness.records import launched

from shoal.client import Client, ShoalError
from shoal.core.state.events.log import Recorded
from shoal.model.ledger import By
from tests.soak.work import SERVICE, Asked, Work
from tests.soak.world import World

CALM_S = 180.0
NEAR_S = 3.0  # a fault may show in a request that began this long after it had ended
FOUND_MAX = 20


class Span(msgspec.Struct, frozen=True):
    """A fault as it was."""

    name: str
    began: float
    ended: float
    hurts: tuple[str, ...]


class Verdict(msgspec.Struct):
    """`found` is what is wrong, by kind; `counts` is what was done."""

    found: dict[str, list[str]] = {}
    counts: dict[str, int] = {}

    def add(self, kind: str, texts: list[str]) -> None:
        self.found.setdefault(kind, []).extend(texts)
        self.counts[kind] = len(self.found[kind])


def calm(world: World, verdict: Verdict) -> None:
    """All faults are over: every node has to be ready again."""

    def ready(client: Client) -> str:
        states = {node.id: node.state for node in client.nodes()}
        away = {name: state for name, state in states.items() if state != "ready"}
        return f"not ready {CALM_S:g} s after the last fault: {away}" if away else ""

    _until(world, ready, "nodes that did not come back", verdict)


def finish(world: World, work: Work, verdict: Verdict) -> None:
    """Jobs end, then the service."""

    def quiet(client: Client) -> str:
        live = client.jobs(limit=1000)
        for row in live:
            if not row.name.startswith(SERVICE):
                client.cancel(row.id)
        return f"still there after {CALM_S:g} s: {[row.id for row in live][:20]}" if live else ""

    with world.asking() as client:
        client.stop_service(SERVICE)
    _until(world, quiet, "jobs that did not end", verdict)


def _until(world: World, problem: Callable[[Client], str], kind: str, verdict: Verdict) -> None:
    deadline, text = time.monotonic() + CALM_S, ""
    while time.monotonic() < deadline:
        try:
            with world.asking() as client:
                text = problem(client)
        except ShoalError as error:
            text = str(error)
        if not text:
            break
        time.sleep(1)
    verdict.add(kind, [text] if text else [])


def verify(world: World, work: Work, spans: list[Span], verdict: Verdict) -> None:
    with world.asking() as client:
        log = whole_log(client)
        ledger = client.ledger(by=By.ACCOUNT)
    members = _members(world)
    ops = [op for recorder in work.recorders for op in recorder.ops]
    crashed = [f"{one.name}: {one.error!r}" for one in work.recorders if one.error]
    verdict.add("clients that crashed", crashed)
    verdict.add("broken promises", check(ops, log, members))
    twice = world.shared / "twice"
    verdict.add("GPUs held twice", twice.read_text().splitlines() if twice.exists() else [])
    verdict.add("members run twice", _twice(world.shared / "ran"))
    verdict.add("steps lost or taken twice", _steps(world, work))
    verdict.add("maps with wrong results", work.maps)
    verdict.add("failed requests without a cause", _unexcused(world, work, spans, members))
    total = sum(account.gpu_us for account in ledger.accounts)
    wrong = f"accounts are {total} GPU-us, the capacity is {ledger.capacity_gpu_us}"
    verdict.add("ledger", [wrong] if total != ledger.capacity_gpu_us else [])
    verdict.counts |= _counts(ops, log, members, work)


def _counts(
    ops: list[Op], log: list[Recorded], members: list[Launched], work: Work
) -> dict[str, int]:
    done = Counter(f"{op.kind} {op.result}" for op in ops)
    kinds = Counter(type(one.event).__name__ for one in log)
    return {
        **dict(sorted(done.items())),
        "events": len(log),
        "members launched": len(members),
        "controllers started": kinds["ControllerStarted"],
        "nodes lost": kinds["NodeLost"],
        "requests answered": work.answered,
        "requests failed at one gateway": len(work.failed),
        "requests given up while every gateway was hurt": work.given_up,
        "maps": work.maps_done,
        "gangs": len(work.gangs),
    }


def _members(world: World) -> list[Launched]:
    """By the agents' own records. A node whose clock is set has no times to compare."""
    found: list[Launched] = []
    for host in (*world.heads, *world.nodes.values()):
        if not world.clock_of(host):
            found += launched(world.node_folders(host))
    return found


def _twice(ran: Path) -> list[str]:
    lines = Counter(ran.read_text().splitlines()) if ran.exists() else Counter[str]()
    return [f"{line}: {count} times" for line, count in lines.items() if count > 1]


def _steps(world: World, work: Work) -> list[str]:
    found = []
    for job in work.gangs:
        path = world.shared / f"{job}.steps"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [int(line.split()[1]) for line in lines]
        if steps != list(range(len(steps))):
            found.append(f"{job} took {len(steps)} steps, and they are not 0, 1, 2, ...")
    return found


def _unexcused(world: World, work: Work, spans: list[Span], members: list[Launched]) -> list[str]:
    """A request may fail because its replica died, was stopped or was cut off while it answered, or
    because its gateway was hurt itself: a fault of that head, or the link to it."""
    nodes = {f"{one.job}.{one.attempt}.{one.member}": one.node for one in members}
    begun: dict[int, list[str]] = defaultdict(list)
    ended: set[tuple[int, str]] = set()
    for file in (world.shared / "requests").iterdir():
        for line in file.read_text().splitlines():
            what, _, number = line.partition(" ")
            if what == "begin":
                begun[int(number)].append(file.name)
            else:
                ended.add((int(number), file.name))

    def excused(asked: Asked) -> bool:
        died = any((asked.number, replica) not in ended for replica in begun[asked.number])
        places = {asked.gateway, *(nodes.get(replica, "") for replica in begun[asked.number])}
        return died or any(
            places & set(span.hurts)
            and span.began <= asked.ended
            and span.ended + NEAR_S >= asked.began
            for span in spans
        )

    return [
        f"request {one.number} at {one.gateway}, {one.ended - one.began:.1f} s: {one.why}"
        for one in work.failed
        if not excused(one)
    ]


def leftovers(world: World) -> list[str]:
    """After `shoal down` and `shoal leave` everywhere, only process 1 of each host is left."""
    found = []
    for host in (*world.heads, *world.nodes.values()):
        for pid, part in world.processes(host).items():
            words = Path(f"/proc/{pid}/cmdline")
            text = words.read_text().replace("\0", " ")[:80] if words.exists() else ""
            if part or (text and "unshare" not in text and " -S -E -c" not in text):
                found.append(f"{host.name}: {part or 'process'} {pid}: {text}")
    return found


def after_close(world: World) -> list[str]:
    """Nothing of it is left on this machine: no mount, namespace, process or control group."""
    found = []
    mark = str(world.scratch)
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if mark in line]
    loops = subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    found += [line for line in loops.splitlines() if mark in line]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found += [line for line in listed.splitlines() if line.startswith(world.net.switch[:-6])]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_text()
            except OSError:
                continue
            if mark in words:
                found.append(f"process {folder.name}: {words[:80]}")
    return found
