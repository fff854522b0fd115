"""The placement scores: each formula by hand, and what holds for every room and task."""

from __future__ import annotations

import pytest
from harness.published import clustering, fgd, rescaled, task_class, typical
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.books import foresight as module
from shoal.core.books.filling import Filling
from shoal.core.books.foresight import Foresight, Mix, Scarcity
from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy, choices, fits, take
from shoal.core.scheduling.classic import best_fit, dot_product, packing, unusable

NODE = Vacancy(96_000, 393_216, (WHOLE,) * 8, "G2")
WORN = Vacancy(20_000, 50_000, (1000, 530, 190, 0), "T4")
HALF = Footprint(8_000, 1_000, 1, 470)
ONE = Footprint(12_000, 1_000, 1, WHOLE)
ONLY_CPU = Footprint(4_000, 1_000, 0, 0)

rooms = st.builds(
    Vacancy,
    cpu_milli=st.integers(0, 128).map(lambda cores: 1000 * cores),
    memory_mb=st.integers(0, 100_000),
    gpus=st.lists(st.integers(0, WHOLE), max_size=8).map(lambda g: tuple(sorted(g, reverse=True))),
    model=st.sampled_from(("G2", "T4", "P100")),
)
shared = st.builds(
    Footprint, st.integers(0, 32_000), st.integers(0, 50_000), st.just(1), st.integers(1, 999)
)
whole = st.builds(
    Footprint,
    st.integers(0, 96_000),
    st.integers(0, 50_000),
    st.integers(1, 8),
    st.just(WHOLE),
    st.sampled_from(((), ("T4",), ("G2", "P100"))),
)
only_cpu = st.builds(
    Footprint, st.integers(0, 32_000), st.integers(0, 50_000), st.just(0), st.just(0)
)
tasks = st.one_of(shared, whole, only_cpu)


def test_a_task_fits_by_cpu_memory_model_and_enough_gpus_with_enough_left() -> None:
    assert fits(WORN, HALF)
    assert fits(WORN, ONLY_CPU)
    assert not fits(WORN, HALF._replace(cpu_milli=20_001))
    assert not fits(WORN, HALF._replace(memory_mb=50_001))
    assert not fits(WORN, HALF._replace(models=("G2", "P100")))
    assert fits(WORN, HALF._replace(models=("G2", "T4")))
    assert not fits(WORN, Footprint(0, 0, 2, WHOLE))
    assert not fits(WORN, Footprint(0, 0, 5, WHOLE))


def test_a_shared_task_takes_the_gpu_at_its_place_and_the_freest_stays_first() -> None:
    assert choices(WORN, HALF) == [0, 1]
    assert take(WORN, HALF, 1) == Vacancy(12_000, 49_000, (1000, 190, 60, 0), "T4")
    assert take(WORN, HALF, 0) == Vacancy(12_000, 49_000, (530, 530, 190, 0), "T4")
    assert take(NODE, Footprint(0, 0, 6, WHOLE)).gpus == (1000, 1000, 0, 0, 0, 0, 0, 0)


def test_gpus_with_the_same_left_are_one_choice() -> None:
    assert choices(NODE, HALF) == [0]
    assert choices(NODE, Footprint(0, 0, 4, WHOLE)) == [0]


def test_dot_product() -> None:
    # 100 * (1 - (96/128 * 12/128 + 8/8 * 1/8) / 2) = 100 * (1 - (0.0703125 + 0.125) / 2) = 90.2...
    assert dot_product(NODE, ONE) == 90


def test_best_fit() -> None:
    # 100 * (1 - 0.5 * 84/128 - 0.5 * 7/8) = 100 * (1 - 0.328125 - 0.4375) = 23.4...
    assert best_fit(NODE, ONE) == 23
    # 100 * (1 - 0.5 * 12/128 - 0.5 * 1.25/8) = 100 * (1 - 0.046875 - 0.078125) = 87.5
    assert best_fit(WORN, HALF) == 87
    assert [rescaled(score, 23, 87) for score in (23, 55, 87)] == [0, 50, 100]
    assert rescaled(42, 42, 42) == 0


def test_packing() -> None:
    assert packing(NODE, ONLY_CPU) == 0
    assert packing(NODE, ONE) == 25  # idle: max(33 - 8, 8)
    assert packing(NODE._replace(gpus=(WHOLE,)), ONE) == 32
    assert packing(WORN, ONE) == 49  # one free GPU used: max(50 - 1, 33)
    assert packing(WORN, HALF) == 95  # 53 % left on the GPU: 100 - 5
    assert packing(WORN, HALF._replace(gpu_milli=100)) == 99


def test_clustering() -> None:
    assert [task_class(task) for task in (HALF, ONE, Footprint(0, 0, 8, WHOLE))] == [0, 1, 8]
    assert clustering(WORN, ONLY_CPU) == 0
    base = 19  # 25 * (8000 - 1720) / 8000 = 19.6...
    assert clustering(WORN, HALF) == base + 25
    assert clustering(WORN._replace(held=(0,)), HALF) == base + 75
    assert clustering(WORN._replace(held=(0, 1)), HALF) == base + 50
    assert clustering(WORN._replace(held=(1, 2)), HALF) == base


def test_typical_tasks_are_the_most_frequent_until_enough_are_covered() -> None:
    seen = [ONE] * 6 + [HALF] * 3 + [ONE._replace(memory_mb=7)] * 10 + [ONLY_CPU]
    bare_one, bare_half = ONE._replace(memory_mb=0), HALF._replace(memory_mb=0)
    assert typical(seen) == {bare_one: 16, bare_half: 3}
    assert typical(seen, percent=100).keys() == {
        bare_one,
        bare_half,
        ONLY_CPU._replace(memory_mb=0),
    }


def test_unusable_milli_under_a_mix() -> None:
    assert unusable(WORN, {HALF: 1}) == 190  # too small for it
    assert unusable(WORN, {ONE: 1}) == 530 + 190
    assert unusable(WORN, {ONLY_CPU: 1}) == 1720  # uses none
    assert unusable(WORN, {ONE._replace(models=("G2",)): 1}) == 1720
    assert unusable(WORN, {ONE._replace(cpu_milli=20_001): 1}) == 1720
    assert unusable(WORN, {HALF: 3, ONE: 1}) == 3 * 190 + 720


def test_the_fgd_score_is_a_truncated_sigmoid() -> None:
    assert fgd(0, 0, weight=4) == 50
    assert fgd(4 * 500, 0, weight=4) == 62  # 1 / (1 + e^-0.5) = 0.6224...
    assert fgd(0, 4 * 500, weight=4) == 37


def test_a_vacancy_is_worth_what_the_mix_can_fill() -> None:
    mix = {Footprint(4_000, 0, 1, WHOLE): 1}
    filling = Filling(mix, mix, cpu_step=1_000)
    assert filling.value(Vacancy(8_000, 0, (1000, 1000), "T4")) == 2000
    assert filling.value(Vacancy(4_000, 0, (1000, 1000), "T4")) == 1000
    assert filling.value(Vacancy(3_000, 0, (1000, 1000), "T4")) == 0
    assert filling.value(Vacancy(4_000, 0, (1000, 0), "T4")) == 1000
    assert filling.value(Vacancy(8_000, 0, (999,), "T4")) == 0


def test_a_rest_counts_as_far_as_a_task_for_it_is_likely_to_come() -> None:
    small, large = Footprint(0, 0, 1, 200), Footprint(0, 0, 1, 800)
    filling = Filling({small: 1, large: 99}, [small, large], cpu_step=1_000)
    chance = 1 - 0.99**32
    assert filling.value(Vacancy(0, 0, (200,), "T4")) == pytest.approx(chance * 200)


def test_a_gpu_in_use_gets_the_best_of_a_few_tasks() -> None:
    small, large = Footprint(0, 0, 1, 600), Footprint(0, 0, 1, 800)
    filling = Filling({small: 1, large: 1}, [small, large], cpu_step=1_000)
    best_of_eight = 800 * (1 - 0.5**8) + 600 * 0.5**8
    assert filling.value(Vacancy(0, 0, (900,), "T4")) == pytest.approx(best_of_eight)


def test_a_place_counts_by_the_chance_that_a_task_needs_it() -> None:
    one, eight = Footprint(0, 0, 1, WHOLE), Footprint(0, 0, 8, WHOLE)
    idle, pair = Vacancy(0, 0, (WHOLE,) * 8, "G2"), Vacancy(0, 0, (WHOLE,) * 2, "T4")
    # 32 GPUs are free. Half the demand is for whole nodes: 2 are expected, and 3 nodes hold one.
    scarcity = Scarcity({one: 8, eight: 1}, [(idle, 3), (pair, 4)], 32_000)
    assert scarcity.value(pair) == pytest.approx(2 * 0.5 * 1000)
    assert scarcity.value(idle) == pytest.approx(8 * 0.5 * 1000 + 2 / 3 * 8000)


def test_parts_of_gpus_are_places_for_shared_tasks() -> None:
    third = Footprint(0, 0, 1, 300)
    scarcity = Scarcity({third: 1}, [(WORN, 1), (NODE._replace(gpus=(WHOLE,)), 2)], 1_200)
    # WORN has 3 + 1 places, the other two nodes 3 each; 1,200 milli are 4 such tasks.
    assert scarcity.value(WORN) == pytest.approx(4 * 300 * 4 / 10)


def test_small_tasks_leave_whole_nodes_to_the_tasks_that_need_them() -> None:
    eight = Footprint(8_000, 0, 8, WHOLE)
    one = Footprint(1_000, 0, 1, WHOLE)
    pair = Vacancy(16_000, 9_000, (WHOLE,) * 2, "G2")
    idle = Vacancy(64_000, 9_000, (WHOLE,) * 8, "G2")
    foresight = _learned(one, eight)
    foresight.look([(pair, 4), (idle, 4)], 40_000)
    assert foresight.loss(pair, one) < foresight.loss(idle, one)


def test_the_supply_is_counted_again_when_a_twentieth_of_the_gpus_changed_hands() -> None:
    foresight = _learned(ONE)
    assert foresight.outdated(8_000, 100_000)
    foresight.look([(NODE, 1)], 8_000)
    assert not foresight.outdated(8_000, 100_000)
    assert not foresight.outdated(13_000, 100_000)
    assert foresight.outdated(13_001, 100_000)
    assert foresight.outdated(2_999, 100_000)


def _learned(*seen: Footprint) -> Foresight:
    foresight = Foresight(128_000)
    for task in seen * module.REFRESH_EVERY_MIN:
        foresight.saw(task)
    return foresight


def test_a_task_without_gpus_costs_nothing_where_cpus_are_to_spare() -> None:
    foresight = _learned(ONE)
    rich = Vacancy(104_000, 90_000, (WHOLE, WHOLE), "T4")
    assert foresight.loss(rich, ONLY_CPU)[0] == 0
    assert foresight.loss(NODE, ONLY_CPU)[0] > 0  # 8 x 12 cores are all needed for its GPUs


def test_what_is_left_over_is_taken_first() -> None:
    foresight = _learned(HALF, ONE)
    loss, place = foresight.loss(WORN, HALF)
    assert place == 1  # the rest of 60 is lost anyway, a broken free GPU is not
    assert loss < foresight.loss(NODE, HALF)[0]


def test_the_room_that_only_some_tasks_may_use_is_kept_for_them() -> None:
    anywhere = Footprint(1_000, 0, 1, WHOLE)
    foresight = _learned(anywhere, anywhere._replace(models=("T4",)))
    t4, g2 = Vacancy(9_000, 9_000, (WHOLE,), "T4"), Vacancy(9_000, 9_000, (WHOLE,), "G2")
    foresight.look([(t4, 1), (g2, 1)], 2_000)
    assert foresight.loss(g2, anywhere) < foresight.loss(t4, anywhere)


def test_the_mix_is_bounded_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIX_TASKS_MAX", 100)
    monkeypatch.setattr(module, "MIX_KINDS_MAX", 10)
    mix = Mix()
    for cpu in range(1000):
        mix.add(Footprint(cpu, 0, 1, WHOLE))
        mix.add(ONE)
        assert len(mix.counts) <= 10
        assert mix.total == sum(mix.counts.values()) < 100
    assert mix.counts[ONE._replace(memory_mb=0)] == max(mix.counts.values()) > 4


@pytest.fixture(scope="module")
def foresight() -> Foresight:
    return _learned(HALF, ONE, Footprint(3_152, 0, 1, 810), Footprint(88_000, 0, 8, WHOLE))


@given(room=rooms, task=tasks)
def test_whatever_fits_can_be_taken_and_leaves_a_room(room: Vacancy, task: Footprint) -> None:
    if not fits(room, task):
        return
    for place in choices(room, task):
        after = take(room, task, place)
        assert after.cpu_milli >= 0 and after.memory_mb >= 0
        assert len(after.gpus) == len(room.gpus)
        assert list(after.gpus) == sorted(after.gpus, reverse=True)
        assert not after.gpus or after.gpus[-1] >= 0
        assert sum(room.gpus) - sum(after.gpus) == task.milli


@given(room=rooms, task=tasks)
def test_a_loss_names_a_gpu_that_holds_the_task_and_is_the_same_every_time(
    foresight: Foresight, room: Vacancy, task: Footprint
) -> None:
    if not fits(room, task):
        return
    loss, place = foresight.loss(room, task)
    assert place in choices(room, task)
    assert foresight.loss(room, task) == (loss, place)
    fresh = _learned(HALF, ONE, Footprint(3_152, 0, 1, 810), Footprint(88_000, 0, 8, WHOLE))
    assert fresh.loss(room, task) == (loss, place)
