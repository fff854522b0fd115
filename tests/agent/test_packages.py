"""Code that travels, with a real agent: members wait for their package and for nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import tarfile
import zipfile
from pathlib import Path

import pytest

from shoal.agent.faults import CannotStart
from shoal.agent.packages import Packages
from shoal.link.wire import PIECE_BYTES
from shoal.model.job import MemberRef
from shoal.model.report import PackagePiece
from tests.agent.rig import Rig, rig

ONE, TWO, THREE = (MemberRef("j1", 1, number) for number in range(3))


def package(size: int = 0, text: str = "hello") -> tuple[str, bytes]:
    """A package with a file `code`, and one that makes it so many bytes long."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in (("sub/code", text.encode()), ("ballast", b"\0" * size)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(made.getvalue()).hexdigest(), made.getvalue()


def getting(node: Rig) -> dict[MemberRef, str]:
    return {one.ref: one.what for one in node.ask().getting}


def test_members_wait_for_one_transfer_and_then_run_in_it() -> None:
    sha, data = package(3 * PIECE_BYTES)
    with rig() as node:
        node.packages[sha] = data
        node.pieces_left = 2
        for ref in (ONE, TWO):
            node.launch(ref, "sh", "-c", "cat code; pwd", package=sha, workdir="sub")
        node.until(lambda: len(node.needs) >= 4)
        node.until(lambda: "1.0 of 1.6 MB" in getting(node).get(ONE, ""))
        node.launch(ONE, "sh", "-c", "cat code; pwd", package=sha, workdir="sub")  # once more
        waiting = getting(node)
        report = node.ask()
        assert (set(waiting), report.alive, report.exits) == ({ONE, TWO}, (), ())
        assert "is fetching its working directory: 1.0 of 1.6 MB" in waiting[ONE]
        node.pieces_left = 100
        node.reconnect()
        assert [node.exit(ref).code for ref in (ONE, TWO)] == [0, 0]
        for ref in (ONE, TWO):
            node.says(ref, f"hello{node.directory}/packages/{sha}/sub")
        assert node.needs[-1].offset > 0
        assert sum(need.offset == 0 for need in node.needs) == 1, "two members, one transfer"
        asked = len(node.needs)
        node.launch(THREE, "cat", "code", package=sha, workdir="sub")
        assert node.exit(THREE).code == 0
        assert len(node.needs) == asked, "what is there is not fetched again"


def test_a_transfer_goes_on_where_it_was_after_the_controller_and_after_the_agent_died() -> None:
    sha, data = package(6 * PIECE_BYTES)
    with rig() as node:
        node.packages[sha] = data
        node.pieces_left = 2
        node.launch(ONE, "cat", "sub/code", package=sha)
        node.until(lambda: len(node.needs) >= 5)
        node.pieces_left = 1
        node.needs.clear()
        node.reconnect()
        node.until(lambda: len(node.needs) >= 4)
        assert node.needs[0].offset == 2 * PIECE_BYTES
        assert ONE in getting(node)
        node.needs.clear()
        node.restart()
        node.pieces_left = 100
        node.launch(TWO, "cat", "sub/code", package=sha)
        assert node.exit(TWO).code == 0
        node.says(TWO, "hello")
        assert node.needs[0].offset == 3 * PIECE_BYTES


def test_a_member_can_be_stopped_while_it_waits() -> None:
    sha, data = package(3 * PIECE_BYTES)
    with rig() as node:
        node.packages[sha] = data
        node.pieces_left = 1
        node.launch(ONE, "cat", "sub/code", package=sha)
        node.launch(TWO, "cat", "sub/code", package=sha)
        node.until(lambda: len(node.needs) >= 2)
        node.stop(ONE)
        ended = node.exit(ONE)
        assert (ended.code, ended.stopped) == (143, True)
        assert set(getting(node)) == {TWO}
        node.pieces_left = 100
        node.reconnect()
        assert node.exit(TWO).code == 0


def test_what_cannot_be_had_or_is_not_what_was_asked_for_is_told() -> None:
    sha, data = package(PIECE_BYTES)
    with rig() as node:
        node.launch(ONE, "cat", "sub/code", package="f" * 64)
        assert node.exit(ONE).code == 127
        assert node.exit(ONE).why == "there is no such package"
        node.packages[sha] = data[:-1] + b"x"
        node.launch(TWO, "cat", "sub/code", package=sha)
        assert node.exit(TWO).code == 127
        assert "arrived damaged" in node.exit(TWO).why and "twice" in node.exit(TWO).why
        assert sum(need.package == sha and need.offset == 0 for need in node.needs) == 2
        node.packages[sha] = data
        node.launch(THREE, "cat", "sub/code", package=sha)
        assert node.exit(THREE).code == 0


def test_a_full_disk_and_an_impossible_size_are_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = __import__("shutil").disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr("shoal.agent.packages.shutil.disk_usage", lambda path: usage)

    async def tried(size: int) -> str:
        packages = Packages(tmp_path / "packages", lambda sha, offset: None, set)
        waiting = asyncio.create_task(packages.get("a" * 64))
        await asyncio.sleep(0)
        packages.take(PackagePiece("a" * 64, 0, b"x", size))
        with pytest.raises(CannotStart) as refused:
            await waiting
        return str(refused.value)

    assert "and 1 MB are" in asyncio.run(tried(50_000_000))
    assert "impossible size" in asyncio.run(tried(1 << 40))


def test_packages_not_used_for_longest_go_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.agent.packages.KEPT_MAX", 3)
    made = [package(text=str(number)) for number in range(5)]

    async def fetch_all() -> None:
        wanted: list[tuple[str, int]] = []
        packages = Packages(
            tmp_path / "packages", lambda sha, offset: wanted.append((sha, offset)), used
        )
        for number, (sha, data) in enumerate(made):
            waiting = asyncio.create_task(packages.get(sha))
            await asyncio.sleep(0)
            packages.take(PackagePiece(sha, 0, data, len(data)))
            path = await waiting
            os.utime(path, (number, number))

    def used() -> set[str]:
        return {made[0][0]}

    asyncio.run(fetch_all())
    left = {path.name for path in (tmp_path / "packages").iterdir()}
    assert left == {made[0][0], made[3][0], made[4][0]}, "the first is in use, and stays"


def wheel(folder: Path, name: str, version: str) -> None:
    """The least that pip takes for a package."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = '{version}'\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_one_environment_for_many_members_with_pips_words_in_their_logs(tmp_path: Path) -> None:
    wheel(tmp_path, "shoaltest", "1.5")
    wanted = f"--no-index\n--find-links {tmp_path}\nshoaltest==1.5\n"
    script = "import shoaltest, shoal, os; print(shoaltest.VERSION, os.environ['VIRTUAL_ENV'])"
    with rig() as node:
        for ref in (ONE, TWO):
            node.launch(ref, "python", "-c", script, requirements=wanted)
        node.until(lambda: bool(node.report and node.report.getting))
        assert "is building its environment" in getting(node)[ONE]
        assert [node.exit(ref).code for ref in (ONE, TWO)] == [0, 0], node.output
        made = [path for path in (node.directory / "environments").iterdir() if path.is_dir()]
        assert len(made) == 1
        for ref in (ONE, TWO):
            node.says(ref, f"1.5 {made[0]}")
            node.says(ref, "Successfully installed shoaltest-1.5")
        built = (made[0] / "shoal-ready").stat().st_ctime_ns
        node.launch(THREE, "python", "-c", script, requirements=wanted)
        assert node.exit(THREE).code == 0
        assert "Successfully installed" not in node.text(THREE)
        assert built <= (made[0] / "shoal-ready").stat().st_ctime_ns


def test_what_pip_cannot_install_is_the_reason_and_a_stop_ends_the_build(tmp_path: Path) -> None:
    with rig() as node:
        node.launch(ONE, "true", requirements=f"--no-index\n--find-links {tmp_path}\nnosuch==1\n")
        ended = node.exit(ONE)
        assert ended.code == 127
        assert "cannot build the environment" in ended.why and "nosuch==1" in ended.why
        node.says(ONE, "Could not find a version")
        (tmp_path / "pipe").mkdir()
        os.mkfifo(tmp_path / "pipe" / "endless.txt")
        node.launch(TWO, "true", requirements=f"-r {tmp_path}/pipe/endless.txt\n")
        node.says(TWO, "building the environment")
        node.stop(TWO)
        assert node.exit(TWO).stopped
        node.launch(THREE, "true")
        assert node.exit(THREE).code == 0


def test_an_agent_that_is_killed_while_it_builds_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.txt")
    with rig() as node:
        node.launch(ONE, "true", requirements=f"-r {tmp_path}/endless.txt\n")
        node.says(ONE, "building the environment")
        node.restart(signal.SIGKILL)
        node.launch(TWO, "true")
        assert node.exit(TWO).code == 0
