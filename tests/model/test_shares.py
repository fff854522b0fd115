"""The files of a volume are dealt out to the members of a gang."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.phases.spec_problem import spec_problem
from shoal.model.job import JobSpec
from shoal.model.volume import share

URLS = ("s3://bucket/a:data", "https://example.com/weights:model", "/here:folder")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sets(st.text(max_size=6), max_size=30), st.integers(1, 40))
def test_each_file_has_one_member_and_no_member_has_two_more_than_another(
    paths: set[str], members: int
) -> None:
    shares = [share(paths, member, members) for member in range(members)]
    assert sorted(path for own in shares for path in own) == sorted(paths)
    sizes = [len(own) for own in shares]
    assert max(sizes) - min(sizes) <= 1


def test_most_files_stay_when_the_gang_grows_and_the_order_of_the_listing_does_not_matter() -> None:
    paths = [f"shard-{number:05}.tar" for number in range(2_000)]

    def owners(members: int) -> dict[str, int]:
        return {path: one for one in range(members) for path in share(paths, one, members)}

    eight, nine = owners(8), owners(9)
    moved = sum(eight[path] != nine[path] for path in paths)
    assert moved < 500  # at least 222 have to; dealt in turn, about 1,778 would
    assert share(reversed(paths), 3, 8) == share(paths, 3, 8)


def test_a_gang_with_more_members_than_files_has_empty_shares() -> None:
    assert sorted(len(share(["a", "b"], member, 5)) for member in range(5)) == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="no member 5 of 5"):
        share(["a"], 5, 5)


def test_only_a_volume_from_a_url_of_the_job_can_be_dealt_out() -> None:
    def problem(*names: str, volumes: tuple[str, ...] = URLS) -> str:
        wrong = spec_problem(JobSpec(command=("x",), volumes=volumes, volume_shard=names))
        return f"{wrong.field} {wrong.message}" if wrong else ""

    assert problem("data", "model") == ""
    unknown = "is not the name of a volume from a URL of this job"
    assert problem("folder") == f"volume_shard folder {unknown}; those are data, model"
    assert problem("data", volumes=()) == f"volume_shard data {unknown}"
