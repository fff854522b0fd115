"""The benches of serving on small loads whose results can be worked out by hand."""

from __future__ import annotations

from bench.autoscale import fixed, play, shoal, threshold, with_goal
from bench.flex import play as play_day
from bench.llm_load import Fleet, Request, service_ms, work_over_time
from shoal.model.service import Scale


def test_a_request_waits_for_the_first_slot_that_is_free() -> None:
    fleet = Fleet([Request(0, 1_000), Request(0, 3_000), Request(500, 1_000)], 1)
    fleet.add("a", 0)
    fleet.add("b", 0)
    fleet.advance(10_000)
    assert fleet.waits_ms == [0, 0, 500]
    assert (fleet.done, fleet.kept(499), fleet.slow) == (True, 2 / 3, 0)


def test_who_drains_gets_nothing_new_and_finishes_what_it_has() -> None:
    fleet = Fleet([Request(0, 5_000), Request(1_000, 100), Request(2_000, 100)], 4)
    fleet.add("a", 0)
    fleet.advance(500)
    fleet.drain("a")
    fleet.advance(1_500)
    assert (fleet.in_flight, fleet.queued, fleet.replicas["a"].in_flight) == (1, 1, 1)
    fleet.add("b", 1_600)
    fleet.advance(9_000)
    assert fleet.done
    assert fleet.waits_ms == [0, 600, 0]


def test_tokens_become_time() -> None:
    assert service_ms(8_000, 30) == 50 + 1_000 + 1_000
    assert work_over_time([Request(0, 1_500), Request(2_000, 500)], 1_000)[:3] == [1, 1, 1]


def test_a_fixed_fleet_costs_what_it_costs_and_the_others_follow_the_load() -> None:
    quiet = [Request(1_000 * at, 4_000) for at in range(1_800)]
    busy = [Request(1_800_000 + 50 * at, 4_000) for at in range(36_000)]
    quiet_again = [Request(3_600_000 + 1_000 * at, 4_000) for at in range(3_600)]
    requests = quiet + busy + quiet_again
    peak = play(requests, fixed(10), 10)
    assert peak.began_in_2s == 1.0
    assert round(peak.replica_hours) == 20
    for scaler in (shoal(7), threshold(), with_goal()):
        follows = play(requests, scaler, 1)
        assert follows.replica_hours < 0.75 * peak.replica_hours
        assert 0.75 < follows.began_in_2s <= 1.0
    assert play(requests, fixed(1), 1).began_in_2s < 0.5


def test_a_day_of_serving_alone_goes_through_the_real_step() -> None:
    requests = [Request(600_000 + 100 * at, 4_000) for at in range(6_000)]
    result = play_day([], requests, 2, Scale(least=1, most=16, target=7))
    assert result.began_in_2s > 0.8
    assert 24 < result.serving_gpu_hours < 27
    assert (result.training_gpu_hours, result.preempted) == (0, 0)
