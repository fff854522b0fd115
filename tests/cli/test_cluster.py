"""Calls that outlive the controller, and ids that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import cluster
from shoal.client import Client, ShoalError, Unreachable
from shoal.forms.failure import Failure


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


def test_white_space_around_an_id_is_forgiven() -> None:
    assert cluster.job_id(" j7\n") == "j7"
    assert cluster.node_id("\tn1 ") == "n1"
    with pytest.raises(Failure, match="is not a job id like j7"):
        cluster.job_id("7")
