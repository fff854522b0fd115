"""Failures follow a node or a job, and the book tells which."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.books.failures import (
    FAILURES_PER_JOB_MAX,
    JOBS_MAX,
    REMEMBERED_MS,
    Failure,
    FailureBook,
    blame,
    failed,
    forget,
    ran_well,
    same_way,
)
from shoal.model.reason import render


def failure(node: str, at_ms: int = 0, code: int = 1, step: int | None = None) -> Failure:
    return Failure(at_ms=at_ms, node=node, member=0, code=code, step=step)


def test_two_jobs_that_fail_on_a_node_and_run_well_elsewhere_speak_against_it() -> None:
    book = FailureBook()
    for job in ("j1", "j2"):
        failed(book, job, failure("bad"))
        assert blame(book, "bad", 1) is None  # the jobs themselves may be at fault
        ran_well(book, job, ("good",))
    found = blame(book, "bad", 1)
    assert found is not None
    assert found.jobs == ("j1", "j2")
    assert render(found.why) == "2 jobs failed on bad and ran well elsewhere: j1, j2"
    assert blame(book, "good", 1) is None


def test_a_job_that_fails_twice_only_there_is_enough() -> None:
    book = FailureBook()
    failed(book, "j1", failure("bad"))
    ran_well(book, "j1", ("good", "fine"))
    assert blame(book, "bad", 1) is None
    failed(book, "j1", failure("bad"))
    ran_well(book, "j1", ("good",))
    found = blame(book, "bad", 1)
    assert found is not None
    assert render(found.why) == "j1 failed 2 times, only on bad, and ran well elsewhere"


def test_a_job_that_fails_everywhere_speaks_against_no_node() -> None:
    book = FailureBook()
    for node in ("a", "b", "a", "b", "a"):
        failed(book, "j1", failure(node))
    assert blame(book, "a", 1) is None
    ran_well(book, "j1", ("c",))  # at last: but it had failed on two nodes
    assert blame(book, "a", 1) is None


def test_a_job_that_runs_well_on_the_node_after_all_clears_it() -> None:
    book = FailureBook()
    for job in ("j1", "j2"):
        failed(book, job, failure("a"))
        ran_well(book, job, ("b",))
    ran_well(book, "j2", ("a", "b"))
    assert blame(book, "a", 1) is None


def test_what_was_long_ago_is_forgotten() -> None:
    book = FailureBook()
    for job in ("j1", "j2"):
        failed(book, job, failure("bad"))
        ran_well(book, job, ("good",))
    assert blame(book, "bad", REMEMBERED_MS) is not None
    assert blame(book, "bad", REMEMBERED_MS + 1) is None


def test_a_job_that_fails_three_times_the_same_way_is_stopped_with_the_reason() -> None:
    book = FailureBook()
    for node in ("a", "b", "a"):
        assert same_way(book, "j1") is None
        failed(book, "j1", failure(node, code=7, step=1200))
    assert same_way(book, "j1") == "failed 3 times with code 7 at step 1200, on 2 different nodes"


def test_other_codes_other_steps_and_unknown_steps_are_not_the_same_way() -> None:
    for steps, codes in (((5, 5, 6), (1, 1, 1)), ((5, 5, 5), (1, 2, 1)), ((None,) * 3, (1, 1, 1))):
        book = FailureBook()
        for step, code in zip(steps, codes, strict=True):
            failed(book, "j1", failure("a", code=code, step=step))
        assert same_way(book, "j1") is None


def test_a_job_that_got_further_in_between_begins_to_count_anew() -> None:
    book = FailureBook()
    for step in (5, 5, 9, 5):
        failed(book, "j1", failure("a", step=step))
    assert same_way(book, "j1") is None


def test_a_finished_job_is_remembered_only_where_it_tells_of_a_node() -> None:
    book = FailureBook()
    failed(book, "j1", failure("a"))
    forget(book, "j1")
    assert book.jobs == {}
    failed(book, "j2", failure("a"))
    ran_well(book, "j2", ("b",))
    forget(book, "j2")
    assert list(book.jobs) == ["j2"]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.booleans(), st.integers(0, 3)),
        max_size=80,
    )
)
@settings(max_examples=100, deadline=None)
def test_no_node_is_blamed_by_jobs_that_ran_well_nowhere(
    said: list[tuple[int, str, bool, int]],
) -> None:
    book, well = FailureBook(), set()
    for job, node, ran, code in said:
        if ran:
            ran_well(book, f"j{job}", (node,))
            well.add(f"j{job}")
        else:
            failed(book, f"j{job}", failure(node, code=code))
    for node in "abc":
        found = blame(book, node, 1)
        assert found is None or set(found.jobs) <= well
    assert all(0 < len(kept) <= FAILURES_PER_JOB_MAX for kept in book.jobs.values())
    assert msgspec.json.decode(msgspec.json.encode(book), type=FailureBook) == book


def test_the_book_is_bounded() -> None:
    book = FailureBook()
    for number in range(JOBS_MAX + 5):
        failed(book, f"j{number}", failure("a"))
    assert len(book.jobs) == JOBS_MAX
    assert "j0" not in book.jobs
