"""Nodes that end: what they say of it, what operators want, and what the scheduler makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.answers.why import explain
from shoal.core.scheduling import cycle
from shoal.core.scheduling.fit import fit
from shoal.core.state.events.nodes import NodeIntended
from shoal.model.job import Job, Phase, StopCause
from shoal.model.node import TOLD_TO_END, End, NodeHealth, NodeIntent
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, Requeue, SetEnd, SetIntent
from shoal.model.supply import NodeNote, OrderPhase, OrderStatus, Supply, SupplyReport
from tests.core.build import POLICY, Cluster, kinds
from tests.core.serving import LOOK_MS, Serving

MINUTE = 60_000
HOUR = 60 * MINUTE


def ending(cluster: Cluster, name: str, in_ms: int | None, why: str = "Slurm time limit") -> None:
    """The node says when it ends, and is heard."""
    cluster.books[name].ends_in_ms = in_ms
    cluster.books[name].ends_why = why if in_ms is not None else ""
    cluster.hear(name)


def test_a_node_says_when_it_ends_and_says_it_once() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    assert cluster.node("a").end == End(cluster.now_ms + HOUR, "Slurm time limit")
    cluster.wait(1_000)
    ending(cluster, "a", HOUR - 1_000)
    assert cluster.last.events == []
    cluster.wait(4_000)
    ending(cluster, "a", HOUR - 1_500)  # the report was on its way for a while
    assert cluster.last.events == []


def test_an_end_that_moves_is_noted_with_how() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    ending(cluster, "a", 2 * MINUTE, "spot notice")
    (event,) = cluster.last.events
    assert getattr(event, "why", "") == "ends in 2m (spot notice)"
    ending(cluster, "a", MINUTE, "spot notice")
    (event,) = cluster.last.events
    assert getattr(event, "why", "") == "ends in 1m (spot notice), sooner than announced"
    ending(cluster, "a", None)
    assert cluster.node("a").end is None
    assert cluster.state.endings == []


def test_the_earlier_end_counts_and_each_is_taken_back_by_whom_it_came_from() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    at_ms = cluster.now_ms + 2 * HOUR
    assert cluster.ask(SetEnd("a", at_ms, "ann")) == Accepted("a")
    assert cluster.node("a").ends_ms == cluster.now_ms + HOUR
    ending(cluster, "a", None)
    assert cluster.node("a").end == End(at_ms, "drain scheduled by ann")
    note = "it was open; its scheduled drain was cancelled"
    assert cluster.intend("a", NodeIntent.OPEN) == Accepted("a", note)
    assert cluster.node("a").end is None
    assert cluster.ask(SetEnd("a", None)) == Accepted("a", "no drain is scheduled")
    assert isinstance(cluster.ask(SetEnd("b", at_ms)), Refused)


def test_the_end_of_a_life_is_not_the_end_of_the_next_but_a_maintenance_is() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.ask(SetEnd("a", cluster.now_ms + 2 * HOUR))
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").own_end is None
    assert cluster.node("a").ends_ms == cluster.now_ms + 2 * HOUR


def test_a_controller_that_restarts_keeps_what_the_engine_said_until_it_speaks_again() -> None:
    supply = Supply(name="spot", engine="slurm", least=1)
    cluster = Cluster(msgspec.structs.replace(POLICY, supply=(supply,)))
    cluster.step(supplies=(SupplyReport(engine="slurm"),))
    (order,) = cluster.state.orders.values()
    cluster.join(order.nodes[0], origin="spot", order=order.id)
    note = NodeNote(node=order.nodes[0], ends_in_ms=HOUR, ends_why="eviction")
    shown = OrderStatus(order=order.id, phase=OrderPhase.RUNNING)
    cluster.step(supplies=(SupplyReport(engine="slurm", orders=(shown,), notes=(note,)),))
    assert cluster.node(order.nodes[0]).ends_why == "eviction"
    cluster.state.heard.announced.clear()  # as in a controller that has just started
    cluster.hear(order.nodes[0])
    assert cluster.node(order.nodes[0]).ends_why == "eviction"
    cluster.step(supplies=(SupplyReport(engine="slurm", orders=(shown,)),))
    cluster.hear(order.nodes[0])
    assert cluster.node(order.nodes[0]).end is None


def test_a_removed_node_has_no_end() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.intend("a", NodeIntent.REMOVED)
    assert cluster.state.endings == []
    assert kinds(cluster.hear("a").events) == []


# -- what starts there ------------------------------------------------------------------------


def where(cluster: Cluster, job_id: str) -> list[str]:
    """The nodes it is on; none if it waits."""
    job = cluster.job(job_id)
    return [member.slice.node for member in job.members] if job.active else []


def why(cluster: Cluster, job_id: str) -> str:
    return render(explain(cluster.state, cluster.job(job_id), cluster.policy, cluster.now_ms))


def one_that_ends(in_ms: int = 40 * MINUTE, why: str = "Slurm time limit") -> Cluster:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    ending(cluster, "a", in_ms, why)
    return cluster


def test_a_job_that_may_run_for_ever_does_not_start_on_a_node_that_ends_soon() -> None:
    cluster = one_that_ends()
    job = cluster.submit(gpus=1)
    assert where(cluster, job) == []
    assert why(cluster, job) == (
        "a has room, but ends in 40m (Slurm time limit), and the run time of this job is unknown, "
        "so 1h have to be left; give it a time limit or an estimate, "
        "or save its work and make it preemptible"
    )
    cluster.join("b", gpus=2)
    assert where(cluster, job) == ["b"]


def test_a_job_that_nobody_knows_starts_where_an_hour_is_left_and_needs_two_the_next_time() -> None:
    """Under Slurm every node ends: a newcomer's first job must not wait forever."""
    cluster = one_that_ends(90 * MINUTE)
    never = cluster.submit(gpus=1, restart="never")
    job = cluster.submit(gpus=1)
    assert where(cluster, never) == [] and where(cluster, job) == ["a"]
    cluster.deliver("a")
    cluster.hear("a")
    assert isinstance(cluster.ask(Requeue(job)), Accepted)
    cluster.exit(job, 143)
    cluster.hear("a")
    cluster.wait(10_000)
    cluster.hear("a")
    assert where(cluster, job) == [] and "2h have to be left" in why(cluster, job)
    ending(cluster, "a", 3 * HOUR)
    assert where(cluster, job) == ["a"] and where(cluster, never) == []


def test_a_job_that_takes_too_long_waits_and_is_told_how_long_it_takes() -> None:
    cluster = one_that_ends()
    job = cluster.submit(gpus=1, estimate_ms=2 * HOUR)
    assert where(cluster, job) == []
    assert why(cluster, job) == (
        "a has room, but ends in 40m (Slurm time limit), and this job is expected to run 2h; "
        "give it a time limit, or save its work and make it preemptible"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"time_limit_ms": 30 * MINUTE},
        {"estimate_ms": 30 * MINUTE},
        {"estimate_ms": 2 * HOUR, "time_limit_ms": 30 * MINUTE},
        {"preemptible": True},
        {"checkpoint_ms": 10 * MINUTE},
        {"checkpoint_ms": 10 * MINUTE, "estimate_ms": 5 * HOUR},
    ],
)
def test_a_job_that_is_done_in_time_or_saves_its_work_starts_there(fields: dict[str, Any]) -> None:
    cluster = one_that_ends()
    assert where(cluster, cluster.submit(gpus=1, **fields)) == ["a"]


@pytest.mark.parametrize(
    "fields",
    [
        {"time_limit_ms": 40 * MINUTE},
        {"preemptible": True, "restart": "never"},
        {"checkpoint_ms": 45 * MINUTE},
        {"checkpoint_ms": 10 * MINUTE, "restart": "never"},
    ],
)
def test_a_job_that_cannot_be_done_there_or_gains_nothing_waits(fields: dict[str, Any]) -> None:
    cluster = one_that_ends()
    job = cluster.submit(gpus=1, **fields)
    assert where(cluster, job) == []
    assert "a has room, but ends in 40m" in why(cluster, job)


def test_a_job_is_started_by_what_jobs_like_it_took() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    for _ in range(6):
        job = cluster.run(gpus=1, name="eval")
        cluster.wait(5 * MINUTE)
        cluster.end(job)
        cluster.deliver()
    ending(cluster, "a", 40 * MINUTE)
    assert where(cluster, cluster.submit(gpus=1, name="eval")) == ["a"]


def test_a_shorter_job_of_the_same_lane_goes_first_and_the_next_behind_it() -> None:
    cluster = one_that_ends()
    long = cluster.submit(gpus=1, estimate_ms=HOUR)
    short = cluster.submit(gpus=1, estimate_ms=20 * MINUTE)
    assert (where(cluster, long), where(cluster, short)) == ([], ["a"])
    other = cluster.submit(gpus=1, estimate_ms=10 * MINUTE)
    assert where(cluster, other) == ["a"]


def test_all_nodes_of_a_gang_must_live_long_enough() -> None:
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.join(name, gpus=1)
    ending(cluster, "b", HOUR)
    gang = cluster.submit(gpus=1, members=3, estimate_ms=2 * HOUR)
    assert where(cluster, gang) == []
    other = cluster.submit(gpus=1, members=2, estimate_ms=2 * HOUR)
    assert sorted(where(cluster, other)) == ["a", "c"]


def test_a_job_that_saves_its_work_prefers_a_node_that_lives_on() -> None:
    cluster = one_that_ends(2 * HOUR)
    cluster.join("b", gpus=2)
    trained = {"gpus": 1, "checkpoint_ms": MINUTE}
    assert where(cluster, cluster.submit(**trained)) == ["b"]
    assert where(cluster, cluster.submit(**trained)) == ["b"]
    assert where(cluster, cluster.submit(**trained)) == ["a"]


@pytest.mark.parametrize("in_ms", [None, 5 * HOUR])
def test_room_is_gained_when_the_end_is_taken_back_or_moves(in_ms: int | None) -> None:
    cluster = one_that_ends()
    job = cluster.submit(gpus=1, estimate_ms=2 * HOUR)
    cluster.step()
    ending(cluster, "a", in_ms)
    assert where(cluster, job) == ["a"]


def test_a_job_that_does_not_fit_in_time_is_not_tried_in_every_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = one_that_ends()
    for _ in range(5):
        cluster.submit(gpus=1, estimate_ms=2 * HOUR)
    tried = 0

    def counted(*arguments: Any) -> Any:
        nonlocal tried
        tried += 1
        return fit(*arguments)

    monkeypatch.setattr(cycle, "fit", counted)
    for _ in range(10):
        cluster.wait(1_000)
        cluster.books["a"].ends_in_ms = 40 * MINUTE - cluster.now_ms + 1_000
        cluster.hear("a")
    assert tried == 0


def test_a_reservation_does_not_lie_beyond_a_nodes_end() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, order="fifo", reservations=1))
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.run(gpus=1, estimate_ms=30 * MINUTE)  # on a
    cluster.run(gpus=1, estimate_ms=50 * MINUTE)  # on b
    waits = cluster.submit(gpus=1, estimate_ms=45 * MINUTE)
    held = cluster.state.reservations[waits]
    assert held.nodes == (cluster.node("b").index,)
    assert held.start_ms == cluster.now_ms + 50 * MINUTE
    ending(cluster, "b", 80 * MINUTE)  # now neither lives long enough
    cluster.wait(11_000)
    cluster.hear("a", "b")
    assert cluster.job(waits).phase is Phase.WAITING


def test_no_job_is_stopped_for_room_on_a_node_that_ends_too_early() -> None:
    cluster = one_that_ends()
    cluster.run(gpus=2, preemptible=True, checkpoint_ms=MINUTE)
    cluster.wait(10 * MINUTE)
    ending(cluster, "a", 30 * MINUTE)
    urgent = cluster.submit(gpus=2, priority=9)
    assert urgent not in cluster.state.claims
    urgent_and_short = cluster.submit(gpus=2, priority=10, time_limit_ms=20 * MINUTE)
    assert urgent_and_short in cluster.state.claims


def test_a_claim_is_given_up_when_the_node_turns_out_to_end_too_early() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.run(gpus=1, preemptible=True, checkpoint_ms=MINUTE)
    cluster.wait(10 * MINUTE)
    cluster.hear("a")
    urgent = cluster.submit(gpus=1, priority=9)
    assert urgent in cluster.state.claims
    ending(cluster, "a", 40 * MINUTE)
    assert urgent not in cluster.state.claims
    assert where(cluster, urgent) == []


def test_an_elastic_gang_does_not_grow_onto_a_node_that_ends_soon() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    gang = cluster.run(gpus=1, members=1, members_max=2, checkpoint_ms=MINUTE)
    cluster.join("b", gpus=1)
    ending(cluster, "b", 2 * MINUTE)
    cluster.wait(10 * MINUTE)
    ending(cluster, "b", 2 * MINUTE)
    cluster.hear("a")
    assert cluster.job(gang).phase is Phase.RUNNING
    ending(cluster, "b", None)
    cluster.hear("a")
    assert cluster.job(gang).phase is Phase.STOPPING


def test_a_job_that_failed_does_not_start_again_on_its_node_if_that_ends_soon() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    job = cluster.run(gpus=1, restart="on-failure", retries=3, backoff_ms=0)
    cluster.join("b", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.end(job, 1)
    assert where(cluster, job) == ["b"]


def test_a_node_that_ends_soon_is_not_a_spare() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, spares=1))
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    ending(cluster, "b", MINUTE)
    job = cluster.submit(gpus=1)
    assert where(cluster, job) == []
    assert "a, kept as spares" in why(cluster, job) or "b has room, but ends" in why(cluster, job)
    ending(cluster, "b", None)
    assert where(cluster, job) == ["a"]


def test_nothing_is_refused_because_of_an_end() -> None:
    cluster = one_that_ends(MINUTE)
    assert cluster.submit(gpus=2, estimate_ms=100 * HOUR)


# -- before the end ---------------------------------------------------------------------------


def run_until(cluster: Cluster, job_id: str, end_ms: int) -> None:
    """Time passes, and the node that ends reports every second."""
    node = cluster.job(job_id).members[0].slice.node
    while cluster.now_ms < end_ms:
        cluster.wait(min(1_000, end_ms - cluster.now_ms))
        end = cluster.node(node).own_end
        cluster.books[node].ends_in_ms = None if end is None else end.at_ms - cluster.now_ms
        cluster.hear(*cluster.books)


def test_a_job_is_stopped_in_time_and_runs_again_elsewhere() -> None:
    cluster = one_that_ends(10 * MINUTE)
    job = cluster.run(gpus=1, checkpoint_ms=MINUTE, stop_grace_ms=30_000)
    cluster.join("b", gpus=1)
    end_ms = cluster.node("a").ends_ms or 0
    assert cluster.last.wake_ms is not None
    run_until(cluster, job, end_ms - 40_000 - 1)
    assert cluster.job(job).phase is Phase.RUNNING
    run_until(cluster, job, end_ms - 40_000)
    assert cluster.job(job).phase is Phase.STOPPING
    assert cluster.job(job).stop_cause is StopCause.DRAIN
    assert cluster.job(job).why == "a ends in 40s (Slurm time limit)"
    cluster.deliver()
    cluster.end(job, 143)
    assert where(cluster, job) == ["b"]
    assert cluster.node("a").intent is NodeIntent.OPEN
    run_until(cluster, job, end_ms - 10_000)
    ending(cluster, "a", 10_000)
    assert cluster.node("a").intent is NodeIntent.DRAINING


def test_the_step_wakes_up_for_it_without_a_report() -> None:
    cluster = one_that_ends(60_000)
    job = cluster.run(gpus=1, time_limit_ms=20_000, stop_grace_ms=10_000)
    cluster.wait(1_000)
    cluster.ask(SetEnd("a", cluster.now_ms + 25_000))  # sooner than it was placed for
    assert cluster.last.wake_ms is not None and cluster.last.wake_ms <= cluster.now_ms + 5_000
    cluster.wait(4_000)
    cluster.hear("a")
    assert cluster.job(job).phase is Phase.RUNNING
    cluster.wait(1_000)
    cluster.step()
    assert cluster.job(job).phase is Phase.STOPPING


def test_a_job_that_may_not_restart_runs_until_the_end() -> None:
    cluster = one_that_ends(10 * MINUTE)
    job = cluster.run(gpus=1, restart="never", estimate_ms=5 * MINUTE)
    end_ms = cluster.node("a").ends_ms or 0
    run_until(cluster, job, end_ms)
    assert cluster.node("a").intent is NodeIntent.DRAINING
    assert cluster.job(job).phase is Phase.RUNNING


def test_a_gang_leaves_when_the_first_of_its_nodes_ends() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    gang = cluster.run(gpus=1, members=2, checkpoint_ms=MINUTE)
    ending(cluster, "b", 15_000, "spot notice")
    assert cluster.job(gang).phase is Phase.STOPPING
    assert cluster.job(gang).why == "b ends in 15s (spot notice)"


def test_a_drain_that_began_is_undone_when_the_end_moves_away() -> None:
    cluster = one_that_ends(5_000)
    assert cluster.node("a").intent is NodeIntent.DRAINING
    job = cluster.submit(gpus=1, time_limit_ms=MINUTE)
    ending(cluster, "a", HOUR)
    assert cluster.node("a").intent is NodeIntent.OPEN
    assert where(cluster, job) == ["a"]


def test_a_cordoned_node_is_cordoned_again_after_a_drain_that_is_undone() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.intend("a", NodeIntent.CORDONED)
    ending(cluster, "a", 5_000)
    assert cluster.node("a").intent is NodeIntent.DRAINING
    ending(cluster, "a", None)
    assert cluster.node("a").intent is NodeIntent.CORDONED


def test_a_node_that_ended_as_it_said_is_removed_when_it_is_gone() -> None:
    cluster = one_that_ends(5_000)
    cluster.wait(5_000)
    cluster.learn_gone("a")
    assert cluster.node("a").intent is NodeIntent.REMOVED
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").schedulable


@pytest.mark.parametrize("noticed", [True, False])
def test_a_machine_that_was_shut_down_is_the_same_node_after_its_boot(noticed: bool) -> None:
    """Whether or not somebody sees that it is gone in between, for instance because the head was
    shut down with it: it is not removed, so it keeps its key."""
    cluster = one_that_ends(0, TOLD_TO_END)
    assert cluster.node("a").intent is NodeIntent.DRAINING
    if noticed:
        cluster.learn_gone("a")
        assert cluster.node("a").health is NodeHealth.LOST
    seen = len(cluster.log)
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").schedulable
    assert not any(
        isinstance(event, NodeIntended) and event.intent is NodeIntent.REMOVED
        for event in cluster.log[seen:]
    )


def test_a_node_that_dies_long_before_its_end_is_lost_and_not_removed() -> None:
    cluster = one_that_ends(HOUR)
    cluster.learn_gone("a")
    assert cluster.node("a").intent is NodeIntent.OPEN
    assert cluster.node("a").health is NodeHealth.LOST


def test_a_planned_drain_lasts_over_the_maintenance_until_somebody_opens_the_node() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.ask(SetEnd("a", cluster.now_ms + 10 * MINUTE, "ann"))
    job = cluster.run(gpus=1, checkpoint_ms=MINUTE)
    run_until(cluster, job, cluster.now_ms + 10 * MINUTE)
    assert cluster.job(job).phase is Phase.STOPPING
    assert "drain scheduled by ann" in cluster.job(job).why
    cluster.deliver()
    cluster.end(job, 143)
    cluster.learn_gone("a")
    assert cluster.node("a").intent is NodeIntent.DRAINING
    cluster.reboot("a")
    cluster.hear("a")
    assert where(cluster, job) == []
    cluster.intend("a", NodeIntent.OPEN)
    assert where(cluster, job) == ["a"]


def tick_until(cluster: Serving, end_ms: int) -> None:
    """Everybody speaks twice a second."""
    while cluster.now_ms < end_ms:
        for name, book in cluster.books.items():
            end = cluster.node(name).own_end
            book.ends_in_ms = None if end is None else end.at_ms - cluster.now_ms - LOOK_MS
        cluster.tick()


def serving() -> tuple[Serving, Job]:
    cluster = Serving(nodes=1, cpus=1)
    cluster.served(drain_ms=60_000, probe={"path": "/"})
    (old,) = cluster.replicas("chat")
    return cluster, old


def test_a_replica_is_replaced_before_its_node_ends() -> None:
    cluster, old = serving()
    cluster.join("b", cpus=1)
    ending(cluster, "a", 10 * MINUTE)
    end_ms = cluster.node("a").ends_ms or 0
    tick_until(cluster, end_ms - 90_000)
    assert cluster.replicas("chat") == [old]
    tick_until(cluster, end_ms - 75_000)  # a minute to drain, 10 s to stop, and a margin
    assert cluster.node("a").intent is NodeIntent.OPEN
    assert [job.members[0].slice.node for job in cluster.replicas("chat")] == ["b"]
    cluster.tick(10)
    assert old.id in cluster.finished


def test_a_replica_without_a_replacement_serves_for_as_long_as_it_can() -> None:
    cluster, old = serving()
    ending(cluster, "a", 10 * MINUTE)
    end_ms = cluster.node("a").ends_ms or 0
    tick_until(cluster, end_ms - 21_000)
    assert [job.phase for job in cluster.replicas("chat")] == [Phase.RUNNING, Phase.WAITING]
    tick_until(cluster, end_ms - 19_000)
    assert old.phase is Phase.WAITING
    assert "a ends in 20s (Slurm time limit), and j2 waits for room" in render(old.why)


def test_a_replica_does_not_start_where_it_would_be_replaced_at_once() -> None:
    cluster, _ = serving()
    cluster.join("b", cpus=1)
    ending(cluster, "b", 3 * MINUTE)
    cluster.serve(drain_ms=60_000, probe={"path": "/"}, scale={"least": 2, "most": 2})
    cluster.tick(4)
    waits = cluster.replicas("chat")[-1]
    assert waits.phase is Phase.WAITING
    assert "a start pays only if 6m" in why(cluster, waits.id)


def test_an_engine_announces_the_end_of_a_node_that_it_brought() -> None:
    """Until it takes that back; the earlier of two ends counts, whoever says it."""
    cluster = Cluster()
    cluster.join("a", gpus=1)

    def look(*notes: NodeNote) -> None:
        cluster.step(supplies=(SupplyReport(engine="kubernetes", notes=notes),))

    ending(cluster, "a", HOUR)
    look(NodeNote(node="a", ends_in_ms=MINUTE, ends_why="spot notice"))
    assert cluster.node("a").end == End(cluster.now_ms + MINUTE, "spot notice")
    cluster.wait(1_000)
    ending(cluster, "a", HOUR - 1_000)
    look(NodeNote(node="a", ends_in_ms=MINUTE - 1_000, ends_why="spot notice"))
    assert cluster.last.events == []
    cluster.step(supplies=(SupplyReport(engine="kubernetes", problem="does not answer"),))
    assert cluster.node("a").ends_why == "spot notice"
    look()
    assert cluster.node("a").ends_why == "Slurm time limit"
    look(NodeNote(node="a", labels={"zone": "b"}), NodeNote(node="b", ends_in_ms=1))
    ending(cluster, "a", None)
    assert cluster.node("a").end is None


# -- supplies whose nodes end -----------------------------------------------------------------


def pool(lasts_ms: int) -> Cluster:
    """Slurm may bring nodes with one GPU that live for this long."""
    supply = Supply(
        name="slurm",
        engine="slurm",
        gpus=1,
        cpu_milli=8_000,
        memory_mb=1000,
        lasts_ms=lasts_ms,
        most=2,
    )
    cluster = Cluster(msgspec.structs.replace(POLICY, supply=(supply,)))
    cluster.step(supplies=(SupplyReport(engine="slurm"),))
    return cluster


def orders_after(cluster: Cluster, **job: Any) -> int:
    cluster.submit(gpus=1, **job)
    cluster.wait(2_000)
    cluster.step()
    return len(cluster.state.orders)


def test_no_node_is_ordered_for_a_job_that_would_not_start_there_and_it_is_told_so() -> None:
    cluster = pool(HOUR)
    job = cluster.submit(gpus=1)
    assert not cluster.state.orders
    assert why(cluster, job).endswith(
        "nodes of Slurm live 1h, and the run time of this job is unknown, "
        "so 1h have to be left; give it a time limit or an estimate, "
        "or save its work and make it preemptible"
    )
    assert orders_after(cluster, time_limit_ms=30 * MINUTE) == 1
    assert orders_after(cluster, estimate_ms=5 * HOUR) == 1


def test_a_node_that_ends_too_early_does_not_keep_another_from_being_ordered() -> None:
    cluster = pool(HOUR)
    assert orders_after(cluster, time_limit_ms=MINUTE) == 1
    (order,) = cluster.state.orders.values()
    name = order.nodes[0]
    cluster.join(name, gpus=1, origin="slurm", order=order.id)
    cluster.deliver()
    ending(cluster, name, 20 * MINUTE)
    cluster.end("j1")
    assert orders_after(cluster, time_limit_ms=30 * MINUTE) == 2


def _why(cluster: Cluster) -> str:
    return str(getattr(cluster.log[-1], "why", ""))


def test_what_an_operator_says_about_a_node_is_in_its_history() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.ask(SetIntent("a", NodeIntent.CORDONED, "ada"))
    assert _why(cluster) == "cordoned by ada"
    cluster.ask(SetIntent("a", NodeIntent.DRAINING, "ada", "a fan\n is  loud"))
    assert _why(cluster) == "drained by ada: a fan is loud"
    cluster.ask(SetIntent("a", NodeIntent.OPEN, "ada"))
    cluster.ask(SetEnd("a", cluster.now_ms + 3_600_000, "bob", "w" * 300))
    ends_why = cluster.node("a").ends_why
    assert ends_why.startswith("drain scheduled by bob: www") and len(ends_why) == 200
