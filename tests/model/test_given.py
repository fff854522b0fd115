"""A client sends what was asked for, so that a head of the release before understands it."""

from __future__ import annotations

import msgspec

from shoal.model.given import given
from shoal.model.job import JobSpec


def test_what_is_so_by_default_is_not_sent_and_nothing_is_lost() -> None:
    assert given(JobSpec(command=("true",))) == {"command": ("true",)}
    spec = JobSpec(command=("true",), env={"A": "1"}, members=2, no_sleep=True, labels={"a": "b"})
    assert set(given(spec)) == {"command", "env", "members", "no_sleep", "labels"}
    assert msgspec.json.decode(msgspec.json.encode(given(spec)), type=JobSpec) == spec
