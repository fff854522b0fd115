"""The storage probe: what it measures, what it refuses, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.model.health import CheckResult
from shoal.model.storage import READ_MBS, SMALL_PER_S, WRITE_MBS, Storage
from shoal.probes import storage_folder, storage_url
from shoal.probes.storage import Left, measure
from shoal.probes.storage_place import Problem
from tests.needs import need
from tests.s3 import s3_server


def asked(target: Path | str, **more: int) -> Storage:
    return Storage(target=str(target), phase_ms=100, **more)


def command(target: Path, node: Path, phase_ms: int = 100) -> list[str]:
    file = node / "storage.json"
    file.write_bytes(msgspec.json.encode(Storage(target=str(target), phase_ms=phase_ms)))
    return [sys.executable, "-m", "shoal.probes.storage", str(file), "--directory", str(node)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_it_writes_reads_and_handles_small_files_and_leaves_nothing(
    data: Path, tmp_path: Path
) -> None:
    (data / "mine").write_text("kept")
    done = subprocess.run(command(data, tmp_path), capture_output=True, check=True)
    found = msgspec.json.decode(done.stdout, type=CheckResult)
    assert not found.error
    assert min(found.figures[name] for name in (WRITE_MBS, READ_MBS, SMALL_PER_S)) > 0
    assert os.listdir(data) == ["mine"]


def test_what_a_killed_probe_left_is_removed_by_the_next(data: Path, tmp_path: Path) -> None:
    probe = subprocess.Popen(command(data, tmp_path, 20_000), stdout=subprocess.DEVNULL)
    try:
        until(lambda: any(data.glob(".shoal-check-*/data0")))
    finally:
        probe.send_signal(signal.SIGKILL)
        probe.wait()
    assert len(os.listdir(data)) == 1
    measure(asked(data), Left(tmp_path))
    assert os.listdir(data) == []


def test_only_its_own_folders_are_removed(data: Path, tmp_path: Path) -> None:
    (data / "precious").mkdir()
    (data / "precious" / "file").write_text("kept")
    (data / ".shoal-check-link").symlink_to(data / "precious")
    left = Left(tmp_path)
    for name in ("precious", "../data/precious", ".shoal-check-link"):
        left.add(str(data), name)
    Left(tmp_path).remove()
    assert (data / "precious" / "file").read_text() == "kept"


def test_a_place_that_cannot_be_measured_is_said_in_one_line(data: Path, tmp_path: Path) -> None:
    (data / "file").write_text("")
    (data / "link").symlink_to("/etc")
    for target, words in (
        (data / "missing", f"there is no folder {data}/missing"),
        (data / "file", f"{data}/file is not a folder"),
        (data / "link", f"{data}/link is a link to /etc: name the folder itself"),
        (data / "link" / "ssl", f"{data}/link is a link to /etc: name the folder itself"),
        ("/proc", "/proc"),
        ("relative", "must be an absolute path"),
    ):
        with pytest.raises(Problem) as caught:
            measure(asked(target), Left(tmp_path))
        assert words in str(caught.value)
        assert str(caught.value).isprintable()
    done = subprocess.run(command(data / "missing", tmp_path), capture_output=True, check=True)
    found = msgspec.json.decode(done.stdout, type=CheckResult)
    assert found.error == f"there is no folder {data}/missing"
    assert done.stderr == b""


def test_it_takes_a_tenth_of_the_free_space_at_most_and_refuses_a_full_disk(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(data)

    def free(blocks: int) -> None:
        fields = list(real)
        fields[4] = blocks
        fields[1] = 4096
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    free(10**9 // 4096)
    place = storage_folder.Folder(str(data), ".shoal-check-room", nodes=2)
    try:
        assert place._room <= 10**9 // 10 // 2
        place.write(0.2)
        size = sum(path.stat().st_size for path in data.glob("*/data*"))
        assert size <= 10**9 // 10 // 2
    finally:
        place.remove()
    free(1000)
    with pytest.raises(Problem, match="only 4 MB are free"):
        storage_folder.Folder(str(data), ".shoal-check-full", nodes=1)
    assert os.listdir(data) == []


def test_s3_is_measured_with_the_environments_credentials_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("s3fs")
    import s3fs

    monkeypatch.setattr(storage_url, "OBJECT_BYTES", 100_000)
    monkeypatch.setattr(storage_url, "STREAMS", 2)
    with s3_server(tmp_path) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("runs")
        files.pipe_file("runs/kept", b"kept")
        found = measure(asked("s3://runs/here"), Left(tmp_path))
        assert min(found.figures[name] for name in (WRITE_MBS, READ_MBS, SMALL_PER_S)) > 0
        files.invalidate_cache()
        assert files.find("runs") == ["runs/kept"]
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(Problem) as caught:
            measure(asked("s3://runs/here"), Left(tmp_path))
        assert "wrong" not in str(caught.value)
