"""Sleep on an excerpt of the public traces: it loses less work than stopping does."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from bench import sleep_traces
from bench.sleep_traces import Result

TRACES = Path(
    os.environ.get("SHOAL_TRACES")
    or Path(__file__).parent.parent.parent.parent / "shared" / "traces"
)


def test_sleep_loses_less_work_on_an_excerpt(capsys: pytest.CaptureFixture[str]) -> None:
    muri = TRACES / "muri-philly"
    if not (muri / "trace3.csv.gz").exists():
        pytest.skip(f"{muri} is not here; SHOAL_TRACES names the folder of the public traces")
    asked = ["--only", "trace3", "--jobs", "150", "--policy", "fair, sleep"]
    assert sleep_traces.main(["--muri", str(muri), *asked]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = msgspec.json.decode(last, type=dict[str, dict[str, Result]])["muri trace3"]
    without, slept = found["fair"], found["fair, sleep"]
    assert without.naps == 0 and without.stops > 10
    assert slept.naps > 10 and slept.stops < without.stops
    assert slept.lost_gpu_hours < without.lost_gpu_hours


def test_without_a_trace_it_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert sleep_traces.main([]) == 2
    assert capsys.readouterr().err == "sleep_traces: name --muri or --pollux\n"
    assert sleep_traces.main(["--muri", "/no/such/folder"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
