"""Published traces are read as their documentation says, and can be made plain ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.readers import read_trace
from bench.readers.__main__ import main
from shoal.sim.replay.readers import read_trace as read_plain
from shoal.sim.replay.traces import Gangs, TraceError, sums

TRACES = Path(__file__).parent / "traces"

# format -> (submit_ms, work_ms, members, GPUs of each, tenant) of every job, in order
EXPECTED = {
    "muri.csv": [(0, 110_635, 1, 1, ""), (6_000, 99_470, 2, 8, "")],
    "elasticflow.csv": [(0, 976_000, 1, 1, "vgg16"), (219_000, 1_792_000, 1, 4, "vgg16")],
    "shockwave.csv": [(0, 1_418_000, 1, 1, "LM"), (55_000, 3_338_000, 1, 2, "ResNet-18")],
    "openb.csv": [
        (0, 1_190_000, 1, 1, "LS"),
        (30_000, 60_000, 1, 1, "BE"),
        (40_000, 100_000, 1, 0, "BE"),
    ],
    # 1000 iterations of 1 s; 200 iterations of a batch done in two parts of 8 per GPU
    "pollux/workloads.csv": [
        (0, 1_000_000, 1, 1, "toy"),
        (10_000, 380_000, 1, 4, "toy"),
        (20_000, 1_000_000, 1, 1, "toy"),
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_format_is_known_by_its_columns(name: str) -> None:
    found = [
        (one.submit_ms, one.work_ms, one.spec.members, one.spec.gpus, one.tenant)
        for one in read_trace(TRACES / name, Gangs(8)).arrivals
    ]
    assert found == EXPECTED[name]


def test_cpus_and_memory_count_only_where_nodes_say_what_they_have() -> None:
    counted = read_trace(TRACES / "openb.csv", Gangs(8, cpus_count=True, memory_counts=True))
    assert [a.spec.cpu_milli for a in counted.arrivals] == [12_000, 6_000, 8_000]
    assert [a.spec.memory_mb for a in counted.arrivals] == [16_384, 12_288, 30_517]
    uncounted = read_trace(TRACES / "openb.csv", Gangs(8))
    assert {(a.spec.cpu_milli, a.spec.memory_mb) for a in uncounted.arrivals} == {(0, 0)}


BAD = {
    "pollux without profiles": (
        "submit_s,application,num_replicas,batch_size\n0,toy,1,8\n",
        "profile_validation.csv: is needed",
    ),
    "pods without times": (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,1,1000\n",
        "has no column creation_time or deletion_time",
    ),
    "pod that ends early": (
        "cpu_milli,num_gpu,gpu_milli,creation_time,deletion_time\n1,1,1000,10,5\n",
        "row 2: deletion_time: is before the pod began",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(message)):
        read_trace(path, Gangs(8))


@pytest.mark.parametrize("name", ["muri.csv", "elasticflow.csv", "pollux/workloads.csv"])
def test_a_converted_trace_is_the_same_trace(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = name.removesuffix(".csv").partition("/")[0]
    assert main([form, str(TRACES / name)]) == 0
    plain = tmp_path / "plain.csv"
    plain.write_text(capsys.readouterr().out)
    found, published = read_plain(plain, Gangs(8)), read_trace(TRACES / name, Gangs(8))
    assert sums(found) == sums(published)
    assert [one.submit_ms for one in found.arrivals] == [o.submit_ms for o in published.arrivals]


def test_a_wrong_command_line_shows_the_usage() -> None:
    assert main(["swf", "jobs.csv"]) == 2
    assert main(["muri", "nowhere.csv"]) == 1
