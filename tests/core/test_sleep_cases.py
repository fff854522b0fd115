"""Sleep beside everything else that happens to jobs and nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.answers.holders import holders_text
from shoal.core.answers.why import explain
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.job import MemberRef, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy, Preempt, Sleeping
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, SleepJob, Uses, WakeJob
from tests.core.build import Cluster, kinds
from tests.core.test_sleep import CALM, cluster, nap, rouse
from tests.core.test_sleep_line import asleep
from tests.core.training import Training


def dozing(made: Cluster, **fields: Any) -> str:
    job = made.run(**{"gpus": 1, "preemptible": True, "checkpoint_ms": 60_000, **fields})
    assert isinstance(made.ask(SleepJob(job, "ann")), Accepted)
    assert made.job(job).phase is Phase.DOZING
    made.deliver()
    return job


def in_phase(made: Cluster, phase: Phase, **fields: Any) -> str:
    job = dozing(made, **fields)
    if phase is not Phase.DOZING:
        nap(made, job)
    if phase is Phase.WAKING:
        made.ask(WakeJob(job, "ann"))
        made.deliver()
    assert made.job(job).phase is phase
    return job


NAPS = [Phase.DOZING, Phase.ASLEEP, Phase.WAKING]


@pytest.mark.parametrize("phase", NAPS)
def test_a_snapshot_in_each_phase_restores_the_state(phase: Phase) -> None:
    made = cluster("a", "b")
    in_phase(made, phase, members=2)
    image = msgspec.json.encode(made.state.snapshot())
    again = restore(msgspec.json.decode(image, type=Snapshot))
    assert msgspec.json.encode(again.snapshot()) == image
    assert (again.napping, again.wakeful) == (made.state.napping, made.state.wakeful)


@pytest.mark.parametrize("phase", NAPS)
def test_the_loss_of_a_node_in_each_phase_restarts_the_gang(phase: Phase) -> None:
    made = cluster("a", "b")
    job = in_phase(made, phase, members=2)
    made.reboot("b")
    made.hear("b")
    assert made.job(job).phase is Phase.STOPPING
    made.deliver()
    made.end(job, code=143)
    assert made.job(job).attempt == 2
    assert made.job(job).losses == 1


@pytest.mark.parametrize("phase", NAPS)
def test_all_members_may_end_in_each_phase(phase: Phase) -> None:
    made = cluster("a", "b")
    job = in_phase(made, phase, members=2)
    made.exit(job)
    made.exit(job, member=1)
    made.hear("a", "b")
    assert made.job(job).phase is Phase.FINISHED


@pytest.mark.parametrize("phase", NAPS)
def test_a_member_that_ends_well_in_each_phase_does_not_hold_up_the_rest(phase: Phase) -> None:
    made = cluster("a", "b")
    job = in_phase(made, phase, members=2)
    made.end(job, member=1)
    if phase is Phase.DOZING:
        made.books["a"].slept(MemberRef(job, 1, 0), 0, 100)
        made.hear("a")
        assert made.job(job).phase is Phase.ASLEEP
    elif phase is Phase.ASLEEP:
        made.ask(WakeJob(job, "ann"))
        assert made.job(job).phase is Phase.WAKING
    else:
        made.books["a"].awoke(MemberRef(job, 1, 0), 10)
        made.hear("a")
        assert made.job(job).phase is Phase.RUNNING


def test_a_sleeper_that_ends_while_room_is_made_for_it_starts_again_like_any_other() -> None:
    made = cluster()
    sleeper = asleep(
        made, gpus=1, memory_mb=10, priority=5, restart="on-failure", retries=1, backoff_ms=0
    )
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000, no_sleep=True)
    made.wait(600_000)
    made.ask(WakeJob(sleeper, "ann"))
    assert sleeper in made.state.claims
    assert made.job(low).phase is Phase.STOPPING
    made.end(sleeper, code=1)
    made.deliver()
    made.end(low, code=143)
    made.wait(60_000)
    made.hear("a")
    assert made.job(sleeper).members[0].slice.memory_mb == 10
    assert made.job(sleeper).attempt == 2


@pytest.mark.parametrize("free", [True, False])
def test_a_sleeper_on_a_node_that_is_drained_wakes_to_save_its_work_if_it_can(free: bool) -> None:
    made = cluster()
    job = in_phase(made, Phase.ASLEEP)
    if not free:
        made.run(gpus=1, restart="never")
    made.intend("a", NodeIntent.DRAINING)
    if free:
        assert made.job(job).phase is Phase.WAKING
        rouse(made, job)
    assert made.job(job).phase is Phase.STOPPING
    assert made.job(job).stop_cause is StopCause.DRAIN


def test_a_sleeper_that_is_killed_goes_back_to_its_checkpoint() -> None:
    made = cluster()
    job = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.wait(90_000)
    made.ask(SleepJob(job, "ann"))
    nap(made, job)
    made.wait(1_000_000)
    made.run(gpus=1, restart="never")
    made.intend("a", NodeIntent.DRAINING)
    made.deliver()
    made.end(job, code=137)
    assert made.job(job).kept_ms == 60_000
    assert "30s of work" in made.job(job).why


@pytest.mark.parametrize(("memory_mb", "sleeps"), [(100_000, True), (130_000, False)])
def test_a_victim_sleeps_only_if_that_costs_less_than_to_stop_it(
    memory_mb: int, sleeps: bool
) -> None:
    """At 2 GB/s out and 5 GB/s in: 70.6 s and 91.6 s, against 20 s of work and a restart."""
    made = Cluster(Policy(**CALM))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=200_000, memory_mb=1_000_000)
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.books["a"].uses = (Uses(MemberRef(low, 1, 0), memory_mb),)
    made.hear("a")
    made.wait(80_000)
    made.submit(gpus=1, priority=10)
    assert made.job(low).phase is (Phase.DOZING if sleeps else Phase.STOPPING)


def test_no_more_victims_sleep_on_a_node_than_the_policy_allows() -> None:
    made = cluster(gpus=4, sleepers_max=2)
    low = [made.run(gpus=1, preemptible=True, checkpoint_ms=600_000) for _ in range(4)]
    made.wait(300_000)
    made.submit(gpus=4, priority=10)
    phases = sorted(made.job(job).phase.value for job in low)
    assert phases == ["dozing", "dozing", "stopping", "stopping"]


def test_no_more_memory_is_lent_than_the_policy_allows() -> None:
    made = Cluster(Policy(**CALM, sleep_memory_percent=50))
    made.join("a", gpus=2, sleep="cuda", gpu_memory_mb=40, memory_mb=100)
    low = [made.run(gpus=1, preemptible=True, checkpoint_ms=600_000) for _ in range(2)]
    made.wait(300_000)
    made.submit(gpus=2, priority=10)
    assert sorted(made.job(job).phase.value for job in low) == ["dozing", "stopping"]


def test_turns_begin_once_it_is_known_what_a_job_has_on_its_gpu() -> None:
    """Until then it is taken to have the whole GPU, which is more than the node's memory."""
    made = Cluster(Policy(**CALM, turn_cost_percent=5, turn_ms_min=30_000))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=400, memory_mb=100)
    first = made.run(gpus=1)
    second = made.submit(gpus=1)
    made.wait(31_000)
    made.hear("a")
    assert made.job(first).phase is Phase.RUNNING
    made.books["a"].uses = (Uses(MemberRef(first, 1, 0), 10),)
    made.hear("a")
    made.wait(31_000)
    made.hear("a")
    assert made.job(first).phase is Phase.DOZING
    assert made.job(second).phase is Phase.WAITING


def test_a_job_that_must_not_sleep_is_stopped() -> None:
    made = cluster()
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000, no_sleep=True)
    made.wait(600_000)
    made.submit(gpus=1, priority=10)
    assert made.job(low).phase is Phase.STOPPING


def test_a_member_that_takes_more_memory_than_is_free_is_woken() -> None:
    made = Cluster(Policy(**CALM))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=400, memory_mb=1000)
    job = made.run(gpus=1, memory_mb=500)
    made.ask(SleepJob(job, "ann"))
    made.deliver()
    made.books["a"].slept(MemberRef(job, 1, 0), 501, 100)
    assert "SleepRefused" in kinds(made.hear("a").events)
    assert "it took 101 MB more of the node's memory than was set aside" in made.job(job).why


def test_after_a_refusal_the_reason_to_stop_names_it() -> None:
    made = cluster()
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.wait(600_000)
    high = made.submit(gpus=1, priority=10)
    why = render(explain(made.state, made.job(high), made.policy, made.now_ms))
    assert why == f"room is being freed for it: starts when {low} is asleep"
    made.deliver()
    made.books["a"].refuses(MemberRef(low, 1, 0), "the driver is too old")
    made.hear("a")
    assert high in made.state.claims  # nobody else takes the room meanwhile
    made.deliver()
    made.hear("a")
    assert made.job(low).phase is Phase.STOPPING
    assert made.job(low).why.endswith("could not be put to sleep: the driver is too old")


def test_a_job_with_whole_nodes_starts_where_somebody_sleeps() -> None:
    made = Cluster(Policy(**CALM, preempt=Preempt.NEVER))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=100, memory_mb=1000)
    sleeper = made.run(gpus=1, memory_mb=10)
    made.ask(SleepJob(sleeper, "ann"))
    nap(made, sleeper, 100)
    alone = made.submit(gpus=1, whole_nodes=True)
    assert made.job(alone).phase is Phase.STARTING
    made.deliver()
    made.hear("a")
    made.ask(WakeJob(sleeper, "ann"))
    assert made.job(sleeper).phase is Phase.ASLEEP
    assert isinstance(made.ask(SleepJob(alone, "ann")), Accepted)
    nap(made, alone, 100)
    assert made.job(sleeper).phase is Phase.WAKING
    rouse(made, sleeper)
    made.ask(WakeJob(alone, "ann"))
    assert made.job(alone).phase is Phase.ASLEEP  # not beside one that is awake
    made.end(sleeper)
    assert made.job(alone).phase is Phase.WAKING


def test_a_sleeper_with_whole_nodes_wakes_in_the_room_made_for_it_beside_its_own_memory() -> None:
    made = cluster(preempt=Preempt.PRIORITY, run_ms_min=0)
    alone = asleep(made, gpus=1, memory_mb=100, whole_nodes=True, priority=5)
    low = made.run(gpus=1, preemptible=True, no_sleep=True)
    made.wait(600_000)
    made.ask(WakeJob(alone, "ann"))
    assert alone in made.state.claims
    made.deliver()
    made.end(low, code=143)
    assert made.job(alone).phase is Phase.WAKING


def test_nobody_is_put_to_sleep_on_a_node_that_is_drained() -> None:
    """Of what runs there, jobs that are never restarted stay, and so do replicas that answer their
    last requests."""
    made = cluster()
    job = made.run(gpus=1, restart="never")
    made.intend("a", NodeIntent.DRAINING)
    answer = made.ask(SleepJob(job, "ann"))
    assert answer == Refused("job", f"{job} cannot be put to sleep: a is being drained")


def test_the_reason_names_sleepers_whose_memory_a_job_needs() -> None:
    made = Cluster(Policy(**CALM))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=400, memory_mb=1000)
    sleeper = made.run(gpus=1, memory_mb=100)
    made.ask(SleepJob(sleeper, "ann"))
    nap(made, sleeper, 400)
    job = made.submit(gpus=1, memory_mb=800)
    why = render(explain(made.state, made.job(job), made.policy, made.now_ms))
    assert why.endswith(f"500 MB of memory on a are held by {sleeper}, which sleeps there")


def test_a_sleeper_holds_no_gpu_in_the_answers() -> None:
    made = cluster(gpus=2)
    asleep(made, gpus=1)
    runs = made.run(gpus=2)
    job = made.submit(gpus=1)
    text = holders_text(made.state, made.job(job), lambda _: True)
    assert text == f"2 of 2 GPUs are held by {runs}"


def test_a_sleeper_that_is_to_stay_asleep_gives_up_its_claim() -> None:
    made = cluster()
    sleeper = asleep(made, gpus=1, priority=5)
    made.run(gpus=1, preemptible=True, checkpoint_ms=60_000, no_sleep=True)
    made.wait(600_000)
    made.ask(WakeJob(sleeper, "ann"))
    assert sleeper in made.state.claims
    made.ask(SleepJob(sleeper, "ann"))
    assert sleeper not in made.state.claims


def test_a_policy_that_changes_in_the_middle_lets_sleepers_wake() -> None:
    made = cluster(turn_cost_percent=5)
    first = made.run(gpus=1)
    second = made.submit(gpus=1)
    made.wait(31_000)
    made.hear("a")
    nap(made, first)
    made.deliver()
    made.hear("a")
    made.policy = Policy(**CALM, sleep=Sleeping.NEVER)
    made.wait(100_000)
    made.hear("a")
    assert made.job(second).phase is Phase.RUNNING
    made.end(second)
    assert made.job(first).phase is Phase.WAKING


def test_a_silent_node_keeps_its_sleepers_and_wakes_them_when_it_is_back() -> None:
    made = Cluster(Policy(run_ms_min=0, silent_after_ms=5_000, grace_ms=10**9))
    made.join("a", gpus=1, sleep="freeze")
    job = asleep(made, gpus=1)
    made.wait(6_000)
    made.step()
    made.ask(WakeJob(job, "ann"))
    why = render(explain(made.state, made.job(job), made.policy, made.now_ms))
    assert why.endswith("; a, where it sleeps, is silent")
    made.hear("a")
    assert made.job(job).phase is Phase.WAKING


def test_sleep_is_not_a_hang_and_does_not_spoil_the_pace() -> None:
    made = Training(Policy(run_ms_min=0, silent_after_ms=10**9, grace_ms=10**9), nodes="")
    made.join("a", gpus=1, sleep="freeze")
    job = made.run(gpus=1)
    made.walk(job, 40)
    made.ask(SleepJob(job, "ann"))
    nap(made, job)
    made.wait(3_600_000)
    made.hear("a")
    made.ask(WakeJob(job, "ann"))
    rouse(made, job)
    assert made.job(job).phase is Phase.RUNNING
    made.wait(30_000)
    made.tell()
    made.walk(job, 5)
    assert made.job(job).phase is Phase.RUNNING
    assert max(made.state.heard.watches[job].pace.paces_us) < 60_000_000
    made.wait(10_000)
    made.tell()
    assert made.job(job).phase is Phase.RUNNING
    made.wait(120_000)
    made.tell()
    assert made.job(job).stop_cause is StopCause.HANG
