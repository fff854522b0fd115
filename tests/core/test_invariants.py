"""Every invariant notices when it is broken: a state is spoiled by hand, one field at a time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shoal.core.answers.why import verify_reasons
from shoal.core.invariants import Violation, verify, verify_touched
from shoal.core.state.apply import apply
from shoal.core.state.events.nodes import NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobRunning
from shoal.core.state.state import State
from shoal.model.job import Job, MemberStatus, Phase
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import Slice
from tests.core.build import Cluster, job_spec

Spoil = Callable[[State], None]


@pytest.fixture
def cluster() -> Cluster:
    """j1 runs as a gang of two on a and b, j2 waits for room, j3 is stopping on c."""
    made = Cluster()
    for name in ("a", "b"):
        made.join(name, gpus=2)
    made.run(gpus=2, members=2)
    made.submit(gpus=2)
    made.join("c", gpus=1)
    made.cancel(made.run(gpus=1))
    return made


def gang(state: State) -> Job:
    return state.jobs["j1"]


def waits_but_holds(state: State) -> None:
    gang(state).phase = Phase.WAITING


def runs_without_a_member(state: State) -> None:
    gang(state).members.pop()


def runs_with_a_lost_member(state: State) -> None:
    gang(state).members[1].status = MemberStatus.LOST


def runs_with_a_failed_member(state: State) -> None:
    gang(state).members[1].code = 1


def runs_before_all_were_seen(state: State) -> None:
    gang(state).members[0].status = MemberStatus.PENDING


def stops_without_a_cause(state: State) -> None:
    state.jobs["j3"].stop_cause = None


def stops_with_nothing_left(state: State) -> None:
    state.jobs["j3"].members[0].status = MemberStatus.EXITED


def runs_without_a_placement(state: State) -> None:
    gang(state).attempt = 0


def is_finished_but_kept(state: State) -> None:
    gang(state).phase = Phase.FINISHED


def has_less_than_it_asked_for(state: State) -> None:
    member = gang(state).members[0]
    member.slice = msgspec.structs.replace(member.slice, gpus=(0,))


def shares_a_gpu(state: State) -> None:
    gang(state).members[1].slice = gang(state).members[0].slice
    state.placed["a"].update(state.placed["b"])
    state.placed["b"].clear()


def uses_a_gpu_that_is_not_there(state: State) -> None:
    member = gang(state).members[0]
    member.slice = msgspec.structs.replace(member.slice, gpus=(0, 9))


def is_held_by_a_node_that_it_does_not_know(state: State) -> None:
    gang(state).members[0].slice = Slice("c", (0, 1), 1000, 0)


def gives_away_more_than_it_has(state: State) -> None:
    state.nodes["a"].spec = msgspec.structs.replace(state.nodes["a"].spec, cpu_milli=500)


def is_lost_but_holds_slices(state: State) -> None:
    state.nodes["a"].health = NodeHealth.LOST


def miscounts_free_gpus(state: State) -> None:
    state.rooms[0].gpu_milli[0] = 1000


def miscounts_free_cpus(state: State) -> None:
    state.rooms[0].cpu_milli += 1


def miscounts_jobs(state: State) -> None:
    state.finished += 1


def loses_a_node_from_the_index(state: State) -> None:
    (index,) = (i for kind, i in state.cluster.free.items() if kind.gpus == 2)
    index.nodes[index.levels[-1]].pop()


def forgets_capacity(state: State) -> None:
    state.capacity.clear()


def forgets_what_a_node_holds(state: State) -> None:
    gang(state).members.reverse()
    for ref in list(state.placed["a"]):
        del state.placed["a"][ref]


def stays_on_a_node_that_drains(state: State) -> None:
    state.nodes["a"].intent = NodeIntent.DRAINING


def loses_a_waiting_job(state: State) -> None:
    state.queue.lanes.clear()


SPOILS: list[Spoil] = [
    waits_but_holds,
    runs_without_a_member,
    runs_with_a_lost_member,
    runs_with_a_failed_member,
    runs_before_all_were_seen,
    stops_without_a_cause,
    stops_with_nothing_left,
    runs_without_a_placement,
    is_finished_but_kept,
    has_less_than_it_asked_for,
    shares_a_gpu,
    uses_a_gpu_that_is_not_there,
    is_held_by_a_node_that_it_does_not_know,
    gives_away_more_than_it_has,
    is_lost_but_holds_slices,
    miscounts_free_gpus,
    miscounts_free_cpus,
    miscounts_jobs,
    loses_a_node_from_the_index,
    forgets_capacity,
    forgets_what_a_node_holds,
    stays_on_a_node_that_drains,
    loses_a_waiting_job,
]


def test_a_healthy_state_passes(cluster: Cluster) -> None:
    verify(cluster.state)


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_the_invariants_notice_a_state_that(spoil: Spoil, cluster: Cluster) -> None:
    spoil(cluster.state)
    with pytest.raises(Violation):
        verify(cluster.state)


def test_a_job_that_could_start_may_not_be_left_waiting(cluster: Cluster) -> None:
    submitted = JobSubmitted(at_ms=cluster.now_ms, job="j4", spec=job_spec())
    apply(cluster.state, submitted)
    verify(cluster.state)
    with pytest.raises(Violation, match="j4 waits without a reason"):
        verify_reasons(cluster.state, cluster.policy, cluster.now_ms)


def test_after_a_step_only_what_it_touched_is_looked_at(cluster: Cluster) -> None:
    runs_with_a_lost_member(cluster.state)
    verify_touched(cluster.state, [NodeReady(at_ms=1, node="c")])
    with pytest.raises(Violation, match="j1 goes on as a partial gang"):
        verify_touched(cluster.state, [JobRunning(at_ms=1, job="j1", attempt=1)])


def test_the_nodes_of_a_touched_job_are_looked_at_too(cluster: Cluster) -> None:
    miscounts_free_gpus(cluster.state)
    with pytest.raises(Violation, match="a: what is free does not match"):
        verify_touched(cluster.state, [JobRunning(at_ms=1, job="j1", attempt=1)])
