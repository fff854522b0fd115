"""Calls that outlive the controller, and ids that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import cluster
from shoal.client import Client, ShoalError, Unreachable
from shoal.forms.failure import Failure
from shoal.model.finding import JobFilter


class Answers:
    """Stands in for a client: gives these answers, one call after the other."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.closed = 0

    def ask(self) -> object:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers(Unreachable("gone"), Unreachable("gone"), "here", ShoalError("no"))
    monkeypatch.setattr(cluster, "connect", lambda home: answers)
    monkeypatch.setattr(cluster, "_may_answer", lambda home: True)
    monkeypatch.setattr("shoal.cli.cluster.time.sleep", lambda seconds: None)
    return answers


def ask(client: Client) -> object:
    return client.ask()  # type: ignore[attr-defined]


def test_a_call_is_made_again_until_the_controller_is_back(
    fake: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.Retry(Path("/x")) as retry:
        assert retry(ask) == "here"
        assert capsys.readouterr().err.splitlines() == [
            "the controller does not answer; retrying",
            "the controller is back",
        ]
        with pytest.raises(ShoalError, match="no"):
            retry(ask)
    assert fake.closed == 3


def test_patience_has_an_end(fake: Answers) -> None:
    with cluster.Retry(Path("/x"), retry_s=0) as retry, pytest.raises(Unreachable):
        retry(ask)


def test_nobody_waits_for_a_cluster_that_nobody_started(tmp_path: Path) -> None:
    with (
        cluster.Retry(tmp_path, retry_s=3_600) as retry,
        pytest.raises(Unreachable, match=r"no cluster is up in .*; start one with: shoal up"),
    ):
        retry(ask)


def test_white_space_around_an_id_is_forgiven() -> None:
    assert cluster.job_id(NOBODY, " j7\n") == "j7"
    assert cluster.node_id("\tn1 ") == "n1"
    for wrong in ("j7.1.2.3", "", "a b", "../x", "j7;"):
        with pytest.raises(Failure, match=r"is not a job id like j7 or j7\.3, or a name"):
            cluster.job_id(NOBODY, wrong)


class Named:
    """A cluster with these jobs: id, name, and whether it has ended."""

    def __init__(self, *jobs: tuple[str, str, bool]) -> None:
        self._jobs = jobs

    def jobs(self, *, finished: bool, wanted: JobFilter | None = None) -> list[SimpleNamespace]:
        assert finished
        return [
            SimpleNamespace(id=job, name=name, finished_ms=5 if ended else None)
            for job, name, ended in self._jobs
            if wanted is None or wanted.name == name
        ]

    def services(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="chat")]


NOBODY: Any = None
KNOWN: Any = Named(
    ("j9", "prep", True),
    ("j12", "prep", False),
    ("j10", "train.v2", True),
    ("j3", "twice", False),
    ("j4", "twice", False),
    ("j5", "j3", False),
    ("j6", "chat", False),
)


@pytest.mark.parametrize(
    ("text", "acts", "job"),
    [
        ("prep", False, "j12"),
        ("prep", True, "j12"),
        ("prep.3", False, "j12.3"),
        ("train.v2", False, "j10"),
        ("train.v2", True, "j10"),
        ("train.v2.7", False, "j10.7"),
        ("twice", False, "j4"),
        ("j3", False, "j3"),
    ],
)
def test_a_job_is_found_by_its_name(text: str, acts: bool, job: str) -> None:
    assert cluster.job_id(KNOWN, text, acts=acts) == job


def test_the_newest_of_several_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    cluster.job_id(KNOWN, "twice")
    assert "twice is j4, the newest of 2 jobs with this name" in capsys.readouterr().err


def test_a_verb_that_stops_jobs_does_not_guess() -> None:
    with pytest.raises(Failure, match="2 jobs named twice have not ended; give an id: j3, j4"):
        cluster.job_ids(KNOWN, ["twice"])
    with pytest.raises(Failure, match=r"there is no job named prepp; did you mean prep\?"):
        cluster.job_id(KNOWN, "prepp")


def test_a_services_name_counts_before_a_jobs() -> None:
    assert cluster.is_service(KNOWN, " chat")
    assert not cluster.is_service(KNOWN, "prep")
    assert not cluster.is_service(KNOWN, "j7")
