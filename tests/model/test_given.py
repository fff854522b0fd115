"""A client sends what was asked for, so that a head of the release before understands it."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import pytest

from shoal.calls.call import given
from shoal.model.job import JobSpec


def test_what_is_so_by_default_is_not_sent_and_nothing_is_lost() -> None:
    assert given(JobSpec(command=("true",))) == {"command": ("true",)}
    spec = JobSpec(command=("true",), env={"A": "1"}, members=2, no_sleep=True, labels={"a": "b"})
    assert set(given(spec)) == {"command", "env", "members", "no_sleep", "labels"}
    assert msgspec.json.decode(msgspec.json.encode(given(spec)), type=JobSpec) == spec


def test_the_annotations_of_a_spec_are_evaluated_once_however_many_jobs_are_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spec(msgspec.Struct):
        members: int = 1

    fields = Mock(wraps=msgspec.structs.fields)
    monkeypatch.setattr(msgspec.structs, "fields", fields)
    assert [given(Spec(members)) for members in (1, 2, 3)] == [{}, {"members": 2}, {"members": 3}]
    fields.assert_called_once_with(Spec)
