"""Jobs of a replay sleep: exact on small cases, and nothing of their work is lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from shoal.core.state.events.log import Event, Recorded
from shoal.model.job import Job, JobSpec
from shoal.model.policy import Policy, Sleeping
from shoal.sim.replay.clusters import Cause, Conditions, Failures, alike, gangs_for
from shoal.sim.replay.metrics import Outcome
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import Replay, replay
from shoal.sim.replay.simulated import HOST_MB_PER_GPU, able_to_sleep
from shoal.sim.replay.traces import Arrival, Trace

PLAIN = Conditions(start_up_ms=0, stop_ms=0, restart_cost_ms=0)
NODES = able_to_sleep(alike(1, gpus=1))


def arrival(row: int, submit_s: int, work_s: int, priority: int = 0, gpu_mb: int = 0) -> Arrival:
    spec = JobSpec(command=("replayed",), gpus=1, cpu_milli=0, priority=priority)
    return Arrival(submit_s * 1000, work_s * 1000, spec, row, gpu_mb=gpu_mb)


# A long job, and after 700 s an urgent one; every 10 minutes there is a checkpoint.
TWO = Trace("two", [arrival(1, 0, 1000), arrival(2, 700, 100, priority=10)])


def ends_s(outcome: Outcome) -> dict[int, float]:
    records = outcome.records
    return {row: ms / 1000 for row, ms in zip(records.row, records.finished_ms, strict=True)}


def test_a_victim_sleeps_and_loses_nothing() -> None:
    """40 GB take 20.3 s to move out, and 8.3 s to move in."""
    asleep = replay(TWO, NODES, Policy(), PLAIN, check_every=1)
    assert ends_s(asleep) == {1: 1128.6, 2: 820.3}
    assert asleep.sleep.naps == 1 and asleep.sleep.lost_gpu_hours == 0
    assert asleep.sleep.asleep_gpu_hours == pytest.approx(100 / 3600)
    assert asleep.sleep.switching_gpu_hours == pytest.approx(28.6 / 3600)
    assert list(asleep.records.attempts) == [1, 1]
    assert asleep.levels.held == asleep.levels.waiting == 0
    held = zip(asleep.segments.row, asleep.segments.begin_ms, asleep.segments.end_ms, strict=True)
    assert list(held) == [(1, 0, 720_300), (2, 720_300, 820_300), (1, 820_300, 1_128_600)]


def test_without_sleep_the_victim_does_its_work_since_the_checkpoint_again() -> None:
    never = replay(TWO, NODES, Policy(sleep=Sleeping.NEVER), PLAIN, check_every=1)
    assert ends_s(never) == {1: 1200.0, 2: 800.0}
    assert never.sleep.naps == 0
    assert never.sleep.lost_gpu_hours == pytest.approx(100 / 3600)
    cannot = replay(TWO, alike(1, gpus=1), Policy(), PLAIN)
    assert ends_s(cannot) == ends_s(never)


def test_a_small_job_sleeps_faster_and_one_that_does_not_fit_into_memory_is_stopped() -> None:
    small = Trace("small", [arrival(1, 0, 1000, gpu_mb=4_000), TWO.arrivals[1]])
    assert ends_s(replay(small, NODES, Policy(), PLAIN)) == {1: 1103.4, 2: 802.3}
    tight = [msgspec.structs.replace(NODES[0], memory_mb=60_000)]  # of which half is for sleepers
    assert ends_s(replay(TWO, tight, Policy(), PLAIN)) == {1: 1200.0, 2: 800.0}
    assert NODES[0].memory_mb == HOST_MB_PER_GPU


def test_a_node_that_breaks_takes_its_sleepers_with_it() -> None:
    failures = Failures(0, repair_ms=50_000, causes=(Cause("power", 1),))
    conditions = msgspec.structs.replace(PLAIN, failures=failures)
    replay_ = Replay(TWO, NODES, Policy(), conditions, "", 0)
    replay_.cluster.at(750_000, replay_.cluster._fail, None)
    outcome = replay_.run(check_every=1)
    # At 750 s one sleeps and the other has worked for 29.7 s; both begin again at 800 s.
    assert ends_s(outcome) == {2: 900.0, 1: 1300.0}
    assert outcome.levels.held == outcome.levels.waiting == 0


@pytest.mark.parametrize(("back_s", "ends"), [(900, 1008.3), (None, 1008.3)])
def test_an_idle_job_sleeps_until_its_user_comes_back(back_s: int | None, ends: float) -> None:
    """It would have been idle from 200 s until 900 s, or until its end. It wakes 8.3 s late."""
    until_ms = back_s * 1000 if back_s else 1 << 60
    idle = msgspec.structs.replace(arrival(1, 0, 1000), idle_ms=((200_000, until_ms),))
    other = arrival(2, 400, 50)
    policy = Policy(idle_reclaim_ms=100_000, idle_sleeps=True)
    outcome = replay(Trace("idle", [idle, other]), NODES, policy, PLAIN, check_every=1)
    assert ends_s(outcome) == {1: ends, 2: 450.0}
    assert outcome.sleep.naps == 1


class Recorder(Replay):
    log: list[Recorded] = []

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        self.log = self.log + [Recorded(len(self.log) + n, e) for n, e in enumerate(events, 1)]
        return super().commit(events, finished)


def test_time_asleep_is_not_work_in_a_history() -> None:
    small = Trace("small", [arrival(1, 0, 1000, gpu_mb=4_000), TWO.arrivals[1]])
    lived = Recorder(small, NODES, Policy(), PLAIN, "", 0)
    assert lived.run().sleep.naps == 1
    history = read_history(lambda after, limit: lived.log[after : after + limit], "log")
    again = history.trace(gangs_for(history.nodes))
    assert [one.work_ms for one in again.arrivals] == [1_000_000, 100_000]
    assert [one.gpu_mb for one in again.arrivals] == [4_000, 0]
    replayed = replay(again, history.nodes, Policy(), PLAIN)
    assert list(ends_s(replayed).values()) == [802.3, 1103.4]


def test_an_idle_nap_of_a_history_is_idle_time() -> None:
    idle = msgspec.structs.replace(arrival(1, 0, 1000), idle_ms=((200_000, 900_000),))
    policy = Policy(idle_reclaim_ms=100_000, idle_sleeps=True)
    lived = Recorder(Trace("idle", [idle]), NODES, policy, PLAIN, "", 0)
    lived.run()
    history = read_history(lambda after, limit: lived.log[after : after + limit], "log")
    (found,) = history.trace(gangs_for(history.nodes)).arrivals
    assert found.idle_ms == ((300_000, 908_300),)  # the log knows when it was put to sleep
    assert found.work_ms == 1_008_300
