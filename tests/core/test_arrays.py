"""Arrays: elements become jobs as there is room, each once, and the array ends with the last."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.features.array import WINDOW_MAX, WINDOW_MIN
from shoal.core.invariants import verify
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.array import Bits
from shoal.model.job import Job, Outcome, Phase
from shoal.model.policy import Policy, Tenant
from shoal.model.report import Accepted, Answer, Cancel, Refused, Requeue, Retry, Submit
from shoal.model.sweep import IndexRange, Sweep, filled
from tests.core.build import Cluster, job_spec


def ranges(*given: tuple[int, ...], at_most: int = 0) -> dict[str, Any]:
    return {
        "ranges": [list(one) if len(one) == 3 else [*one, 1] for one in given],
        "at_most": at_most,
    }


def cluster(gpus: int = 4, policy: Policy | None = None) -> Cluster:
    made = Cluster(policy or Policy())
    made.join("a", gpus=gpus, cpus=10_000)
    return made


def live(made: Cluster, array: str) -> list[str]:
    return list(made.state.unfolded[array].jobs)


def running(made: Cluster, array: str) -> list[str]:
    return [job for job in live(made, array) if made.job(job).active]


def settle(made: Cluster) -> None:
    """Steps until nothing more is to be done at once, as the loop takes them."""
    made.deliver()
    made.hear(*made.books)
    while made.last.wake_ms is not None and made.last.wake_ms <= made.now_ms:
        made.deliver()
        made.hear(*made.books)


def drive(made: Cluster, array: str, code: dict[int, int] | None = None) -> list[int]:
    """End everything that runs, again and again, until the array has ended; returns the indices."""
    ended: list[int] = []
    for _ in range(1_000):
        settle(made)
        if array not in made.state.arrays:
            return ended
        for job_id in running(made, array):
            index = made.job(job_id).spec.index
            ended.append(index)
            made.exit(job_id, (code or {}).get(index, 0))
        made.hear(*made.books)
        made.wait(10)
    raise AssertionError("the array does not end")


def refused(answer: Answer) -> str:
    assert isinstance(answer, Refused), answer
    return f"{answer.field} {answer.message}"


def test_each_element_runs_once_with_its_index_in_its_environment_and_command() -> None:
    made = cluster()
    array = made.submit(
        gpus=1, command=["work", "{index}", "$x{y}"], sweep=ranges((3, 9, 3), (20, 21))
    )
    assert array == "j1"
    settle(made)
    job = made.job("j1.6")
    assert job.spec.command == ("work", "6", "$x{y}")
    assert job.spec.env == {
        "SHOAL_ARRAY_JOB": "j1", "SHOAL_ARRAY_INDEX": "6", "SHOAL_ARRAY_COUNT": "5"
    }  # fmt: skip
    assert drive(made, array) == [3, 6, 9, 20, 21]
    record = made.finished[array]
    assert (record.outcome, record.code, record.why) == (Outcome.SUCCEEDED, 0, "5 of 5 done")
    assert made.submit() == "j2"


def test_elements_stand_where_their_array_was_submitted() -> None:
    made = cluster(gpus=1)
    array = made.submit(gpus=1, sweep=ranges((0, 40)))
    later = made.submit(gpus=1)
    order = drive(made, array)
    assert order == list(range(41))
    assert made.job(later).attempt == 0 or made.job(later).phase is not Phase.FINISHED


def test_only_as_many_elements_are_jobs_as_can_soon_run() -> None:
    made = cluster(gpus=2)
    array = made.submit(gpus=1, sweep=ranges((0, 99_999)))
    settle(made)
    assert len(running(made, array)) == 2
    assert len(live(made, array)) <= 2 + WINDOW_MIN
    size = len(msgspec.json.encode(made.state.snapshot()))
    assert size < 200_000  # 100,000 elements, of which a few are jobs


def test_the_window_follows_what_is_placed() -> None:
    made = cluster(gpus=200)
    array = made.submit(gpus=1, sweep=ranges((0, 9_999)))
    settle(made)
    assert len(running(made, array)) == 200
    assert WINDOW_MIN < made.state.agenda.windows[array] <= WINDOW_MAX


def test_no_more_elements_live_than_at_most() -> None:
    made = cluster(gpus=8)
    array = made.submit(gpus=1, sweep=ranges((0, 29), at_most=3))
    settle(made)
    assert live(made, array) == ["j1.0", "j1.1", "j1.2"]
    made.end("j1.1")
    assert live(made, array) == ["j1.0", "j1.2", "j1.3"]
    drive(made, array)  # the invariants look at every step
    assert made.finished[array].outcome is Outcome.SUCCEEDED


def test_an_array_with_failures_says_which_and_runs_them_again() -> None:
    made = cluster()
    array = made.submit(gpus=1, sweep=ranges((0, 19)))
    drive(made, array, {3: 1, 7: 1, 8: 2, 9: 1})
    record = made.finished[array]
    assert (record.outcome, record.code) == (Outcome.FAILED, 1)
    assert record.why == "20 of 20 done, 4 failed: 3, 7-9"
    assert (
        refused(made.ask(Retry("j1.4"))) == "job j1.4 has succeeded, so there is nothing to retry"
    )
    assert made.ask(Retry("j1.8")) == Accepted("j1.8", "1 element will run again")
    assert drive(made, array) == [8]
    assert made.finished["j1.8"].attempt == 2  # the name of a member is used only once
    assert made.finished[array].why == "20 of 20 done, 3 failed: 3, 7, 9"
    assert made.ask(Retry(array)) == Accepted(array, "3 elements will run again")
    assert drive(made, array) == [3, 7, 9]
    assert {made.finished[f"j1.{index}"].attempt for index in (3, 7, 9)} == {3}
    assert made.finished[array].outcome is Outcome.SUCCEEDED
    assert refused(made.ask(Retry(array))) == "job no element of j1 has failed or was cancelled"


def test_elements_of_a_live_array_are_retried_without_waiting_for_the_others() -> None:
    made = cluster(gpus=1)
    array = made.submit(gpus=1, sweep=ranges((0, 3)))
    settle(made)
    made.end("j1.0", code=1)
    assert isinstance(made.ask(Retry("j1.0")), Accepted)
    assert refused(made.ask(Retry("j1.0"))).endswith("run it again with: shoal requeue j1.0")
    assert drive(made, array) == [1, 0, 2, 3]
    assert made.finished[array].outcome is Outcome.SUCCEEDED


def test_a_cancelled_array_stops_what_runs_and_starts_nothing() -> None:
    made = cluster(gpus=2)
    array = made.submit(gpus=1, sweep=ranges((0, 99)))
    settle(made)
    first = running(made, array)
    assert made.cancel(array) == Accepted(array)
    assert made.cancel(array) == Accepted(array, "already being cancelled")
    assert live(made, array) == first
    drive(made, array)
    record = made.finished[array]
    assert (record.outcome, record.code) == (Outcome.CANCELLED, 130)
    assert record.why == "100 of 100 done, 98 cancelled: 2-99"
    assert refused(made.ask(Requeue(array))).startswith("job there is no live job")
    assert isinstance(made.ask(Retry(array)), Accepted)
    assert len(drive(made, array)) == 98


def test_one_element_is_cancelled_or_requeued_alone() -> None:
    made = cluster(gpus=2)
    array = made.submit(gpus=1, sweep=ranges((0, 9), at_most=2))
    settle(made)
    assert refused(made.cancel("j1.5")) == "job j1.5 has not begun; cancel all of j1, or wait"
    assert refused(made.cancel("j1.10")) == "job j1 has no element 10"
    assert made.ask(Requeue("j1.1")) == Accepted("j1.1")
    made.deliver()
    made.end("j1.1", code=143)
    assert refused(made.ask(Requeue(array))).startswith("job j1 is an array; requeue a single")
    assert made.cancel("j1.0") == Accepted("j1.0")
    made.deliver()
    made.end("j1.0", code=143)
    drive(made, array)
    assert made.finished[array].why == "10 of 10 done, 1 cancelled: 0"
    assert made.finished[array].outcome is Outcome.CANCELLED
    assert made.finished["j1.1"].attempt == 2


def test_one_key_is_one_array_also_after_its_end() -> None:
    made = cluster()
    spec = job_spec(gpus=1, sweep=ranges((0, 2)))
    assert made.ask(Submit(spec, "key")) == Accepted("j1")
    again = Accepted("j1", "this submission was already accepted")
    assert made.ask(Submit(spec, "key")) == again
    drive(made, "j1", {1: 1})
    made.step(requests=(Submit(spec, "key"),))
    assert not made.state.arrays
    made.ask(Retry("j1"))
    assert made.ask(Submit(spec, "key")) == again
    drive(made, "j1")


def test_caps_hold_arrays_back_instead_of_refusing_their_elements() -> None:
    made = cluster(policy=Policy(tenants=(Tenant(name="lab", jobs_max=3),)))
    other = made.submit(gpus=1, tenant="lab")
    array = made.submit(gpus=1, tenant="lab", sweep=ranges((0, 9)))
    settle(made)
    assert len(live(made, array)) == 2
    assert refused(made.ask(Submit(job_spec(tenant="lab")))).startswith(
        "tenant lab has 3 of at most 3"
    )
    made.end(other)
    settle(made)
    assert len(live(made, array)) == 3
    drive(made, array)


def test_arrays_go_on_one_element_at_a_time_when_a_cap_is_lowered_below_their_number() -> None:
    made = cluster(gpus=1)
    arrays = [made.submit(gpus=1, tenant="lab", sweep=ranges((0, 20))) for _ in range(3)]
    made.policy = Policy(tenants=(Tenant(name="lab", jobs_max=1),))
    settle(made)
    for array in arrays:
        drive(made, array)
    assert not made.state.arrays


def test_a_grid_makes_all_combinations_and_a_list_one_element_for_each_row() -> None:
    made = cluster()
    grid = {"grid": {"lr": ["0.1", "0.2"], "seed": ["1", "2", "3"]}}
    made.submit(gpus=1, command=["train", "--lr={lr}", "{seed}", "{{lr}}", "${lr}"], sweep=grid)
    settle(made)
    job = made.job("j1.3")
    assert job.spec.command == ("train", "--lr=0.2", "1", "{lr}", "${lr}")
    assert (job.spec.env["lr"], job.spec.env["seed"]) == ("0.2", "1")
    rows = {"rows": [{"lr": "0.1", "wd": "0"}, {"lr": "0.3", "wd": "1"}]}
    array = made.submit(gpus=0, command=["train", "{lr}", "{wd}"], sweep=rows)
    settle(made)
    assert made.job(f"{array}.1").spec.command == ("train", "0.3", "1")


@pytest.mark.parametrize(
    ("sweep", "fields", "said"),
    [
        (ranges((5, 3)), {}, "array 5-3 is backwards"),
        (ranges((0, 5), (5, 6)), {}, "array 5 is named twice; write the indices in rising order"),
        (ranges((7, 9), (1, 2)), {}, "array 1 comes after 9; write the indices in rising order"),
        (ranges((0, 1_000_000)), {}, "array has 1,000,001 elements; the maximum is 1,000,000"),
        ({}, {}, "array has no element; write e.g. 0-99"),
        ({"grid": {"lr": []}}, {}, "grid lr needs 1 to 10,000 values"),
        ({"grid": {"a": ["1"]}, "rows": [{"b": "1"}]}, {}, "grid and list exclude each other"),
        ({"rows": [{"a": "1"}, {"b": "1"}]}, {}, "list row 1 lacks a; give all rows the same"),
        ({"rows": [{}]}, {}, "list row 0 has no variable; write e.g. {lr: 0.1}"),
        ({"grid": {"index": ["1"]}}, {}, "grid index is the index of an element; choose"),
        ({"grid": {"lr": ["1"]}}, {"env": {"lr": "2"}}, "grid lr is in env, too; leave one out"),
        ({"grid": {"lr": ["1"]}}, {"command": ["a", "{rl}"]},
         "command {rl} is not a variable; the sweep has lr, index (write {{rl}} for the"),
        ({"grid": {"RANK": ["1"]}}, {}, "env RANK is set by Shoal for each member"),
        ({"grid": {"lr": ["1"]}, "ranges": [[0, 1, 1]]}, {}, "array and a sweep both say which"),
        ({"grid": {"lr": ["x" * 4000]}}, {"command": ["{lr}" * 200]}, "command is longer than"),
        (ranges((0, 3)), {"gpus": 9}, "gpus asks for 9 GPUs per member, but no node"),
    ],
)  # fmt: skip
def test_a_bad_array_is_refused_with_the_field_and_the_fix(
    sweep: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    made = cluster()
    assert refused(made.ask(Submit(job_spec(sweep=sweep, **fields)))).startswith(said)


def test_an_element_cannot_be_submitted_by_hand() -> None:
    made = cluster()
    assert "is set by Shoal itself" in refused(made.ask(Submit(job_spec(array="j1", index=3))))


def test_a_controller_that_restarts_goes_on_where_it_was() -> None:
    made = cluster()
    array = made.submit(gpus=1, sweep=ranges((0, 30), at_most=7))
    settle(made)
    made.end("j1.2", code=1)
    image = msgspec.json.encode(made.state.snapshot())
    made.state = restore(msgspec.json.decode(image, type=Snapshot))
    assert msgspec.json.encode(made.state.snapshot()) == image
    verify(made.state)
    made.hear("a")
    assert sorted(drive(made, array)) == [n for n in range(31) if n != 2]
    assert made.finished[array].why == "31 of 31 done, 1 failed: 2"


def test_elements_that_wait_for_a_retry_do_not_hold_the_others_up() -> None:
    made = cluster(gpus=1)
    fields = {"restart": "on-failure", "retries": 3, "backoff_ms": 3_600_000}
    array = made.submit(gpus=1, sweep=ranges((0, 40)), **fields)
    for index in range(30):
        settle(made)
        assert running(made, array) == [f"j1.{index}"]
        made.end(f"j1.{index}", code=1)


@given(st.sets(st.integers(0, 200)), st.lists(st.integers(0, 200), max_size=50), st.integers(0, 90))
def test_bits_are_a_set(have: set[int], change: list[int], full: int) -> None:
    bits, true = Bits(), set[int]()
    for one in have:
        bits.add(one)
    true |= have
    for one in change:
        (bits.discard if one in true else bits.add)(one)
        true ^= {one}
    other = Bits.full(full)
    assert (list(other), other.count) == (list(range(full)), full)
    assert (list(bits), bits.count) == (sorted(true), len(true))
    assert all(number in bits for number in true)
    other.take_in(bits)
    assert (list(other), other.count) == (
        sorted(true | set(range(full))),
        len(true | {*range(full)}),
    )
    again = msgspec.json.decode(msgspec.json.encode(bits), type=Bits)
    assert list(again) == list(bits)


@st.composite
def sweeps(draw: st.DrawFn) -> Sweep:
    parts, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        first = start + draw(st.integers(0, 5))
        last = first + draw(st.integers(0, 20))
        parts.append(IndexRange(first, last, draw(st.integers(1, 4))))
        start = last + 1
    return Sweep(ranges=tuple(parts))


@given(sweeps())
def test_positions_and_indices_name_each_other(sweep: Sweep) -> None:
    true = [index for one in sweep.ranges for index in range(one.first, one.last + 1, one.step)]
    assert [sweep.index_at(position) for position in range(sweep.count)] == true
    by_index = {index: position for position, index in enumerate(true)}
    for index in range(max(true) + 3):
        assert sweep.position_of(index) == by_index.get(index)


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.text(max_size=2), min_size=1, max_size=4))
)
def test_a_grid_has_every_combination_once(grid: dict[str, list[str]]) -> None:
    sweep = Sweep(grid={name: tuple(values) for name, values in grid.items()})
    seen = [tuple(sweep.values_at(position).values()) for position in range(sweep.count)]
    expected: list[tuple[str, ...]] = [()] if grid else []
    for values in grid.values():
        expected = [(*row, value) for row in expected for value in values]
    assert seen == expected


@given(st.text(alphabet="{}$ab", max_size=12))
def test_text_without_a_variable_stays_as_it_is(word: str) -> None:
    assert filled(word, {}) == word


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_happens_each_element_ends_once(data: st.DataObject) -> None:
    """Exits, cancellations, retries and restarts in any order; the invariants look at each step."""
    made = cluster(gpus=3)
    size, at_most = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 4))
    array = made.submit(gpus=1, sweep=ranges((0, size - 1), at_most=at_most))
    for _ in range(data.draw(st.integers(0, 25))):
        settle(made)
        jobs = running(made, array) if array in made.state.arrays else []
        match data.draw(st.integers(0, 4)):
            case 0 | 1 if jobs:
                made.exit(data.draw(st.sampled_from(jobs)), data.draw(st.integers(0, 1)))
            case 2:
                made.ask(Retry(f"{array}.{data.draw(st.integers(0, size))}"))
            case 3:
                made.ask(Retry(array))
            case 4:
                one = data.draw(st.integers(-3, size))
                made.ask(Cancel(array if one < 0 else f"{array}.{one}"))
        made.hear("a")
        image = msgspec.json.encode(made.state.snapshot())
        made.state = restore(msgspec.json.decode(image, type=Snapshot))
    if array in made.state.arrays:
        drive(made, array)
    made.ask(Retry(array))
    drive(made, array)
    record: Job = made.finished[array]
    assert (record.outcome, record.why) == (Outcome.SUCCEEDED, f"{size} of {size} done")


def test_an_array_waits_for_other_jobs_and_others_for_it() -> None:
    made = cluster(gpus=1)
    first = made.run(gpus=1)
    array = made.submit(gpus=1, after=[first], sweep=ranges((0, 2)))
    whole = made.submit(gpus=1, after=[array])
    element = made.submit(gpus=1, after=[f"{array}.2:any"], priority=5)
    assert not live(made, array)
    made.end(first)
    settle(made)
    assert made.job(whole).awaits == (array,)
    assert drive(made, array) == [0, 1, 2]
    assert not made.job(whole).awaits and not made.job(element).awaits
    vain = made.submit(gpus=1, after=[f"{first}:fail"], sweep=ranges((0, 2)))
    settle(made)
    assert made.finished[vain].outcome is Outcome.CANCELLED
    never = made.submit(gpus=1, after=[element], sweep=ranges((0, 2)))
    waits = made.submit(gpus=1, after=[f"{never}.1"])
    made.cancel(never)
    settle(made)
    assert "never started" in made.finished[waits].why
