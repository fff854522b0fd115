"""Nodes are ordered for jobs that wait, and given back when nobody uses them."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.answers.outlook import outlook
from shoal.core.answers.why import waiting_reason
from shoal.core.features.supply.orders import judge_nodes
from shoal.core.state.apply import apply
from shoal.core.state.events.nodes import NodeIntended, NodeJudged
from shoal.core.state.events.supply import NodesOrdered, OrderEnded
from shoal.core.state.load import restore
from shoal.core.state.round import Round
from shoal.core.state.state import Snapshot
from shoal.model.commands import Dismiss
from shoal.model.health import Record, Standing
from shoal.model.job import Phase, Restart
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.reason import render
from shoal.model.report import Refused, SetIntent, Submit
from shoal.model.supply import DrainMachine, OrderPhase, Provision
from tests.core.build import job_spec
from tests.core.supplier import Pool, policy, supply

MINUTE_MS = 60_000


def why(pool: Pool, job_id: str) -> str:
    cluster = pool.cluster
    return render(
        waiting_reason(cluster.state, cluster.job(job_id), cluster.policy, cluster.now_ms)
    )


def test_a_job_that_would_fit_gets_a_node_and_runs_there() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    assert pool.asked == {"gpu": 8 // 8}
    (ordered,) = [event for event in pool.cluster.log if isinstance(event, NodesOrdered)]
    assert (ordered.order, ordered.nodes) == ("o1", ("gpu-1",))
    assert render(ordered.why) == "j1 would fit there"
    pool.bring("o1")
    assert pool.cluster.job(job_id).phase is Phase.STARTING
    pool.cluster.hear("gpu-1")
    assert pool.cluster.job(job_id).phase is Phase.RUNNING
    pool.wait(MINUTE_MS)
    assert pool.asked == {"gpu": 1}


def test_small_jobs_share_nodes_and_a_gang_gets_all_of_its_nodes_or_none() -> None:
    pool = Pool(supply(most=4))
    for _ in range(9):
        pool.submit(gpus=2)
    pool.wait(2_000)
    assert pool.asked == {"gpu": 3}  # four jobs on each node
    pool = Pool(supply(most=4))
    pool.submit(gpus=8, members=3)
    assert pool.asked == {"gpu": 3}
    pool = Pool(supply(most=4))
    pool.cluster.submit(gpus=8, members=3, members_per_node=1)
    pool.obey()
    pool.submit(gpus=8, members=2)  # one more node is not enough for it
    pool.wait(2_000)
    assert pool.asked == {"gpu": 3}


def test_what_is_free_already_counts_toward_a_gang() -> None:
    pool = Pool(supply(most=4))
    pool.cluster.join("own", gpus=8, cpus=64)
    pool.submit(gpus=8, members=3)
    assert pool.asked == {"gpu": 2}


def test_a_job_that_fits_on_a_node_that_is_there_orders_nothing() -> None:
    pool = Pool(supply())
    pool.cluster.join("own", gpus=8, cpus=64)
    pool.submit(gpus=8)
    pool.wait(5_000)
    assert pool.asked == {}


def test_the_cheapest_supply_that_suits_comes_first_and_ceilings_hold() -> None:
    dear = supply(name="dear", price=5_000_000, most=4, ceiling=9_000_000)
    cheap = supply(name="cheap", price=2_000_000, most=1)
    pool = Pool(dear, cheap)
    for _ in range(4):
        pool.submit(gpus=8)
    pool.wait(3_000)
    assert pool.asked == {"cheap": 1, "dear": 1}  # a second dear one would cost more than 9
    small = supply(name="small", gpus=1, price=1_000_000)
    big = supply(name="big", gpus=8, price=6_000_000)
    pool = Pool(big, small)
    pool.submit(gpus=1)
    assert pool.asked == {"small": 1}
    pool = Pool(big, small)
    pool.submit(gpus=4)
    assert pool.asked == {"big": 1}


def test_nothing_is_ordered_for_jobs_that_may_not_start() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8, restart="on-failure", retries=2, backoff_ms=60_000)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.end(job_id, code=1)
    pool.obey()
    assert pool.cluster.job(job_id).not_before_ms > pool.cluster.now_ms
    pool.submit(gpus=1, members=1)
    pool.wait(10_000)
    assert pool.asked == {"gpu": 1}


def test_least_is_kept_and_most_is_never_exceeded() -> None:
    pool = Pool(supply(least=2, most=3))
    pool.wait(2_000)
    assert pool.asked == {"gpu": 2}
    for _ in range(9):
        pool.submit(gpus=8)
    pool.wait(5_000)
    assert pool.asked == {"gpu": 3}


def test_an_idle_order_is_drained_then_removed_and_only_then_released() -> None:
    pool = Pool(supply(idle_ms=5 * MINUTE_MS))
    job_id = pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.end(job_id)
    pool.wait(4 * MINUTE_MS)
    assert pool.asked == {"gpu": 1}
    pool.wait(2 * MINUTE_MS)
    assert pool.asked == {}
    intents = [e.intent for e in pool.cluster.log if isinstance(e, NodeIntended)]
    assert intents == [NodeIntent.DRAINING, NodeIntent.REMOVED]
    assert pool.cluster.node("gpu-1").why.startswith("its machine was released: nothing ran there")
    assert not pool.cluster.state.orders
    assert not pool.cluster.state.setbacks


def test_a_short_job_between_two_looks_resets_the_idle_time() -> None:
    pool = Pool(supply(idle_ms=MINUTE_MS))
    pool.submit(gpus=8)
    pool.bring("o1")
    for _ in range(4):
        pool.cluster.hear("gpu-1")
        (job_id,) = pool.cluster.state.jobs
        pool.cluster.end(job_id)
        pool.wait(40_000)
        assert pool.asked == {"gpu": 1}
        pool.submit(gpus=8)
        pool.cluster.deliver()


def test_names_of_nodes_are_used_again_so_the_state_does_not_grow() -> None:
    pool = Pool(supply(idle_ms=MINUTE_MS))
    for number in range(1, 6):
        job_id = pool.submit(gpus=8)
        pool.bring(f"o{number}")
        pool.cluster.hear("gpu-1")
        pool.cluster.end(job_id)
        pool.wait(2 * MINUTE_MS)
        assert not pool.cluster.state.orders
    assert list(pool.cluster.state.nodes) == ["gpu-1"]


def test_a_lot_comes_and_goes_as_one() -> None:
    pool = Pool(supply(lot=2, most=4, idle_ms=MINUTE_MS))
    job_id = pool.submit(gpus=8)
    assert pool.asked == {"gpu": 2}
    pool.bring("o1")
    pool.wait(5 * MINUTE_MS)
    assert pool.asked == {"gpu": 2}  # one of them is busy
    pool.cluster.end(job_id)
    pool.wait(2 * MINUTE_MS)
    assert pool.asked == {}


def test_an_order_that_nobody_waits_for_any_more_is_given_back() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    pool.cluster.cancel(job_id)
    pool.wait(20_000)
    assert pool.asked == {"gpu": 1}
    pool.wait(20_000)
    assert pool.asked == {}
    assert pool.released == ["o1"]


def test_a_refusal_is_waited_for_longer_each_time_and_said() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    pool.is_("o1", OrderPhase.ENDED, "QOSMaxGRESPerUser", failed=True)
    pool.look()
    assert why(pool, job_id).endswith("Slurm (gpu) failed: QOSMaxGRESPerUser; next try in 30s")
    orders = 1
    waits = []
    for _ in range(4):
        since_ms = pool.cluster.now_ms
        while len(pool.orders) == orders:
            pool.wait(1_000)
        orders += 1
        waits.append(round((pool.cluster.now_ms - since_ms) / 1000))
        pool.is_(f"o{orders}", OrderPhase.ENDED, "QOSMaxGRESPerUser", failed=True)
        pool.look()
    assert waits == pytest.approx([30, 60, 120, 240], abs=4)
    restored = restore(
        msgspec.json.decode(msgspec.json.encode(pool.cluster.state.snapshot()), type=Snapshot)
    )
    assert restored.setbacks == pool.cluster.state.setbacks  # a restart does not ask at once


def test_a_supplier_that_refuses_is_passed_over_for_another() -> None:
    pool = Pool(supply(name="cheap", price=1), supply(name="dear", price=2))
    pool.submit(gpus=8)
    pool.is_("o1", OrderPhase.ENDED, "no", failed=True)
    pool.wait(2_000)
    assert pool.asked == {"dear": 1}


def test_why_says_what_was_asked_when_and_what_it_waits_for() -> None:
    pool = Pool(supply(name="slurm"))
    job_id = pool.submit(gpus=8, members=2)
    pool.wait(4 * MINUTE_MS)
    assert why(pool, job_id).startswith("asked Slurm for 2 nodes 4m ago: Resources")
    seen = outlook(
        pool.cluster.state, pool.cluster.job(job_id), pool.cluster.policy, pool.cluster.now_ms
    )
    assert seen.start == ""
    pool.look("slurmctld does not answer")
    assert "4m ago: slurmctld does not answer" in why(pool, job_id)


def test_an_engine_that_does_not_answer_is_not_asked() -> None:
    pool = Pool(supply())
    pool.look("slurmctld does not answer")
    job_id = pool.submit(gpus=8)
    pool.cluster.wait(5_000)
    pool.look("slurmctld does not answer")
    assert pool.asked == {}
    assert "Slurm (gpu) cannot be asked: slurmctld does not answer" in why(pool, job_id)
    pool.look()
    assert pool.asked == {"gpu": 1}


def test_a_job_that_only_a_supply_could_run_is_accepted() -> None:
    pool = Pool(supply(gpu_model="H100", most=2))
    pool.cluster.join("own", gpus=1)
    pool.submit(gpus=8, gpu_models=["H100"])
    pool.submit(gpus=8, members=2)
    too_big = pool.cluster.ask(Submit(job_spec(gpus=8, members=3)))
    assert isinstance(too_big, Refused)


def test_a_command_that_got_lost_is_sent_again_and_one_order_stays_one() -> None:
    pool = Pool(supply())
    pool.cluster.wait(1_100)
    pool.cluster.submit(gpus=8)  # the command gets lost
    assert pool.orders == {}
    pool.look()
    assert list(pool.orders) == ["o1"]
    pool.look()
    assert not pool.cluster.last.supplies
    assert pool.asked == {"gpu": 1}


def test_an_order_that_runs_but_brings_no_node_counts_as_failed() -> None:
    pool = Pool(supply())
    pool.submit(gpus=8)
    pool.is_("o1", OrderPhase.RUNNING)
    pool.wait(11 * MINUTE_MS)
    assert pool.released == ["o1"]
    (ended,) = [event for event in pool.cluster.log if isinstance(event, OrderEnded)]
    assert ended.failed
    assert ended.why == "no node reported within 10m"


def test_an_order_that_ends_takes_its_nodes_along_and_jobs_get_another() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.is_("o1", OrderPhase.ENDED, "TIMEOUT")
    del pool.cluster.books["gpu-1"]
    pool.look()
    node = pool.cluster.node("gpu-1")
    assert (node.health, node.intent) == (NodeHealth.LOST, NodeIntent.REMOVED)
    assert pool.cluster.job(job_id).phase is Phase.WAITING
    pool.wait(2_000)
    assert list(pool.orders) == ["o1", "o2"]


def test_room_reserved_on_a_node_that_is_gone_orders_another() -> None:
    pool = Pool(supply(most=1))
    first = pool.submit(gpus=8, time_limit_ms=5_000, restart=Restart.NEVER)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    second = pool.submit(gpus=8)
    pool.wait(1_000)
    assert second in pool.cluster.state.reservations  # on gpu-1, when the first job ends
    pool.is_("o1", OrderPhase.ENDED, "NODE_FAIL")
    del pool.cluster.books["gpu-1"]
    pool.look()
    assert first not in pool.cluster.state.jobs
    pool.wait(2_000)
    assert list(pool.orders) == ["o1", "o2"]


def test_a_lost_node_frees_its_order() -> None:
    pool = Pool(supply())
    pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.learn_gone("gpu-1")
    pool.obey()
    assert pool.released == ["o1"]


def test_a_silent_node_is_ended_by_its_supplier_before_its_job_runs_elsewhere() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.books.clear()
    pool.wait(50_000)
    assert pool.released == []
    assert pool.cluster.job(job_id).phase is Phase.RUNNING
    pool.wait(20_000)
    assert pool.released[0] == "o1"
    assert pool.cluster.node("gpu-1").dead


def test_a_node_that_is_given_back_cannot_be_opened_again() -> None:
    pool = Pool(supply(idle_ms=1_000))
    job_id = pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.end(job_id)
    pool.cluster.wait(5_000)
    pool.cluster.hear("gpu-1")
    pool.cluster.wait(2_000)
    pool.cluster.step()
    answer = pool.cluster.ask(SetIntent("gpu-1", NodeIntent.OPEN))
    assert isinstance(answer, Refused)
    assert "is being released" in answer.message


def test_a_node_of_an_order_that_is_over_gets_no_job() -> None:
    pool = Pool(supply())
    pool.submit(gpus=8)
    pool.bring("o1")
    late = msgspec.structs.replace(pool.specs("o1")[0], id="gpu-9", order="o77")
    pool.submit(gpus=8)
    pool.cluster.bring(late)
    assert pool.cluster.node("gpu-9").intent is NodeIntent.REMOVED
    assert not pool.cluster.state.placed["gpu-9"]
    pool.cluster.hear("gpu-9")
    assert any(isinstance(one, Dismiss) for one in pool.cluster.last.commands)
    pool.is_("o77", OrderPhase.RUNNING)
    pool.orders["o77"] = Provision(order="o77", supply=supply(), nodes=("gpu-9",))
    pool.look()
    assert pool.released == ["o77"]


def test_a_supply_that_left_the_policy_is_emptied() -> None:
    pool = Pool(supply())
    job_id = pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    pool.cluster.policy = policy()
    pool.wait(5_000)
    assert pool.asked == {"gpu": 1}
    pool.cluster.end(job_id)
    pool.wait(5_000)
    assert pool.asked == {}


def test_another_machine_under_the_same_name_starts_with_a_clean_record() -> None:
    pool = Pool(supply())
    pool.submit(gpus=8)
    pool.bring("o1")
    pool.cluster.hear("gpu-1")
    node = pool.cluster.node("gpu-1")
    sick = Record(standing=Standing.QUARANTINED, since_ms=pool.cluster.now_ms, why="slow")
    apply(pool.cluster.state, NodeJudged(at_ms=pool.cluster.now_ms, node="gpu-1", record=sick))
    pool.cluster.wait(1_000)
    pool.is_("o1", OrderPhase.ENDED, "NODE_FAIL", failed=True)
    pool.cluster.books.clear()
    pool.wait(40_000)
    pool.bring("o2")
    assert node.record == Record()
    assert node.schedulable


def test_a_sick_machine_is_reported_to_its_supplier_and_given_back_when_empty() -> None:
    pool = Pool(supply(least=1, most=2))
    pool.wait(2_000)
    pool.bring("o1")
    sick = Record(standing=Standing.QUARANTINED, since_ms=pool.cluster.now_ms, why="slow")
    node = pool.cluster.node("gpu-1")
    round_ = Round(pool.cluster.state, pool.cluster.policy, pool.cluster.now_ms)
    round_.emit(NodeJudged(at_ms=round_.now_ms, node="gpu-1", record=sick, why="slow"))
    judge_nodes(round_)
    assert round_.supplies == [DrainMachine(node=node.spec, engine="slurm", why="slow")]
    pool.wait(3_000)
    assert pool.released == ["o1"]
    pool.wait(3_000)
    assert pool.asked == {"gpu": 1}  # another one in its place


def test_an_order_that_gets_no_machines_makes_way_for_another_supply() -> None:
    """A spot pool that is empty must not hold a job forever."""
    spot = supply(name="spot", price=1_000_000, patience_ms=5 * MINUTE_MS)
    pool = Pool(spot, supply(name="dear", price=9_000_000, most=1))
    first, second = pool.submit(gpus=8), pool.submit(gpus=8)
    pool.wait(4 * MINUTE_MS)
    assert pool.asked == {"spot": 2}
    pool.wait(2 * MINUTE_MS)
    assert pool.asked == {"spot": 1, "dear": 1}  # what the other cannot serve, too, still waits
    assert "no machine within 5m: Resources" in str(pool.cluster.log)
    pool.bring("o3")
    assert pool.cluster.job(first).phase is Phase.STARTING
    pool.wait(60 * MINUTE_MS)
    assert pool.asked == {"spot": 1, "dear": 1}
    assert why(pool, second).startswith("asked Slurm (spot) for 1 node")


def test_without_another_supply_an_order_waits_for_as_long_as_it_takes() -> None:
    """Asking again would lose its place in the queue of its supplier."""
    pool = Pool(supply(patience_ms=MINUTE_MS))
    pool.submit(gpus=8)
    pool.wait(60 * MINUTE_MS)
    pool.submit(gpus=8)
    pool.wait(5 * MINUTE_MS)
    assert pool.asked == {"gpu": 2} and not pool.released


def test_a_job_larger_than_any_supply_is_told_so() -> None:
    pool = Pool(supply(gpus=8), supply(name="small", gpus=1))
    job_id = pool.submit(gpus=16)
    assert why(pool, job_id) == (
        "no node that could take it is there; no supply brings nodes of 16 GPUs, 1 CPU: "
        "Slurm (gpu) brings 8 GPUs; Slurm (small) brings 1 GPU"
    )
    assert pool.asked == {}
