"""`j7.3` is an element of an array, or a member of any other job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.cli.cluster import Named, named
from shoal.cli.screen.words import waiting_lines
from shoal.forms.failure import Failure
from shoal.model.array import ArrayCounts
from shoal.model.ids import array_of, in_order, number_of
from shoal.model.views import JobView


def view_of(job: str, *, array: bool) -> JobView:
    fields = msgspec.structs.fields(JobView)
    given: dict[str, Any] = {field.name: None for field in fields if field.required}
    given |= {"id": job, "array": ArrayCounts(elements=10) if array else None}
    return JobView(**given)


def no_look(job: str) -> JobView:
    raise AssertionError(f"{job} was fetched, although the text decides")


def test_a_second_number_is_an_element_if_the_job_is_an_array() -> None:
    looked = []

    def look(job: str) -> JobView:
        looked.append(job)
        return view_of(job, array=job == "j7")

    assert named("j7.3", look) == Named("j7.3", None)
    assert named("j8.3", look) == Named("j8", 3)
    assert looked == ["j7", "j8"]


def test_other_names_need_no_look() -> None:
    assert named(" j7 ", no_look) == Named("j7", None)
    assert named("j7.03.1", no_look) == Named("j7.3", 1)
    assert str(Named("j7.3", 1)) == "j7.3.1"


@pytest.mark.parametrize("text", ["", "7", "j", "j7.", "j7.x", "j7.1.2.3", "j7.-1", "chat"])
def test_other_text_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(
        Failure, match=r"is not a job, element or member like j7, j7\.3 or j7\.3\.1"
    ):
        named(text, no_look)


def test_ids_sort_by_their_numbers() -> None:
    ids = ["j10", "j7.12", "j8", "j7", "j7.3"]
    assert sorted(ids, key=in_order) == ["j7", "j7.3", "j7.12", "j8", "j10"]
    assert [number_of(one) for one in ("j7", "j7.3", "x7", "j7.3.1")] == [7, 7, 0, 0]
    assert (array_of("j7.3"), array_of("j7")) == ("j7", "")


def test_why_somebodys_jobs_wait_is_counted_by_reason() -> None:
    def row(job: str, state: str, why: str = "", gpus: int = 0, size: int = 0) -> JobView:
        held = {"gpus": gpus, "size": size, "gpu_milli": 1000}
        return msgspec.structs.replace(view_of(job, array=False), state=state, why=why, **held)

    rows = [row("j1", "running", gpus=4, size=2), row("j2", "waiting", "no room")]
    rows += [row("j3", "waiting", "the budget of red is used up"), row("j4", "waiting", "no room")]
    assert waiting_lines(rows) == [
        "1 job on 8 GPUs; 3 jobs waiting",
        "j2 and 1 more: no room",
        "j3: the budget of red is used up",
    ]
