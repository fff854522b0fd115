"""What `shoal status` warns of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from shoal.api.alarms import SHOWN, unsaved_lines
from shoal.control.loop import ControlLoop
from shoal.core.books.hang import Pace
from shoal.core.state.heard import Heard, Watch


def test_jobs_that_cannot_save_are_named_up_to_a_number() -> None:
    heard = Heard()
    for number in range(SHOWN + 3):
        watch = Watch(attempt=1, pace=Pace(began_ms=0), unsaved=number)
        heard.watches[f"j{number}"] = watch
    loop = cast(ControlLoop, SimpleNamespace(state=SimpleNamespace(heard=heard)))
    lines = unsaved_lines(loop)
    assert lines[0] == "j1: its last save failed; see: shoal logs j1"
    assert lines[1] == "j2: its last 2 saves failed; see: shoal logs j2"
    assert lines[SHOWN:] == ["2 other jobs cannot save"]
