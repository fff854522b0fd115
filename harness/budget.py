"""What a job and a start cost, in counts: a real cluster under `strace`, as root.

python -m harness.budget            every count, beside the one in tests/budget.toml
python -m harness.budget --write    writes today's into it
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.syscalls import Call, Counts, Trace, by_name, traced_by
from harness.waiting import until
from shoal.client import Address, Client
from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from shoal.model.job import JobSpec
from shoal.model.ledger import PriceList
from shoal.model.policy import Tenant
from shoal.model.schedule import ScheduleSpec
from shoal.model.service import ServiceSpec
from shoal.model.workflow import WorkflowJob

BOUNDS = Path(__file__).parent.parent / "tests" / "budget.toml"
SHOAL = (sys.executable, "-m", "shoal.main")
JOBS, BURST, REST_S = 25, 100, 1.5
WARM_UP = 5
PATH = "/usr/bin:/bin"


class Section(NamedTuple):
    """Counts by name; `detail` says which system calls they consist of."""

    counts: dict[str, float]
    detail: str


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` is what was counted last. It may grow by `slack`, which is a share of it, and by
    `room`, where it is small and depends on how threads take turns. `why`: what it consists of."""

    count: float
    why: str
    slack: float = 0.15
    room: float = 0

    @property
    def most(self) -> float:
        return self.count * (1 + self.slack) + self.room


# One process with one client, as a script of a user. It writes down when each job began.
IN_TURN = """
for _ in range(jobs):
    at_s.append(time.time())
    client.job(client.submit(spec).id, wait_for="finished", wait_s=30)
"""
AT_ONCE = """
at_s.append(time.time())
for job in [client.submit(spec).id for _ in range(jobs)]:
    client.job(job, wait_for="finished", wait_s=30)
"""
SCRIPT = """
import json, sys, time
from shoal.client import Client
from shoal.model.job import JobSpec

home, stamps, tenant, path = sys.argv[1:5]
jobs = int(sys.argv[5])
spec = JobSpec(command=("true",), env={"PATH": path}, tenant=tenant)
at_s = []
client = Client.at_home(home)
"""
WRITE_DOWN = """
at_s.append(time.time())
open(stamps, "w").write(json.dumps(at_s))
"""


def missing() -> str | None:
    """Why nothing can be counted here."""
    if os.geteuid() != 0:
        return "needs root: only root counts the calls of every user's processes"
    if shutil.which("strace") is None:
        return "strace is not installed: apt-get install strace"
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return f"processes may not be traced here: {done.stderr.strip()}" if done.returncode else None


class Phase:
    """What was called while something happened, by who called: the `client`, the `controller`, the
    `nodes` (all other processes of the cluster that live on) and the `members`. `at_s` are the
    moments at which jobs began, and the end."""

    def __init__(self, calls: list[Call], roles: dict[int, str], at_s: Sequence[float]) -> None:
        self.at_s = at_s
        self._calls = [(roles.get(call.task, "members"), call) for call in calls]

    @property
    def seconds(self) -> float:
        return self.at_s[-1] - self.at_s[0]

    def calls(self, *roles: str) -> list[Call]:
        """Between the first and the last moment."""
        begin_s, end_s = self.at_s[0], self.at_s[-1]
        return [
            call
            for role, call in self._calls
            if (not roles or role in roles) and begin_s <= call.at_s < end_s
        ]

    def counts(self, *roles: str) -> Counts:
        return Counts.of(self.calls(*roles))

    def detail(self, jobs: int = 1) -> str:
        """Which calls, of whom."""
        parts = []
        for role in dict.fromkeys(role for role, _ in self._calls):
            parts.append(f"{role}: {by_name(self.calls(role), jobs)}")
        return "\n    ".join(parts)

    def per_job(self, *roles: str) -> Counts:
        """Of a job that nothing came between, such as a beat, or a report that went in two parts
        because the machine was busy. The lowest tenth is left out."""
        ends_s = self.at_s[1:]
        jobs: list[list[Call]] = [[] for _ in ends_s]
        for call in self.calls(*roles):
            jobs[bisect_right(ends_s, call.at_s)].append(call)
        columns = zip(*(Counts.of(job) for job in jobs), strict=True)
        return Counts(*(sorted(column)[len(jobs) // 10] for column in columns))


class Cluster:
    """A head with one node, under `strace` from its first process on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = Home(root / "home")
        self._env = {**os.environ, "SHOAL_HOME": str(self.home.path)}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        words = ("up", "--port", "0", "--nodes", "1", "--gpus", "8", "--cpus", "64")
        self._others: Set[int] = frozenset()
        begun_s = time.time()
        self._trace = Trace((*SHOAL, *words), root / "cluster.log", self._env)
        self._trace.wait_for_command()
        until(self.home.address.exists, "a controller")
        command = {self._trace.command: "command"}
        at_s = (begun_s, time.time())
        self.start = Phase(self._trace.calls(), self._roles() | command, at_s)

    @cached_property
    def client(self) -> Client:
        return Client.at_home(self.home.path, patience_s=60)

    def close(self) -> None:
        self.client.close()
        take_down(self.home, lambda _: None)
        self._trace.close()

    def let_others(self, act: Callable[[Client], None]) -> None:
        """What lives on after it is not a part of the path of a plain job."""
        before = traced_by(self._trace.tracer.pid)
        act(self.client)
        self._others = traced_by(self._trace.tracer.pid).keys() - before.keys()

    def controller(self) -> int:
        return msgspec.json.decode(self.home.address.read_bytes(), type=Address).pid

    def jobs(self, work: str, jobs: int, tenant: str = "default") -> Phase:
        """Runs them by a client in a process of its own."""
        begin = self._trace.size()
        stamps = self.root / "stamps"
        words = (str(self.home.path), str(stamps), tenant, PATH, str(jobs))
        client = self.run((sys.executable, "-c", SCRIPT + work + WRITE_DOWN, *words))
        return self._phase(begin, json.loads(stamps.read_bytes()), client)

    def run(self, argv: Sequence[str]) -> list[Call]:
        """The calls of a command that is not a part of the cluster."""
        trace = Trace(argv, self.root / "command.log", self._env)
        trace.wait_for_all()
        return trace.calls()

    def rest(self) -> Phase:
        """What it does when nobody wants anything of it. This lasts for as long as it lasts."""
        begin, begun_s = self._trace.size(), time.time()
        time.sleep(REST_S)
        return self._phase(begin, (begun_s, time.time()))

    def kill_controller(self) -> Phase:
        """Until another answers."""
        before = self.client.status().epoch
        begin, begun_s = self._trace.size(), time.time()
        os.kill(self.controller(), signal.SIGKILL)
        until(lambda: self.client.status().epoch != before, "another controller")
        return self._phase(begin, (begun_s, time.time()))

    def done(self) -> dict[str, float]:
        """Steps and commits of this controller so far."""
        headers = {"Authorization": f"Bearer {self.home.read_token()}"}
        request = urllib.request.Request(f"{self.client.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        return {
            name: float(text.partition(f"shoal_{kind}_duration_seconds_count ")[2].split()[0])
            for name, kind in (("steps", "step"), ("commits", "commit"))
        }

    def _phase(self, begin: int, at_s: Sequence[float], client: Sequence[Call] = ()) -> Phase:
        calls = self._trace.calls(begin)
        roles = self._roles() | {call.task: "client" for call in client}
        return Phase([*calls, *client], roles, at_s)

    def _roles(self) -> dict[int, str]:
        controller = self.controller()
        role = {controller: "controller"} | dict.fromkeys(self._others, "others")
        return {
            task: role.get(process, "nodes")
            for process, tasks in traced_by(self._trace.tracer.pid).items()
            for task in tasks
        }


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """If modules were compiled while it came up, once more: only then are they as they will be."""
    root = Path(tempfile.mkdtemp(prefix="shoal-budget-"))
    made = Cluster(root)
    try:
        if any(".pyc." in call.arguments for call in made.start.calls()):
            made.close()
            shutil.rmtree(made.home.path)
            made = Cluster(root)
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def bounds() -> dict[str, dict[str, Bound]]:
    return msgspec.toml.decode(BOUNDS.read_bytes(), type=dict[str, dict[str, Bound]])


def measure() -> dict[str, Section]:
    with cluster() as made:
        sections = {"up": of_start(made.start)}
        made.jobs(IN_TURN, WARM_UP)
        sections["job"] = of_jobs(made, "default")
        made.client.add_tenant("team")
        made.jobs(IN_TURN, WARM_UP, "team")
        sections["job of a tenant"] = of_jobs(made, "team")
        sections["job of many"] = of_burst(made)
        # Before it has a gateway, which is loaded beside its start: how much of that is seen
        # depends on how busy the machine is.
        sections["controller killed"] = of_kill(made)
        made.let_others(use_features)
        # What the gateway and schedules do by the clock counts more on a slow machine.
        beside = [of_jobs(made, "default") for _ in range(2)]
        least = {name: min(one.counts[name] for one in beside) for name in beside[0].counts}
        sections["job beside features"] = Section(least, beside[0].detail)
        return sections | of_commands(made)


def use_features(client: Client) -> None:
    """What others may use in the same cluster: shares, budgets and prices, a service behind the
    gateway, a schedule, notices, limits on unused GPUs."""
    teams = tuple(
        Tenant(name=f"team{number}", quota_gpus=1, budget_gpu_hours=1000) for number in range(5)
    )
    policy = msgspec.structs.replace(
        client.policy(), tenants=teams, idle_warn_ms=600_000, idle_reclaim_ms=1_200_000
    )
    client.set_policy(policy)
    client.set_prices(PriceList(currency="EUR", co2_g_per_kwh=300))
    client.add_rule("failed,waiting:1h=https://127.0.0.1:9/")
    plain = JobSpec(command=("true",), env={"PATH": PATH})
    client.set_schedule(
        ScheduleSpec(name="yearly", cron="0 0 1 1 *", jobs=(WorkflowJob("job", plain),))
    )
    serving = ("sh", "-c", 'exec "$0" -m http.server "$PORT"', sys.executable)
    replica = JobSpec(command=serving, env={"PATH": PATH})
    client.submit_service(ServiceSpec(name="files", replica=replica))
    until(lambda: client.service("files").ready, "a replica that is ready")


def of_start(start: Phase) -> Section:
    everything = start.counts()
    counts = {
        "calls": start.counts("controller", "nodes", "members").calls,  # the command waits for them
        "modules": everything.modules,
        "command modules": start.counts("command").modules,
        "execs": everything.execs,
        "flushes": everything.flushes,
        "file bytes": everything.file_bytes,
    }
    return Section(dict(counts), start.detail())


def of_jobs(made: Cluster, tenant: str) -> Section:
    before = made.done()
    phase = made.jobs(IN_TURN, JOBS, tenant)
    after = made.done()
    controller, nodes = phase.per_job("controller"), phase.per_job("nodes")
    members, client = phase.per_job("members"), phase.per_job("client")
    counts = {
        "controller calls": controller.calls,
        "controller handovers": controller.handovers,
        "controller messages": controller.messages,
        "controller file bytes": controller.file_bytes,
        "node calls": nodes.calls,
        "node handovers": nodes.handovers,
        "node messages": nodes.messages,
        "node file bytes": nodes.file_bytes,
        "member calls": members.calls,
        "client calls": client.calls,
        "client messages": client.messages,
        "execs": members.execs + nodes.execs + controller.execs,
        "flushes": controller.flushes + nodes.flushes,
    }
    means = {name: (after[name] - before[name]) / JOBS for name in after}
    return Section(counts | means, phase.detail(JOBS))


def of_burst(made: Cluster) -> Section:
    """Less what it does at rest in the same time."""
    before = made.done()
    phase = made.jobs(AT_ONCE, BURST)
    after = made.done()
    rest = made.rest()
    longer = phase.seconds / rest.seconds

    def mean(*roles: str) -> Counts:
        pairs = zip(phase.counts(*roles), rest.counts(*roles), strict=True)
        return Counts(*((busy - longer * idle) / BURST for busy, idle in pairs))

    controller, nodes = mean("controller"), mean("nodes")
    counts = {
        "controller calls": controller.calls,
        "controller messages": controller.messages,
        "controller file bytes": controller.file_bytes,
        "node calls": nodes.calls,
        "node file bytes": nodes.file_bytes,
        "member calls": mean("members").calls,
        "flushes": controller.flushes + nodes.flushes,
        "calls per second at rest": rest.counts().calls / rest.seconds,
    }
    means = {name: (after[name] - before[name]) / BURST for name in after}
    return Section(counts | means, phase.detail(BURST))


def of_kill(made: Cluster) -> Section:
    phase = made.kill_controller()
    controller = phase.counts("controller")
    counts = {
        "controller calls": controller.calls,
        "controller modules": controller.modules,
        "execs": controller.execs,
        "flushes": controller.flushes,
    }
    return Section(dict(counts), phase.detail())


def of_commands(made: Cluster) -> dict[str, Section]:
    """What they need beyond a Python that does nothing."""
    bare = Counts.of(made.run((sys.executable, "-c", "pass")))
    sections = {}
    for verb in ("--help", "status"):
        calls = made.run((*SHOAL, verb))
        counts = Counts.of(calls)
        beyond = {
            "calls": counts.calls - bare.calls,
            "modules": counts.modules - bare.modules,
            "execs": counts.execs - bare.execs,
            "messages": counts.messages,
        }
        sections[f"shoal {verb}"] = Section(dict(beyond), by_name(calls))
    return sections


def write(sections: dict[str, Section]) -> None:
    """Only the counts; the reasons are for people to write."""
    lines, section = [], ""
    for line in BOUNDS.read_text().splitlines():
        if header := re.fullmatch(r'\["?([^"]*)"?\]', line):
            section = header[1]
        elif entry := re.match(r'"?([^"=]+?)"? = \{ count = [0-9.]+', line):
            count = sections[section].counts[entry[1]]
            line = re.sub("count = [0-9.]+", f"count = {_short(count)}", line, count=1)
        lines.append(line)
    BOUNDS.write_text("\n".join(lines) + "\n")


def _short(count: float) -> str:
    return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def main() -> None:
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    sections, known = measure(), bounds()
    for section, measured in sections.items():
        for name, count in measured.counts.items():
            bound = known.get(section, {}).get(name)
            before = "new" if bound is None else f"{_short(bound.count)} in the table"
            print(f"{section}: {name}: {_short(count)} ({before})")
        print(f"    {measured.detail}")
    if "--write" in sys.argv[1:]:
        write(sections)


if __name__ == "__main__":
    main()
