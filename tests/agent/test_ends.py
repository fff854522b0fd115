"""What a machine's own scripts say of its end reaches the controller."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shoal.machine.ends import ENDS, EndFile, forget_end, write_end
from tests.agent.rig import rig


def test_an_agent_reports_an_end_that_is_written_and_forgets_one_that_is_taken_back() -> None:
    with rig() as node:
        write_end(node.directory, time.time() + 3600, "spot notice")
        assert node.until(lambda: node.report is not None and node.report.ends_why == "spot notice")
        assert node.report is not None and node.report.ends_in_ms is not None
        assert 3_000_000 < node.report.ends_in_ms <= 3_600_000
        sequence = node.report.sequence
        write_end(node.directory, time.time() + 60, "spot notice")  # sooner, for the same reason
        assert node.until(lambda: node.report is not None and node.report.sequence > sequence)
        assert node.report.ends_in_ms is not None and node.report.ends_in_ms <= 60_000
        forget_end(node.directory)
        assert node.until(lambda: node.report is not None and node.report.ends_in_ms is None)


def test_setting_the_clock_does_not_move_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_end(tmp_path, time.time() + 600, "")
    end = EndFile(tmp_path)
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 86_400)
    end.look()
    left_ms, _ = end.left()
    assert left_ms is not None and 500_000 < left_ms <= 600_000


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"why": "no time"}', '{"at": "soon"}', '{"at": 1e300}', '{"at": NaN}']
)
def test_what_is_not_an_end_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / ENDS).write_text(text)
    assert EndFile(tmp_path).left() == (None, "")


def test_an_end_in_the_past_is_now_and_a_long_reason_is_cut(tmp_path: Path) -> None:
    end = EndFile(tmp_path)
    (tmp_path / ENDS).write_text(json.dumps({"at": 1, "why": "x" * 5000}))
    assert end.look()
    left_ms, why = end.left()
    assert left_ms == 0 and len(why) == 200


def test_an_end_that_was_over_when_the_agent_started_is_of_an_earlier_life(tmp_path: Path) -> None:
    write_end(tmp_path, time.time() - 1, "spot notice")
    end = EndFile(tmp_path)
    assert end.left() == (None, "")
    assert not end.look()
    write_end(tmp_path, time.time() + 100, "spot notice")
    assert end.look() and end.left()[1] == "spot notice"
