"""Whatever is wrong with a trace is told in one line that names the row or the field."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from shoal.sim.replay.clusters import read_causes, read_nodes
from shoal.sim.replay.readers import READERS, read_trace
from shoal.sim.replay.traces import Gangs, TraceError

HEAD = "submit_s,duration_s,gpus\n"
SACCT = "JobID|Submit|Start|End|ElapsedRaw|AllocTRES|NNodes|State|Timelimit\n"

BAD = {
    "empty": ("", "is empty"),
    "blank": ("\n\n", "is empty"),
    "header only": (HEAD, "has no jobs: it has a header only"),
    "unknown columns": ("a,b,c\n1,2,3\n", "no known format (a, b, c); a plain CSV needs"),
    "no column": ("submit_s,gpus\n1,2\n", "no known format"),
    "negative time": (HEAD + "0,1,1\n-5,1,1\n", "row 3: submit_s: must be at least 0, not -5"),
    "negative work": (HEAD + "0,-1,1\n", "row 2: duration_s: must be at least 0"),
    "no number": (HEAD + "0,ten,1\n", "row 2: duration_s: ten is not a number"),
    "not a number": (HEAD + "0,nan,1\n", "row 2: duration_s: nan is not a number"),
    "infinite": (HEAD + "0,inf,1\n", "row 2: duration_s: inf is not a number"),
    "too long": (HEAD + "0,1e15,1\n", "row 2: duration_s: must be at most"),
    "half a GPU": (HEAD + "0,1,0.5\n", "row 2: gpus: must be a whole number, not 0.5"),
    "empty field": (HEAD + "0,,1\n", "row 2: duration_s: is empty"),
    "short row": (HEAD + "0,1,1\n0,1\n", "row 3: has 2 fields, but the header names 3"),
    "long row": (HEAD + "0,1,1,1\n", "row 2: has 4 fields"),
    "long field": (HEAD + "0," + "9" * 200_000 + ",1\n", "row 2: field larger than"),
    "uneven": (
        "submit_s,duration_s,gpus,members\n0,1,7,2\n",
        "row 2: members: 7 GPUs cannot be split evenly over 2 members",
    ),
    "slurm moment": (SACCT + "1|soon|x|x|5||1|COMPLETED|\n", "row 2: Submit: 'soon' is not a time"),
    "slurm GPUs": (
        SACCT + "1|2025-01-01T00:00:00|x|x|5|gres/gpu=two|1|COMPLETED|\n",
        "row 2: TRES: gres/gpu=two is not a number of GPUs",
    ),
    "slurm memory": (
        SACCT + "1|2025-01-01T00:00:00|x|x|5|mem=lots|1|COMPLETED|\n",
        "row 2: TRES: 'lots' is not an amount like 64G",
    ),
    "slurm limit": (
        SACCT + "1|2025-01-01T00:00:00|x|x|5||1|COMPLETED|1h\n",
        "row 2: Timelimit: '1h' is not a time",
    ),
    "slurm nothing ran": (
        SACCT + "1|2025-01-01T00:00:00|Unknown|Unknown|0||1|PENDING|\n",
        "has no jobs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        read_trace(path, Gangs(8, cpus_count=True, memory_counts=True))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_gzip_that_is_cut_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    whole = gzip.compress((HEAD + "0,1,1\n" * 5000).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut off or damaged"):
        read_trace(path, Gangs(8))


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEAD.encode() + b"\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="is not text"):
        read_trace(path, Gangs(8))


def test_a_format_that_does_not_exist_is_told_with_those_that_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "0,1,1\n")
    with pytest.raises(TraceError, match=f"there are {', '.join(READERS)}"):
        read_trace(path, Gangs(8), form="swf")


def test_a_forced_format_names_the_column_it_misses(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "0,1,1\n")
    with pytest.raises(TraceError, match="has no column JobID or Submit"):
        read_trace(path, Gangs(8), form="sacct")


def test_choosing_by_a_column_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "0,1,1\n")
    with pytest.raises(TraceError, match="has no column vc, which --where needs"):
        read_trace(path, Gangs(8), where={"vc": "x"})
    with pytest.raises(TraceError, match="no row has gpus=9"):
        read_trace(path, Gangs(8), where={"gpus": "9"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node,cpus\nn1,4\n", "has no column gpus"),
        ("node,gpus\n", "has no nodes"),
        ("node,gpus\nn1,4\nn1,4\n", "row 3: two nodes are named n1"),
        ("node,gpus\nn 1,4\n", "row 2:"),
        ("node,gpus\nn1,900\n", "row 2: gpus: must be at most 256"),
    ],
)
def test_bad_nodes_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(message)):
        read_nodes(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("component,category\nx,y\n", "has no column interruptions"),
        ("component,category,interruptions\nx,y,0\n", "no cause has any"),
        ("component,category,interruptions\nx,y,-1\n", "row 2: interruptions"),
    ],
)
def test_bad_causes_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "causes.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(message)):
        read_causes(path, 1000)
