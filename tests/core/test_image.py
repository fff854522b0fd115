"""A snapshot as bytes: small, and read as what it was, also those of earlier versions."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.state.apply import replay
from shoal.core.state.events.queue import JobLabelled, JobSubmitted
from shoal.core.state.image import decoded, encoded
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.model.job import JobSpec

ENV = {"PATH": "/usr/bin:" * 20}


def waiting(count: int) -> State:
    """Each with a spec of its own, as the API decodes it."""
    return replay(
        State(),
        [
            JobSubmitted(
                at_ms=number, job=f"j{number}", spec=JobSpec(command=("true",), env=dict(ENV))
            )
            for number in range(1, count + 1)
        ],
    )


def test_equal_specs_are_one_object_in_memory_and_one_in_the_bytes() -> None:
    state = waiting(50)
    assert len({id(job.spec) for job in state.jobs.values()}) == 1
    body = encoded(state.snapshot())
    assert body.count(b"/usr/bin:/usr") and body.count(b'"PATH"') == 1
    restored = restore(decoded(body))
    assert restored.snapshot() == state.snapshot()
    assert len({id(job.spec) for job in restored.jobs.values()}) == 1


def test_a_job_that_gets_a_label_has_a_spec_of_its_own() -> None:
    state = waiting(3)
    replay(state, [JobLabelled(at_ms=9, job="j2", labels={"a": "b"})])
    assert [job.spec.labels for job in state.jobs.values()] == [{}, {"a": "b"}, {}]
    again = restore(decoded(encoded(state.snapshot())))
    assert again.snapshot() == state.snapshot()


def test_a_snapshot_of_an_earlier_version_is_read_and_its_specs_are_shared() -> None:
    state = waiting(3)
    restored = restore(decoded(msgspec.json.encode(state.snapshot())))
    assert restored.snapshot() == state.snapshot()
    assert len({id(job.spec) for job in restored.jobs.values()}) == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"specs":[],"jobs":[]}', b'{"specs":[],"jobs":[{"id":"j1","spec":0}]}\n{}'],
)
def test_what_is_not_a_snapshot_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, LookupError)):
        decoded(body)
