"""The whole of a benchmark always ends, and says what it could not measure."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from bench.parts import CLEAN_UP_S, ROOT, Part, last_line, limit_of, run_all


def python(text: str, limit_s: float = 60) -> dict[str, object]:
    return last_line([sys.executable, "-c", text], limit_s, ROOT)


def test_a_part_that_takes_too_long_is_ended_and_cleans_up(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    text = f"""
import time
try:
    time.sleep(600)
finally:
    open({str(mark)!r}, "w").close()
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        assert str(python(text, 2)["absent"]).startswith("not done after 2 s (")
    finally:
        signal.signal(signal.SIGINT, before)
    assert mark.exists()


def test_the_last_line_counts_and_an_error_is_named() -> None:
    assert python("print('progress'); print('{\"jobs\": 1}')") == {"jobs": 1}
    failed = python("raise ValueError('no Slurm\\nlog: of a daemon')")
    assert failed == {"absent": "failed: ValueError: no Slurm"}


def test_what_is_left_out_or_missing_says_so() -> None:
    parts = (Part("long", "bench.control", (), 0, 1), Part("gone", "bench.nothing", (), 1, 1))
    assert limit_of(parts, quick=True) == 1 + CLEAN_UP_S
    assert run_all(parts, quick=True) == {
        "long": {"absent": "left out by --quick"},
        "gone": {"absent": "bench.nothing does not exist"},
    }
