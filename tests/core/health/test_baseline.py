"""A node's figures beside those of its kind, or beside its own."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.books.baseline import (
    KINDS_MAX,
    NODES_PER_KIND_MAX,
    OWN_KEPT,
    Fleet,
    count,
    forget,
    judge,
    learn,
)
from shoal.model.health import CheckResult, Verdict
from shoal.model.resources import Kind

KIND = Kind(8, 64_000, 512_000, "H200", 141_000)


def result(**figures: int) -> CheckResult:
    return CheckResult(id="c1", figures=figures)


def fleet_of(nodes: int, **figures: int) -> Fleet:
    fleet = Fleet()
    for number in range(nodes):
        learn(fleet, f"n{number}", KIND, result(**figures))
    return fleet


def verdict(fleet: Fleet, **figures: int) -> Verdict:
    return verdict_of(fleet, "new", **figures)


def verdict_of(fleet: Fleet, node: str, /, **figures: int) -> Verdict:
    return judge(fleet, node, KIND, result(**figures))


def test_a_node_that_is_clearly_slower_than_its_kind_fails() -> None:
    fleet = fleet_of(5, cpu_one_mbs=1000)
    found = verdict(fleet, cpu_one_mbs=400)
    assert not found.passed
    assert found.why == "cpu_one_mbs is 400; 5 others of its kind measured 1000"
    assert (found.stands[0].usual, found.stands[0].limit) == (1000, 500)
    assert verdict(fleet, cpu_one_mbs=510).passed
    assert verdict(fleet, cpu_one_mbs=5000).passed


def test_a_kind_that_scatters_much_is_judged_with_more_patience() -> None:
    fleet = Fleet()
    for number, value in enumerate([700, 850, 1000, 1150, 1300]):
        learn(fleet, f"n{number}", KIND, result(cpu_one_mbs=value))
    assert verdict(fleet, cpu_one_mbs=200).passed


def test_nodes_of_another_kind_or_under_load_do_not_compare() -> None:
    fleet = fleet_of(5, cpu_one_mbs=1000)
    assert judge(fleet, "new", Kind(0, 4000, 8000), result(cpu_one_mbs=100)).passed
    busy = judge(fleet, "new", KIND, CheckResult(id="c1", busy=True, figures={"cpu_one_mbs": 100}))
    assert busy.passed
    assert busy.why == "no fault found; nothing to compare with"


def test_with_few_nodes_a_nodes_own_history_is_the_measure() -> None:
    fleet = fleet_of(2, cpu_one_mbs=1000)
    assert verdict_of(fleet, "n0", cpu_one_mbs=100).passed  # one earlier check is no history
    for _ in range(2):
        learn(fleet, "n0", KIND, result(cpu_one_mbs=1000))
    found = verdict_of(fleet, "n0", cpu_one_mbs=100)
    assert not found.passed
    assert "its own earlier checks measured 1000" in found.why
    assert verdict_of(fleet, "n1", cpu_one_mbs=100).passed


def test_a_nodes_own_last_figures_do_not_excuse_it_among_others() -> None:
    fleet = fleet_of(4, cpu_one_mbs=1000)
    for _ in range(9):
        learn(fleet, "slow", KIND, result(cpu_one_mbs=400))
    assert not verdict_of(fleet, "slow", cpu_one_mbs=400).passed


def test_a_gpu_is_compared_with_its_siblings() -> None:
    figures = {f"gpu{number}_matmul_gflops": 700_000 for number in range(8)}
    assert verdict(Fleet(), **figures).passed
    found = verdict(Fleet(), **{**figures, "gpu3_matmul_gflops": 350_000})
    assert not found.passed
    assert found.why.startswith("gpu3_matmul_gflops is 350000; 7 others")


def test_loads_fail_above_and_never_below_their_floor() -> None:
    fleet = fleet_of(5, steal_milli=0)
    assert verdict(fleet, steal_milli=50).passed
    assert not verdict(fleet, steal_milli=300).passed


def test_what_is_only_told_never_fails() -> None:
    fleet = fleet_of(5, gpu0_temperature_c=40)
    assert verdict(fleet, gpu0_temperature_c=90).passed


def test_a_fault_fails_by_itself_and_a_broken_probe_fails_nothing() -> None:
    found = judge(
        Fleet(), "a", KIND, CheckResult(id="c1", faults=("gpu 2: 3 uncorrectable errors", "x"))
    )
    assert (found.passed, found.why) == (False, "gpu 2: 3 uncorrectable errors and 1 more")
    broken = CheckResult(id="c1", error="no memory")
    assert judge(fleet_of(5, cpu_one_mbs=1), "a", KIND, broken).passed


def test_a_node_that_left_is_no_measure_any_more() -> None:
    fleet = fleet_of(3, cpu_one_mbs=1000)
    assert not verdict(fleet, cpu_one_mbs=100).passed
    forget(fleet, "n1")
    assert verdict(fleet, cpu_one_mbs=100).passed
    assert "n1/idle" not in fleet.own


def test_what_is_learned_is_bounded() -> None:
    fleet = Fleet()
    for number in range(NODES_PER_KIND_MAX + 10):
        learn(fleet, f"n{number}", KIND, result(cpu_one_mbs=1000))
    assert [len(nodes) for nodes in fleet.kinds.values()] == [NODES_PER_KIND_MAX]
    for number in range(KINDS_MAX + 10):
        learn(fleet, "n0", Kind(0, number, 0), result(cpu_one_mbs=1000))
    assert len(fleet.kinds) == KINDS_MAX
    assert len(fleet.own["n0/idle"]["cpu_one_mbs"]) == OWN_KEPT


FIGURES = st.dictionaries(
    st.sampled_from(["cpu_one_mbs", "memory_mbs", "steal_milli", "gpu0_matmul_gflops", "free_mb"]),
    st.integers(0, 10**9),
    max_size=5,
)


@given(st.lists(FIGURES, max_size=8), FIGURES, st.permutations(range(8)))
@settings(max_examples=200, deadline=None)
def test_the_order_of_checks_does_not_matter_and_a_better_rate_never_fails(
    fleet_figures: list[dict[str, int]], figures: dict[str, int], order: list[int]
) -> None:
    one, other = Fleet(), Fleet()
    for number, theirs in enumerate(fleet_figures):
        learn(one, f"n{number}", KIND, result(**theirs))
    for number in order:
        if number < len(fleet_figures):
            learn(other, f"n{number}", KIND, result(**fleet_figures[number]))
    found = verdict(one, **figures)
    assert found == verdict(other, **figures)
    better = {name: 0 if name == "steal_milli" else value * 2 for name, value in figures.items()}
    assert verdict(one, **better).passed >= found.passed
    assert msgspec.json.decode(msgspec.json.encode(one), type=Fleet) == one


def test_counters_of_errors_are_judged_by_their_growth_since_the_last_check() -> None:
    fleet = fleet_of(5, ib_mlx5_0_1_link_downs=0)
    assert verdict(fleet, ib_mlx5_0_1_link_downs=900).passed  # since when is not known
    count(fleet, "new", result(ib_mlx5_0_1_link_downs=900))
    assert verdict(fleet, ib_mlx5_0_1_link_downs=904).passed
    found = verdict(fleet, ib_mlx5_0_1_link_downs=905)
    assert not found.passed
    assert found.why == "ib_mlx5_0_1_link_downs grew from 900 to 905 since its last check"
    count(fleet, "new", result(ib_mlx5_0_1_link_downs=905))  # after a check that failed, too
    assert verdict(fleet, ib_mlx5_0_1_link_downs=905).passed
    assert verdict(fleet, ib_mlx5_0_1_link_downs=2).passed  # the machine was started again
    forget(fleet, "new")
    assert verdict(fleet, ib_mlx5_0_1_link_downs=5_000).passed


def test_a_port_that_is_down_or_slower_than_those_of_others_fails_and_an_unused_one_does_not() -> (
    None
):
    fleet = fleet_of(4, ib_a_1_up=1, ib_a_1_rate_mbits=400_000, ib_b_1_up=0, gpu0_nvlinks_up=18)
    well = {"ib_a_1_up": 1, "ib_a_1_rate_mbits": 400_000, "ib_b_1_up": 0, "gpu0_nvlinks_up": 18}
    assert verdict(fleet, **well).passed
    for figure, value in (
        ("ib_a_1_up", 0),
        ("ib_a_1_rate_mbits", 200_000),
        ("gpu0_nvlinks_up", 17),
    ):
        found = verdict(fleet, **{**well, figure: value})
        assert found.why == f"{figure} is {value}; 4 others of its kind measured {well[figure]}"
