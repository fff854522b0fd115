"""Files in $SHOAL_OUTPUT are kept: whole, whoever is killed, and after their node has died."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.cli.app import call
from shoal.client import ShoalError
from shoal.sdk.kept import fetch
from tests.live.cluster import Live, live_cluster

BIG = 96 << 20  # more than is on its way at a time, many times over

# Writes a large file and prints its hash; then goes on, or ends.
LARGE = f"""
head -c {BIG} /dev/urandom > $SHOAL_OUTPUT/big
sha256sum < $SHOAL_OUTPUT/big
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=1) as cluster:
        yield cluster


def fetched(live: Live, job: str, path: str, to: Path) -> str:
    """The SHA-256 of what `shoal cp` brings."""
    assert call(["cp", "--home", str(live.home.path), f"{job}:{path}", str(to)]) == 0
    return hashlib.sha256((to / Path(path).name).read_bytes()).hexdigest()


def paths(live: Live, job: str) -> list[str]:
    return [file.path for file in live.client.files(job).files]


def test_what_a_job_leaves_in_its_folder_is_listed_and_copied(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "cd $SHOAL_OUTPUT; mkdir -p runs/a; echo one > runs/a/log.txt; : > empty; echo x > .hidden;"
        "ln -s /etc/passwd link; mkfifo pipe; echo gone > tmp; "
        f"while ! test -e {tmp_path}/go; do sleep 0.1; done; rm tmp; echo two > runs/b.txt; exit 3"
    )
    job = live.run(script)
    until(lambda: "tmp" in paths(live, job), "files come while the job runs")
    (tmp_path / "go").touch()
    assert live.wait(job) == "failed"
    assert paths(live, job) == [".hidden", "empty", "runs/a/log.txt", "runs/b.txt"]
    notes = " ".join(live.client.files(job).notes)
    assert "link: it is a symbolic link" in notes
    assert "pipe: it is not a regular file" in notes
    home = ("--home", str(live.home.path))
    assert call(["ls", *home, job, "runs"]) == 0
    assert "runs/a/log.txt" in capsys.readouterr().out
    assert call(["cp", *home, "-r", f"{job}:", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all/runs/a/log.txt").read_text() == "one\n"
    assert call(["cp", *home, f"{job}:runs", str(tmp_path)]) == 2, "a folder needs -r"
    fresh = tmp_path / "no" / "such" / "folder"
    assert call(["cp", *home, f"{job}:runs/b.txt", f"{fresh}/"]) == 0
    assert (fresh / "b.txt").read_text() == "two\n", "a slash means a folder"
    assert "add -r" in capsys.readouterr().err
    for bad in ("../../token", "/etc/passwd", "runs/../../../shoal.db", "no"):
        with pytest.raises(ShoalError, match="has kept no file"):
            live.client.file_part(job, bad)
    left = [live.home.nodes / node / "outputs" / job for node in ("n1", "n2")]
    until(lambda: not any(path.exists() for path in left), "the node keeps no copy")


def test_members_share_one_folder_and_the_last_copy_of_a_name_counts(live: Live) -> None:
    script = "echo $SHOAL_MEMBER > $SHOAL_OUTPUT/of.$SHOAL_MEMBER; echo any > $SHOAL_OUTPUT/same"
    job = live.run(script, members=2, gpus=1)
    assert live.wait(job) == "succeeded"
    assert paths(live, job) == ["of.0", "of.1", "same"]


def test_a_copy_is_whole_although_controller_and_agent_are_killed_during_it(
    live: Live, tmp_path: Path
) -> None:
    wait = f"{LARGE} while ! test -e {tmp_path}/go; do sleep 0.1; done; echo end > $SHOAL_OUTPUT/z"
    job = live.run(wait, gpus=1, restart="never")
    parts = live.home.outputs / ".parts"

    def on_its_way() -> bool:
        return parts.is_dir() and any(part.stat().st_size > 0 for part in parts.glob("*/*.*"))

    until(on_its_way)
    live.kill_controller()
    until(lambda: paths(live, job) == ["big"])
    said = live.output(job).split()[0]
    # A copy from while it was still being written may be listed first.
    until(lambda: fetched(live, job, "big", tmp_path) == said)
    node = live.client.job(job).nodes[0]
    os.kill(live.controller_pid(), signal.SIGSTOP)  # so that the end cannot be copied
    try:
        (tmp_path / "go").touch()
        until((live.home.nodes / node / "outputs" / job / "z").exists)
        live.kill_agent(node)
    finally:
        os.kill(live.controller_pid(), signal.SIGCONT)
    assert live.wait(job) in ("failed", "succeeded")
    until(lambda: paths(live, job) == ["big", "z"], "the node's next life sends it")
    assert fetched(live, job, "big", tmp_path) == said


@pytest.mark.outside("an alarm is seen only while it is raised, and a busy machine looks seldom")
def test_a_job_ends_although_the_head_can_keep_none_of_its_files(
    live: Live, tmp_path: Path
) -> None:
    """The head's store cannot be written: an alarm says so, and the files come when it can."""
    outputs = live.home.outputs
    outputs.mkdir(exist_ok=True)
    moved = outputs.rename(tmp_path / "outputs")
    outputs.write_text("in the way")
    try:
        job = live.run("echo result > $SHOAL_OUTPUT/r; sleep 1")
        until(lambda: any("files of jobs" in one for one in live.client.status().alarms))
        assert live.wait(job, timeout_s=90) == "succeeded"
    finally:
        outputs.unlink()
        moved.rename(outputs)
    until(lambda: paths(live, job) == ["r"])


def test_a_file_is_copied_into_a_running_job(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has its name only when it is whole; a folder goes with everything in it."""
    work = tmp_path / "work"
    work.mkdir()
    script = "while ! test -e big.bin || ! test -e sub/a/b; do sleep 0.1; done; sha256sum < big.bin"
    job = live.run(script, workdir=str(work))
    assert live.wait(job, "running") == "running"
    data = os.urandom(3 << 20)
    (tmp_path / "big.bin").write_bytes(data)
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/b").write_text("x")
    home = ("--home", str(live.home.path))
    assert call(["cp", *home, str(tmp_path / "big.bin"), f"{job}:"]) == 0
    assert call(["cp", *home, str(tmp_path / "big.bin"), f"{job}:/proc/no/such"]) == 1
    into = tmp_path / "made" / "by" / "cp"
    assert call(["cp", *home, str(tmp_path / "big.bin"), f"{job}:{into}/"]) == 0
    assert (into / "big.bin").stat().st_size == (tmp_path / "big.bin").stat().st_size
    os.mkfifo(tmp_path / "pipe")
    assert call(["cp", *home, str(tmp_path / "pipe"), f"{job}:"]) == 1, "it would never end"
    assert "could not be written in the job" in capsys.readouterr().err
    assert call(["cp", *home, "-r", str(tmp_path / "tree"), f"{job}:sub"]) == 0
    assert live.wait(job) == "succeeded"
    assert hashlib.sha256(data).hexdigest() in live.output(job)


def test_a_volume_that_no_node_has_is_named_and_one_that_is_there_is_found(
    live: Live, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("from the volume")
    job = live.run("cat $SHOAL_VOLUME_DATA/words", volumes=[f"{tmp_path}:data:ro"])
    assert live.wait(job) == "succeeded"
    assert "from the volume" in live.output(job)
    job = live.run("true", volumes=["/no/such/folder:data"])
    assert live.wait(job) == "failed"
    assert "volume data: /no/such/folder is not a folder" in live.client.job(job).why


def test_a_read_only_volume_cannot_be_written_to(live: Live, tmp_path: Path) -> None:
    """Nor from inside it, nor by a command beside the job; a volume without :ro can."""
    inside, other = tmp_path / "data" / "inside", tmp_path / "other"
    inside.mkdir(parents=True)
    other.mkdir()
    script = (
        "touch $SHOAL_VOLUME_DATA/a || touch $SHOAL_VOLUME_DATA/inside/b || touch c || "
        "touch $SHOAL_VOLUME_OUT/d; echo tried; read -r line < $SHOAL_VOLUME_OUT/go"
    )
    os.mkfifo(other / "go")
    job = live.run(
        script,
        workdir=str(inside),
        volumes=[f"{inside.parent}:data:ro", f"{other}:out"],
    )
    until(lambda: "tried" in live.output(job), more=lambda: live.output(job))
    assert live.output(job).count("Read-only file system") == 3
    home = ["--home", str(live.home.path)]
    assert call(["exec", *home, job, "--", "touch", str(inside / "e")]) == 1
    (other / "go").write_text("end\n")
    assert live.wait(job) == "succeeded"
    assert sorted(path.name for path in tmp_path.rglob("?")) == ["d"]


def test_encrypted_files_are_clear_for_their_tenant_and_nowhere_at_the_head(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = "clear-text-of-a-tenant"
    script = f"yes {marker} | head -c 700000 > $SHOAL_OUTPUT/model.pt; : > $SHOAL_OUTPUT/empty"
    wanted = live.spec("sh", "-c", script, encrypt=True)
    with pytest.raises(ShoalError, match="default has no secret encryption-key; set it with"):
        live.client.submit(wanted)
    live.client.set_secret("encryption-key", b"0123456789abcdef" * 4)
    job = live.client.submit(wanted).id
    assert live.wait(job) == "succeeded"
    mine = (path for path in live.home.path.rglob("*") if live.home.nodes not in path.parents)
    found = [path for path in mine if path.is_file()]
    kept = live.home.path / "outputs" / job / "output" / "model.pt"
    assert kept in found
    held = [path for path in found if marker.encode() * 2 in path.read_bytes().replace(b"\n", b"")]
    assert not held
    home = ("--home", str(live.home.path))
    assert call(["ls", *home, job]) == 0
    said = capsys.readouterr()
    assert "700.0 KB" in said.out and "encrypted: shoal cp decrypts them" in said.out + said.err
    assert call(["cp", *home, "-r", f"{job}:", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all/model.pt").read_text().startswith(f"{marker}\n{marker}\n")
    assert (tmp_path / "all/empty").read_bytes() == b""
    assert fetch(live.client, job, "model.pt", tmp_path).stat().st_size == 700_000
    damaged = kept.read_bytes()
    kept.write_bytes(damaged[:-1])  # by somebody at the head
    assert call(["cp", *home, f"{job}:model.pt", str(tmp_path / "cut")]) == 1
    assert "model.pt is damaged" in capsys.readouterr().err
    kept.write_bytes(damaged)
    live.client.set_secret("encryption-key", b"another key of 32 bytes and more")
    assert call(["cp", *home, f"{job}:model.pt", str(tmp_path / "cut")]) == 1
    assert "set the earlier value again" in capsys.readouterr().err
    live.client.remove_secret("encryption-key")
    assert call(["cp", *home, f"{job}:model.pt", str(tmp_path / "cut")]) == 1
    assert "default has no secret encryption-key" in capsys.readouterr().err
    assert not (tmp_path / "cut").exists() and not list(tmp_path.glob(".*.part"))
