"""The replay of traces: hand-computed worlds, readable refusals, and the published figures."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import msgspec
import pytest

from bench import queueing, queueing_own, queueing_published
from bench.queueing_outcome import Outcome, Summary, summarize
from bench.queueing_policies import Policy, policies
from bench.queueing_trace import (
    TraceError,
    TraceJob,
    read_jobs,
    read_overheads,
    read_published,
)
from shoal.core.policies import SHIPPED
from shoal.model.job import TIME_MS_MAX

HEADER = "job_id,num_gpu,submit_time,iterations,model_name,iteration_time\n"
# One job of 203 s on the whole cluster, and 100 s later one of 20.3 s.
TWO_JOBS = HEADER + "0,64,0,200,bert,1000\n1,64,100000,20,bert,1000\n"
NAMES = ["srtf", "srsf", "tiresias", "fifo", "fifo+skip"]
HOUR = 3_600_000
DAY = 24 * HOUR


def policy(name: str) -> Policy:
    return next(policy for policy in policies() if policy.name == name)


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# By hand, with the default overhead of 10 s. When the short job comes, the long one has made
# 90 s of progress; SRTF and SRSF stop it for 20.3 s. Tiresias demotes the long one after 51 s and
# after 113 s on the GPUs (3,250 and 7,200 GPU-seconds on 64), and each event costs it 10 s more.
@pytest.mark.parametrize(
    ("name", "ends_s"),
    [
        ("srtf", [120.3, 233.3]),
        ("srsf", [120.3, 233.3]),
        ("tiresias", [120.3, 253.3]),
        ("fifo", [213.0, 233.3]),
        ("fifo+skip", [213.0, 233.3]),
    ],
)
def test_published_rules_on_two_jobs(tmp_path: Path, name: str, ends_s: list[float]) -> None:
    jobs = read_jobs(write(tmp_path, TWO_JOBS))
    outcomes = queueing_published.simulate(jobs, policy(name), {})
    assert [outcome.end_ms / 1000 for outcome in outcomes] == ends_s


# Here the long job keeps its progress, the short one waits 1 s for it to stop, and the long one
# loses 10 s when it starts again. Nobody is stopped before it ran for five minutes, so with ten
# times the work.
@pytest.mark.parametrize(
    ("name", "ends_s"),
    [("srsf", [1204.0, 2244.0]), ("tiresias", [1204.0, 2244.0]), ("fifo", [2030.0, 2233.0])],
)
def test_own_rules_on_two_jobs(tmp_path: Path, name: str, ends_s: list[float]) -> None:
    text = HEADER + "0,64,0,2000,bert,1000\n1,64,1000000,200,bert,1000\n"
    jobs = read_jobs(write(tmp_path, text))
    outcomes = queueing_own.simulate(jobs, name)
    assert [outcome.end_ms / 1000 for outcome in outcomes] == ends_s


@pytest.mark.parametrize("name", queueing_own.POLICIES)
def test_gangs_have_real_room_in_the_own_world(name: str) -> None:
    """Eight nodes hold one job of five GPUs each: the ninth must wait, though 24 GPUs are free."""
    jobs = [job(number, gpus=5, work_ms=1000) for number in range(9)]
    outcomes = queueing_own.simulate(jobs, name)
    assert sorted(outcome.end_ms for outcome in outcomes) == [1000] * 8 + [2000]


def mixed_jobs() -> list[TraceJob]:
    sizes = (1, 8, 4, 32, 2, 16, 12)
    return [
        job(number, gpus=sizes[number % 7], work_ms=(number * 7919 % 400 + 1) * 10_000, at=number)
        for number in range(150)
    ]


@pytest.mark.parametrize("name", queueing_own.POLICIES)
def test_under_own_rules_everybody_finishes_once_and_never_too_soon(name: str) -> None:
    finish_once(queueing_own.simulate(mixed_jobs(), name))


@pytest.mark.parametrize("name", NAMES)
def test_under_published_rules_everybody_finishes_once_and_never_too_soon(name: str) -> None:
    finish_once(queueing_published.simulate(mixed_jobs(), policy(name), {}))


def finish_once(outcomes: list[Outcome]) -> None:
    assert sorted(outcome.number for outcome in outcomes) == list(range(150))
    assert all(outcome.wait_ms >= 0 for outcome in outcomes)


def test_a_wide_job_gets_its_turn_though_small_ones_never_stop_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound: patience, then what is older than it; nothing that comes later counts."""
    stream = [job(2 * n, gpus=1, work_ms=2 * HOUR, at=n * HOUR) for n in range(20 * 24)]
    wide = job(1, gpus=64, work_ms=2 * DAY, at=1)
    jobs = sorted([*stream, wide], key=lambda job: job.submitted_ms)
    # Jobs here are two hours old when they end: sixteen times that is more than a day.
    bound_ms = 3 * DAY + wide.work_ms
    assert end_of(wide, jobs) <= bound_ms
    never = msgspec.structs.replace(SHIPPED["fair"], elder_ms=TIME_MS_MAX)
    monkeypatch.setitem(queueing_own.POLICIES, "shoal-default", never)
    assert end_of(wide, jobs) > bound_ms, "without the elder this test would show nothing"


def end_of(wanted: TraceJob, jobs: list[TraceJob]) -> int:
    outcomes = queueing_own.simulate(jobs, "shoal-default")
    return next(outcome.end_ms for outcome in outcomes if outcome.number == wanted.number)


def job(number: int, *, gpus: int, work_ms: int, at: int = 0) -> TraceJob:
    return TraceJob(number=number, gpus=gpus, submitted_ms=at, work_ms=work_ms, model="bert")


def test_the_last_line_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queueing.main(["--trace", str(write(tmp_path, TWO_JOBS)), "--rules", "own"]) == 0
    figures = msgspec.json.decode(
        capsys.readouterr().out.splitlines()[-1], type=dict[str, dict[str, float]]
    )
    assert list(figures) == list(queueing_own.POLICIES)
    assert all(set(row) == {"avg_jct_s", "makespan_s", "p99_jct_s"} for row in figures.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv: the file is empty"),
        (HEADER, "trace.csv: no jobs in it"),
        ("job_id,num_gpu\n0,1\n", "trace.csv: no column 'submit_time' in the header"),
        (HEADER + "0,1,-5,1,bert,1\n", "trace.csv: row 2: 'submit_time' is -5, less than 0"),
        (HEADER + "0,1,0,1,bert,1\n1,0,0,1,bert,1\n", "row 3: 'num_gpu' is 0, less than 1"),
        (HEADER + "0,1.5,0,1,bert,1\n", "row 2: 'num_gpu' is '1.5', not a whole number"),
        (HEADER + "0,1,soon,1,bert,1\n", "row 2: 'submit_time' is 'soon', not a number"),
        (HEADER + "0,1,0\n", "trace.csv: row 2: no value for 'iterations'"),
        (HEADER + "0,65,0,1,bert,1\n", "a job wants 65 GPUs ('num_gpu'), the cluster has 64"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert queueing.main(["--trace", str(write(tmp_path, text))]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("queueing: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_file_that_was_cut_or_is_no_gzip_or_is_not_there_says_so(tmp_path: Path) -> None:
    whole = gzip.compress((HEADER + "0,1,0,1,bert,1\n" * 5000).encode())
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut\.csv\.gz: damaged or cut off after row \d+"):
        read_jobs(cut)
    with pytest.raises(TraceError, match=r"plain\.csv\.gz: damaged"):
        read_jobs(write(tmp_path, TWO_JOBS, "plain.csv.gz"))
    with pytest.raises(TraceError, match=r"none\.csv: No such file"):
        read_jobs(tmp_path / "none.csv")


def test_a_bad_table_of_overheads_names_the_row(tmp_path: Path) -> None:
    path = write(tmp_path, "num_gpu,model_name,overhead_s\n1,bert,-1\n", "overhead.csv")
    with pytest.raises(TraceError, match="row 2: 'overhead_s' is -1, less than 0"):
        read_overheads(path)


@pytest.fixture
def traces() -> Path:
    beside = Path(__file__).parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("SHOAL_TRACES", beside)) / "muri-philly"
    if not (folder / "trace3.csv.gz").exists():
        pytest.skip("no muri-philly traces: name their parent folder in SHOAL_TRACES")
    return folder


@pytest.mark.soak
def test_trace3_comes_out_as_published_and_the_default_beats_tiresias(traces: Path) -> None:
    jobs = read_jobs(traces / "trace3.csv.gz")
    overheads = read_overheads(traces / "start_overhead.csv")
    published = read_published(traces / "published_sim.csv", "trace3")
    own: dict[str, Summary] = {}
    for name in ("srsf", "srtf", "tiresias"):
        theirs = published[name]["avg_jct_s"]
        same = summarize(queueing_published.simulate(jobs, policy(name), overheads))
        assert same.avg_jct_s == pytest.approx(theirs, rel=0.01)
        own[name] = summarize(queueing_own.simulate(jobs, name))
        assert own[name].avg_jct_s == pytest.approx(theirs, rel=0.07)
    assert own["srsf"].avg_jct_s < own["srtf"].avg_jct_s < own["tiresias"].avg_jct_s
    ours = summarize(queueing_own.simulate(jobs, "shoal-default"))
    assert ours.avg_jct_s < own["tiresias"].avg_jct_s
