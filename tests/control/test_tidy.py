"""What a finished job leaves behind."""

from __future__ import annotations

from pathlib import Path

from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeReady
from shoal.core.state.events.runs import JobFinished
from shoal.head.controller import Tidy
from shoal.model.job import Outcome
from shoal.model.report import Report


def test_an_empty_place_for_checkpoints_goes_with_its_job(tmp_path: Path) -> None:
    for name in ("j1", "j2", "j3"):
        (tmp_path / name).mkdir()
    (tmp_path / "j2" / "step-1").touch()
    events: list[Event] = [NodeReady(at_ms=1, node="a", why="")]
    for name in ("j1", "j2", "j9"):
        outcome = Outcome.FAILED
        events.append(JobFinished(at_ms=1, job=name, attempt=1, outcome=outcome, code=1, why=""))
    Tidy(tmp_path).stepped(Report(), events, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j2", "j3"]
