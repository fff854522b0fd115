"""What neighbors learn, and what is believed of what they say, without a neighbor."""

from __future__ import annotations

import pytest

from shoal.control.neighboring.known import problem_with_version
from shoal.control.neighboring.site import amount
from shoal.control.neighboring.wire import one_line
from shoal.model.job import DEFAULT_TENANT
from shoal.model.neighbor import mark_of, marked, shape_of, stays_home
from tests.core.build import job_spec


@pytest.mark.parametrize(
    ("theirs", "understood"),
    [("0.6.0", True), ("0.7.3", True), ("0.5.9", True), ("0.8.0", False), ("1.6.0", False)],
)
def test_releases_one_apart_understand_each_other(theirs: str, understood: bool) -> None:
    problem = problem_with_version(theirs, "0.6.2")
    assert (not problem) is understood
    assert understood or (theirs in problem and "0.6.2" in problem)


def test_a_version_that_is_none_is_refused() -> None:
    assert "'\\x1b[31m'" in problem_with_version("\x1b[31m", "0.6.0")


def test_whoever_is_only_asked_learns_the_size_of_a_job_and_no_more() -> None:
    secret = job_spec(
        gpus=4,
        members=2,
        name="atlas",
        command=("python", "atlas.py"),
        env={"KEY": "atlas"},
        labels={"run": "atlas"},
        secrets=("atlas=KEY",),
        package="a" * 64,
        volumes=("s3://atlas/set:data:ro",),
        volume_shard=("data",),
        requirements="atlas",
        tenant="atlas",
        user="atlas",
    )
    shown = shape_of(secret, DEFAULT_TENANT)
    assert "atlas" not in repr(shown) and "a" * 64 not in repr(shown)
    assert (shown.gpus, shown.members) == (4, 2)


def test_what_depends_on_this_cluster_stays_here() -> None:
    assert not stays_home(job_spec(secrets=("hf=HF",)))
    assert "encrypted" in stays_home(job_spec(encrypt=True))
    assert "another cluster" in stays_home(job_spec(labels={"home": "east"}))


def test_a_mark_names_a_hand_over_and_nothing_else_does() -> None:
    assert marked(mark_of("0a1b2c3d", "j7.3", 2)) == ("0a1b2c3d", "j7.3", 2)
    assert marked("east") is marked("0a1b2c3d.j7") is marked("0a1b2c3d.j7.1\n") is None


def test_numbers_and_words_of_a_neighbor_are_bounded() -> None:
    assert (amount(-5), amount(1e300)) == (0, 10**15)
    assert one_line("a\x1b[31m\nb" + "c" * 10_000) == f"a [31m b{'c' * 192}"
