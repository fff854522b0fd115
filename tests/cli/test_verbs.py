"""The verbs against a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.waiting import until

from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live


def test_run_prints_the_id_alone_into_a_pipe(live_shoal: Shoal, cluster: Live) -> None:
    result = live_shoal("run", "--", "true")
    assert result.code == 0
    assert result.err == ""
    job = result.out.strip()
    assert cluster.wait(job) == "succeeded"


def test_run_and_wait_shows_the_output_and_ends_with_the_code(live_shoal: Shoal) -> None:
    result = live_shoal("run", "--wait", "--", "sh", "-c", "echo hello; exit 7")
    assert result.out == "hello\n"
    assert result.code == 7
    assert "has failed" in result.err


def test_verbs_find_a_job_by_its_name(live_shoal: Shoal, cluster: Live) -> None:
    script = "echo made > $SHOAL_OUTPUT/result; echo hello; sleep 600"
    job = live_shoal("run", "--name", "prep-1.a", "--", "sh", "-c", script).out.strip()
    until(lambda: live_shoal("logs", "prep-1.a").out == "hello\n")
    assert live_shoal("logs", "prep-1.a.0").out == "hello\n"
    for verb in ("why", "explain"):
        assert live_shoal(verb, "prep-1.a").out.startswith(job)
    assert job in live_shoal("events", "--job", "prep-1.a").out
    assert live_shoal("note", "prep-1.a", "mine").code == 0
    until(lambda: "result" in live_shoal("ls", "prep-1.a").out)
    assert live_shoal("exec", "prep-1.a", "--", "true").code == 0
    assert live_shoal("cancel", "prep-1.a").code == 0
    assert cluster.wait(job) == "cancelled"
    there = str(cluster.home.path / "fetched")
    assert live_shoal("cp", "prep-1.a:result", there).code == 0
    assert Path(there).read_text() == "made\n"


def test_a_gang_speaks_with_prefixes(live_shoal: Shoal) -> None:
    result = live_shoal("run", "-n", "3", "-g", "1", "--wait", "--", "sh", "-c", "echo rank $RANK")
    assert sorted(result.out.splitlines()) == ["[0] rank 0", "[1] rank 1", "[2] rank 2"]
    assert result.code == 0


def test_waiting_goes_on_over_attempts(live_shoal: Shoal) -> None:
    script = 'echo try $SHOAL_ATTEMPT; test "$SHOAL_ATTEMPT" = 2'
    result = live_shoal(
        "run", "--wait", "--retries", "3", "--backoff", "10ms", "--", "sh", "-c", script
    )
    assert result.out == "try 1\ntry 2\n"
    assert "attempt 2" in result.err
    assert result.code == 0


def test_a_job_out_of_time_ends_with_124(live_shoal: Shoal) -> None:
    result = live_shoal("run", "--wait", "--time-limit", "300ms", "--", "sleep", "60")
    assert result.code == 124
    assert "ran out of time" in result.err


def test_waiting_with_json_prints_the_job_when_it_is_over(live_shoal: Shoal) -> None:
    result = live_shoal("run", "--wait", "--json", "--", "sh", "-c", "echo quiet; exit 3")
    view = json.loads(result.out)
    assert (view["state"], view["code"], result.code) == ("failed", 3, 3)


def test_the_shell_goes_along_and_flags_have_the_last_word(
    live_shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "xx_YY")
    monkeypatch.setenv("COPIED", "from here")
    monkeypatch.setenv("NOT_COPIED", "secret")
    (tmp_path / "inside").mkdir()
    (tmp_path / "job.yaml").write_text(
        "command: [sh, -c, 'pwd; echo $LANG $A $B $COPIED $NOT_COPIED']\n"
        "workdir: inside\n"
        "env: {A: file, B: file}\n"
        "gpus: 99\n"
    )
    file = str(tmp_path / "job.yaml")
    result = live_shoal("run", file, "-g", "1", "--env", "B=flag", "--env", "COPIED", "--wait")
    assert result.out.splitlines() == [str(tmp_path / "inside"), "xx_YY file flag from here"]
    assert result.code == 0


def test_the_command_keeps_its_own_flags(live_shoal: Shoal) -> None:
    assert live_shoal("run", "--wait", "echo", "x", "-g", "--json").out == "x -g --json\n"
    assert live_shoal("run", "--wait", "--", "echo", "--", "--wait").out == "-- --wait\n"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["-g", "99"], "gpus"),
        (["-n", "33", "-g", "1"], "members"),
        (["--cpus", "1000"], "cpus"),
        (["--memory", "900T"], "memory"),
    ],
)
def test_the_impossible_is_refused_with_the_field(
    flags: list[str], field: str, live_shoal: Shoal
) -> None:
    result = live_shoal("run", *flags, "--", "true")
    assert_one_clear_line(result)
    assert result.err.startswith(f"error: {field}: ")
    assert result.code == 1


@pytest.mark.parametrize("verb", ["logs", "why", "cancel", "requeue"])
def test_an_unknown_job_is_answered_with_the_newest(verb: str, live_shoal: Shoal) -> None:
    newest = live_shoal("run", "--", "true").out.strip()
    result = live_shoal(verb, "j999999")
    assert_one_clear_line(result)
    assert f"the newest is {newest}" in result.err
    assert result.code == 1


@pytest.mark.parametrize("verb", ["cordon", "drain", "uncordon"])
def test_an_unknown_node_is_answered_with_those_that_are(verb: str, live_shoal: Shoal) -> None:
    result = live_shoal(verb, "n99")
    assert_one_clear_line(result)
    assert "the nodes are n1, n2, n3, n4" in result.err


def test_logs_in_all_their_forms(live_shoal: Shoal, cluster: Live) -> None:
    job = cluster.run("for i in 1 2 3; do echo $RANK line $i; done; printf end", members=2)
    cluster.wait(job)
    lines = [f"{rank} line {i}" for rank in (0, 1) for i in (1, 2, 3)]
    whole = [f"[{text[0]}] {text}" for text in lines]
    whole.insert(3, "[0] end")
    # A last line without an end comes when the attempt is over, so after all others.
    assert sorted(live_shoal("logs", f" {job} ").out.splitlines()) == sorted([*whole, "[1] end"])
    assert live_shoal("logs", job, "-m", "1").out == "1 line 1\n1 line 2\n1 line 3\nend"
    assert live_shoal("logs", job, "-m", "0", "--tail", "2").out == "0 line 3\nend"
    assert live_shoal("logs", job, "-m", "0", "--tail", "0").out == ""
    assert live_shoal("logs", "-f", job, "-m", "0", "--tail", "1").out == "end"
    assert live_shoal("logs", job, "--attempt", "1", "-m", "0", "-f").out.endswith("line 3\nend")
    records = [json.loads(line) for line in live_shoal("logs", job, "--json").out.splitlines()]
    assert {"attempt": 1, "member": 1, "line": "end"} in records
    assert_one_clear_line(live_shoal("logs", job, "-m", "2"))
    assert_one_clear_line(live_shoal("logs", job, "--attempt", "2"))


def test_large_output_arrives_whole(live_shoal: Shoal, cluster: Live) -> None:
    job = cluster.run("seq 200000")
    cluster.wait(job)
    out = live_shoal("logs", job).out
    assert out == "".join(f"{number}\n" for number in range(1, 200_001))
    assert live_shoal("logs", job, "--tail", "20000").out == out[out.index("180001\n") :]


def test_ps_shows_what_lives_and_with_all_what_is_over(live_shoal: Shoal, cluster: Live) -> None:
    over = cluster.run("true", name="quick")
    cluster.wait(over)
    running = cluster.run("sleep 60", name="long", members=2, gpus=1)
    cluster.wait(running, "running")
    waiting = cluster.run("true", members=4, gpus=8, name="wide")
    lines = {line.split()[0]: line.split() for line in live_shoal("ps").out.splitlines()}
    assert lines["ID"] == [
        "ID",
        "NAME",
        "STATE",
        "TRY",
        "SHAPE",
        "NODES",
        "TIME",
        "COMMAND",
    ]
    assert lines[running][1:5] == ["long", "running", "1", "2x1"]
    assert lines[waiting][1:6] == ["wide", "waiting", "-", "4x8", "-"]
    assert over not in lines
    assert over in live_shoal("ps", "-a", "-n", "10000").out
    rows = json.loads(live_shoal("ps", "--json").out)
    assert {row["id"] for row in rows} >= {running, waiting}
    assert "needs 4 members" in live_shoal("why", waiting).out
    result = live_shoal("cancel", waiting, running, "j999999", over)
    assert result.code == 1
    assert f"{waiting} cancelled" in result.out
    assert cluster.wait(running) == "cancelled"


def test_an_elastic_gang_is_shown_and_heard_whole(live_shoal: Shoal, cluster: Live) -> None:
    script = "echo rank $RANK of $WORLD_SIZE; sleep 60"
    job = live_shoal(
        "run", "-n", "2..3", "-g", "8", "--tenant", "crew", "--", "sh", "-c", script
    ).out.strip()
    cluster.wait(job, "running")
    lines = {line.split()[0]: line.split() for line in live_shoal("ps").out.splitlines()}
    assert lines["ID"][2] == "TENANT"
    assert lines[job][2:4] == ["crew", "running"]
    assert "3/2..3x8" in lines[job]
    until(
        lambda: (
            sorted(live_shoal("logs", job).out.splitlines())
            == [f"[{rank}] rank {rank} of 3" for rank in range(3)]
        )
    )
    assert_one_clear_line(live_shoal("logs", job, "-m", "3"))
    cluster.client.cancel(job)
    cluster.wait(job)


def test_a_share_of_a_gpu_is_shown(live_shoal: Shoal, cluster: Live) -> None:
    jobs = [live_shoal("run", "-g", "0.25", "--", "sleep", "60").out.strip() for _ in range(2)]
    for job in jobs:
        cluster.wait(job, "running")
    lines = {line.split()[0]: line.split() for line in live_shoal("ps").out.splitlines()}
    assert "1x0.25" in lines[jobs[0]]
    assert "0.5/8" in live_shoal("nodes").out
    assert sum(node["gpus_free"] for node in json.loads(live_shoal("nodes", "--json").out)) == 31
    for job in jobs:
        cluster.client.cancel(job)
        cluster.wait(job)


def test_why_tells_the_reason_and_the_history(live_shoal: Shoal, cluster: Live) -> None:
    job = cluster.run("exit 5")
    cluster.wait(job)
    out = live_shoal("why", job).out
    assert out.startswith(f"{job} has failed\n  ")
    assert f"ago  {job} was submitted" in out
    assert "exit code 5" in out
    assert json.loads(live_shoal("why", job, "--json").out)["state"] == "failed"


def test_why_tells_when_a_waiting_job_will_start(live_shoal: Shoal, cluster: Live) -> None:
    everything = {"members": 4, "gpus": 8}
    unknown = cluster.run("sleep 60", **everything, name="why-unknown")
    cluster.wait(unknown, "running")
    waiting = cluster.run("true", **everything, tenant="why")
    out = live_shoal("why", waiting).out
    assert "\n  its start cannot be predicted" in out or "probably start" in out
    cluster.client.cancel(waiting)
    cluster.client.cancel(unknown)
    cluster.wait(unknown)
    limited = cluster.run("sleep 60", **everything, estimate_ms=1_200_000, name="why-limited")
    cluster.wait(limited, "running")
    waiting = cluster.run("true", **everything)
    assert "\n  it will probably start in " in live_shoal("why", waiting).out
    assert json.loads(live_shoal("why", waiting, "--json").out)["late_ms"] > 0
    for job in (waiting, limited):
        cluster.client.cancel(job)
    cluster.wait(limited)


def test_nodes_obey_cordon_drain_and_uncordon(live_shoal: Shoal, cluster: Live) -> None:
    def state(node: str) -> str:
        lines = live_shoal("nodes").out.splitlines()
        return next(line.split()[1] for line in lines if line.startswith(node))

    try:
        assert live_shoal("cordon", "n2", "n3").out == "n2 is cordoned\nn3 is cordoned\n"
        assert state("n2") == "cordoned"
        assert "already" in live_shoal("cordon", "n2").out
        assert live_shoal("drain", "n2", "--json").out.strip().startswith("[")
        assert state("n2") == "drained"
    finally:
        assert live_shoal("uncordon", "n2", "n3").code == 0
    assert state("n2") == "ready"
    assert json.loads(live_shoal("nodes", "--json").out)[0]["gpus"] == 8


def test_a_drain_can_be_planned_shown_and_taken_back(live_shoal: Shoal, cluster: Live) -> None:
    def line(node: str) -> str:
        return next(li for li in live_shoal("nodes").out.splitlines() if li.startswith(node))

    try:
        assert live_shoal("drain", "n2", "--in", "2h").out == "n2 will be drained in 2h\n"
        assert "ends in 1h 59m: drain scheduled by " in line("n2")
        assert live_shoal("drain", "n3", "--at", "2d").code == 2
        assert live_shoal("ends", "--node", "n3", "--in", "3h", "--why", "rented").code == 0
        until(lambda: "ends in 2h 59m: rented" in line("n3"))
        assert live_shoal("ends", "--node", "nn", "--never").code == 1
        assert live_shoal("ends", "--never").code == 0
        until(lambda: "ends" not in line("n3"))
    finally:
        assert live_shoal("uncordon", "n2").code == 0
    assert "ends" not in line("n2")


def test_status_fits_on_one_screen(live_shoal: Shoal) -> None:
    result = live_shoal("status")
    assert "4 ready" in result.out
    assert " of 32 in use" in result.out
    assert len(result.out.splitlines()) <= 24
    assert json.loads(live_shoal("status", "--json").out)["gpus"] == 32


def test_events_are_told_and_filtered(live_shoal: Shoal, cluster: Live) -> None:
    job = cluster.run("true")
    cluster.wait(job)
    lines = live_shoal("events", "--job", job, "-n", "100").out.splitlines()
    assert [line.split("  ")[-1].split()[0] for line in lines] == [job] * len(lines)
    assert " succeeded" in lines[-1]
    assert len(live_shoal("events", "-n", "3").out.splitlines()) == 3
    assert live_shoal("events", "-n", "0").out == ""
    records = [
        json.loads(line) for line in live_shoal("events", "--job", job, "--json").out.splitlines()
    ]
    assert records[0]["event"]["event"] == "JobSubmitted"
    assert "joined" in live_shoal("events", "--node", "n1", "-n", "1000").out
    assert_one_clear_line(live_shoal("events", "--job", "j999999"))
    assert_one_clear_line(live_shoal("events", "-f", "--node", "n99"))


def shoal_process(cluster: Live, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.main", *args],
        env={**os.environ, "SHOAL_HOME": str(cluster.home.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_following_survives_the_death_of_the_controller(cluster: Live) -> None:
    script = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done"
    with shoal_process(cluster, "run", "--wait", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "line 1\n"
        cluster.kill_controller()
        out, _ = process.communicate(timeout=120)
    assert out.splitlines() == [f"line {number}" for number in range(2, 7)]
    assert process.returncode == 0


def test_one_interrupt_leaves_the_job_running_and_two_cancel_it(cluster: Live) -> None:
    with shoal_process(cluster, "run", "--wait", "--", "sh", "-c", "echo up; sleep 60") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "up\n"
        job = process.stderr.readline().split()[0].lstrip("[")
        process.send_signal(signal.SIGINT)
        assert f"shoal logs -f {job}" in process.stderr.readline()
        assert process.wait(120) == 130
    assert cluster.client.job(job).state == "running"
    cluster.client.cancel(job)

    with shoal_process(cluster, "run", "--wait", "--", "sh", "-c", "echo up; sleep 60") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "up\n"
        job = process.stderr.readline().split()[0].lstrip("[")
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    until(lambda: cluster.client.job(job).state == "cancelled")


def test_events_are_followed_as_they_happen(cluster: Live) -> None:
    with shoal_process(cluster, "events", "-f", "-n", "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # it is watching from here on
        job = cluster.run("true")
        seen = ""
        while f"{job} succeeded" not in seen:
            line = process.stdout.readline()
            assert line, "it ended by itself"
            seen += line
        assert f"{job} was submitted" in seen
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130


def test_a_home_is_where_it_is_said_to_be(shoal: Shoal, cluster: Live) -> None:
    place = str(cluster.home.path)
    assert shoal("--home", place, "status").code == 0
    assert shoal("status", "--home", place).code == 0
    assert shoal("--home", "/nowhere", "status", "--home", place).code == 0


def test_a_job_is_requeued_and_one_that_ended_is_submitted_again(
    live_shoal: Shoal, cluster: Live
) -> None:
    job = cluster.run("sleep 600", name="again")
    cluster.wait(job, "running")
    assert live_shoal("requeue", job).out == f"{job} will run again\n"
    until(lambda: cluster.client.job(job).attempt == 2)
    cluster.client.cancel(job)
    cluster.wait(job)
    (anew,) = json.loads(live_shoal("requeue", job, "--json").out)
    assert anew["id"] != job and job in anew["note"]
    assert cluster.client.job(anew["id"]).name == "again"
    cluster.client.cancel(anew["id"])


def test_a_link_to_the_page_is_told(live_shoal: Shoal, cluster: Live) -> None:
    link = json.loads(live_shoal("page", "--json").out)["url"]
    assert link.startswith(f"{cluster.client.url}/#code=")
    assert live_shoal("page").out.startswith(f"{cluster.client.url}/#code=")
    assert "shoal page" in live_shoal("status").out
