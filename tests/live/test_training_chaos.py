"""A gang that is killed, stopped, slowed and robbed of nodes ends as if nothing had been."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.control.home import ClusterConfig
from shoal.core.state.events.nodes import NodeJudged
from shoal.core.state.events.runs import JobRequeued, JobStopping
from shoal.model.job import StopCause
from shoal.model.node import NodeSpec
from tests.live.cluster import Live, all_pids, live_cluster
from tests.needs import need

SCRIPT = Path(__file__).parent.parent / "train" / "scripts" / "tiny.py"
ROOT = SCRIPT.parent.parent.parent.parent
STEPPER = Path(__file__).with_name("stepper.py")
STEPS = 300
SAMPLES, BATCH = 320, 16
HANG_AFTER_MS = 4_000
WAIT_S = 240.0
STOPPED_S, RUNNING_S = 0.12, 0.04  # of a member that is slowed


class Chaos:
    """Hurts one job, each time when it has got some steps further."""

    def __init__(self, live: Live, job: str, rng: random.Random) -> None:
        self._live, self._job, self.rng = live, job, rng

    def play(self, faults: list[str], gap: int) -> None:
        step = 0
        for fault in faults:
            step = self.wait_for_step(step + gap)
            attempt = self._live.client.job(self._job).attempt
            getattr(self, fault)()
            if fault != "slow_node":
                self._wait_for_attempt(attempt + 1, f"{fault} at step {step}")

    def _wait_for_attempt(self, attempt: int, cause: str) -> None:
        until(
            lambda: self._live.client.job(self._job).attempt >= attempt,
            f"attempt {attempt} after {cause}",
            lambda: self._live.client.why(self._job).why,
        )

    def kill_member(self) -> None:
        os.kill(self.some_member(), signal.SIGKILL)

    def hang_member(self) -> None:
        os.kill(self.some_member(), signal.SIGSTOP)

    def kill_agent(self) -> None:
        """Keeper and agent at once: nobody is left to clean up."""
        node = self.rng.choice(self._live.client.job(self._job).gang).node
        info = msgspec.json.decode((self._live.home.node(node) / "agent.json").read_bytes())
        for pid in (info["keeper"], info["pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def slow_node(self, seconds: float = 5.0) -> None:
        pid = self.some_member()
        end = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            try:
                while time.monotonic() < end:
                    os.kill(pid, signal.SIGSTOP)
                    threading.Event().wait(STOPPED_S)
                    os.kill(pid, signal.SIGCONT)
                    threading.Event().wait(RUNNING_S)
            finally:
                os.kill(pid, signal.SIGCONT)

    def some_member(self) -> int:
        job = self._live.client.job(self._job)
        ref = f"{self._job}.{job.attempt}.{self.rng.randrange(job.spec.members)}"
        until(lambda: bool(_with_ref(ref)), more=lambda: f"{ref} is nowhere")
        return _with_ref(ref)[0]

    def wait_for_step(self, step: int) -> int:
        """Until the job is there, or has ended."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            job = self._live.client.job(self._job)
            assert job.finished_ms is None, f"over before step {step}: {job.why}"
            if job.progress is not None and job.progress.step >= step:
                return job.progress.step
            time.sleep(0.05)
        raise AssertionError(f"not at step {step}: {self._live.client.why(self._job)}")


def _with_ref(ref: str) -> list[int]:
    """The leader of the member's session, of all processes that carry its name."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if f"SHOAL_REF={ref}\0".encode() in environment and os.getsid(pid) == pid:
                found.append(pid)
    return found


@contextlib.contextmanager
def small_nodes(count: int) -> Iterator[Live]:
    """Room for one member on each: all train but one, which is spare."""
    nodes = tuple(
        NodeSpec(id=f"n{number}", gpus=0, cpu_milli=1000, memory_mb=2000)
        for number in range(1, count + 1)
    )
    with live_cluster(config=ClusterConfig(nodes=nodes, port=0)) as live:
        policy = live.client.policy()
        live.client.set_policy(msgspec.structs.replace(policy, hang_after_ms=HANG_AFTER_MS))
        yield live


def train(live: Live, epochs: int, sleep_s: float) -> str:
    need("torch")
    env = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "EVERY": "10",
        "SLEEP": str(sleep_s),
    }
    return submit(live, str(SCRIPT), str(SAMPLES), str(BATCH), str(epochs), env=env)


def submit(live: Live, *arguments: str, env: dict[str, str] | None = None) -> str:
    spec = live.spec(
        sys.executable, *arguments, env=env, members=len(live.client.nodes()) - 1,
        restart="on-failure", retries=50, backoff_ms=100,
    )  # fmt: skip
    return live.client.submit(spec).id


def result(live: Live, job: str) -> tuple[list[int], float]:
    """How often each sample was used, and the last loss."""
    said = dict(
        line.split(" ", 1)
        for line in live.output(job).splitlines()
        if line.startswith(("used ", "loss "))
    )
    return ast.literal_eval(said["used"]), float(said["loss"])


def check_steps(live: Live, job: str, total: int) -> None:
    """Each attempt goes on at or before the step that the one before had reached, never after,
    and counts on without a gap; the last one gets to the end."""
    reached = -1
    for attempt in range(1, live.client.job(job).attempt + 1):
        lines = live.output(job, attempt=attempt).splitlines()
        steps = [int(line.split()[1]) for line in lines if line.startswith("step ")]
        if steps:
            assert steps == list(range(steps[0], steps[0] + len(steps))), f"attempt {attempt}"
            assert steps[0] <= reached + 1, f"attempt {attempt} left steps out"
            reached = max(reached, steps[-1])
    assert reached == total - 1


def survive(live: Live, seed: int, faults: list[str], epochs: int, sleep_s: float) -> str:
    """An undisturbed run, then one in which all of this happens; they end alike."""
    total = SAMPLES * epochs // BATCH
    calm = train(live, epochs, sleep_s)
    assert live.wait(calm, timeout_s=WAIT_S) == "succeeded", live.client.why(calm)
    rng = random.Random(seed)
    rng.shuffle(faults)
    job = train(live, epochs, sleep_s)
    Chaos(live, job, rng).play(faults, gap=total // (len(faults) + 2))
    state = live.wait(job, timeout_s=WAIT_S)
    told = f"seed {seed}, {faults}: {live.client.why(job).why}"
    assert state == "succeeded", told
    (used_calm, loss_calm), (used, loss) = result(live, calm), result(live, job)
    assert used_calm == [epochs] * SAMPLES
    assert used == [epochs] * SAMPLES, told
    assert loss == pytest.approx(loss_calm, rel=0.05, abs=1e-3), told
    check_steps(live, job, total)
    until(lambda: not live.member_processes(), "members were left behind")
    return job


def causes(live: Live, job: str) -> list[StopCause]:
    events = [recorded.event for recorded in live.client.why(job).events]
    return [event.cause for event in events if isinstance(event, JobRequeued)]


def test_a_gang_that_is_hurt_in_every_way_makes_all_its_steps(tmp_path: Path) -> None:
    """What `shoal.train` makes of it is tested without a cluster, in tests/train/test_survive.py;
    both together below, in `make long`."""
    rng = random.Random(int(os.environ.get("SHOAL_SEED", "4")))
    faults = ["kill_member", "kill_agent", "hang_member", "slow_node"]
    rng.shuffle(faults)
    pace = tmp_path / "pace"
    pace.write_text("no node")  # all of them take their steps at the same pace
    with small_nodes(3) as live:
        job = submit(live, str(STEPPER), str(STEPS), str(pace))
        Chaos(live, job, rng).play(faults, gap=STEPS // (len(faults) + 2))
        assert live.wait(job, timeout_s=WAIT_S) == "succeeded", live.client.why(job)
        check_causes(live, job)
        attempts = range(1, live.client.job(job).attempt + 1)
        lines = [live.output(job, attempt=n).splitlines() for n in attempts]
        begins = [int(found[0].split()[1]) for found in lines if found]
        assert begins == sorted(begins), "an attempt begins with the last step that was saved"
        assert begins[0] == 0 < begins[1]
        assert lines[-1][-1] == f"done {STEPS}"
        until(lambda: not live.member_processes(), "members were left behind")


def check_causes(live: Live, job: str) -> None:
    stopped = causes(live, job)
    for cause in (StopCause.FAILURE, StopCause.NODE_LOSS, StopCause.HANG):
        assert cause in stopped, stopped
    why = [
        recorded.event.why
        for recorded in live.client.why(job).events
        if isinstance(recorded.event, JobStopping)
    ]
    assert any("no step for" in text for text in why), why


@pytest.mark.soak  # a gang of torch's, which takes a minute of CPU time
def test_a_gang_that_is_hurt_in_every_way_ends_like_one_that_was_left_alone() -> None:
    seed = int(os.environ.get("SHOAL_SEED", "4"))
    with small_nodes(3) as live:
        faults = ["kill_member", "kill_agent", "hang_member", "slow_node"]
        check_causes(live, survive(live, seed, faults, epochs=8, sleep_s=0.05))


@pytest.mark.soak
def test_a_gang_survives_an_hour_of_faults_in_some_minutes() -> None:
    seed = int(os.environ.get("SHOAL_SEED", "11"))
    faults = ["kill_member"] * 5 + ["kill_agent"] * 4 + ["hang_member"] + ["slow_node"] * 2
    with small_nodes(5) as live:
        survive(live, seed, faults, epochs=60, sleep_s=0.08)


@pytest.mark.soak
def test_a_node_that_is_slow_is_suspected_by_name() -> None:
    with small_nodes(5) as live:
        job = train(live, epochs=60, sleep_s=0.08)
        chaos = Chaos(live, job, random.Random(5))
        chaos.wait_for_step(20)
        pid = chaos.some_member()
        node = next(
            line.split("=", 1)[1]
            for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
            if line.startswith("SHOAL_NODE=")
        )
        chaos.rng = random.Random(5)
        chaos.wait_for_step(21)
        chaos.slow_node(seconds=45)
        judged = [
            recorded.event
            for recorded in live.client.events(node=node).events
            if isinstance(recorded.event, NodeJudged)
        ]
        assert judged, "nobody was suspected"
        assert "of its own a step where the gang takes" in judged[0].why
        live.client.cancel(job)
        assert live.wait(job) == "cancelled"
