"""Questions about paths that may hang get an answer, or a refusal with the name of the mount."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mounts import Fuse, fuse
from harness.waiting import until

from shoal.agent.faults import CannotStart
from shoal.agent.keeping import contents
from shoal.api.problems import answer_to
from shoal.control.kept_files import KeptFiles
from shoal.control.logs import LogStore
from shoal.machine import paths
from shoal.machine.paths import MOUNTS, Hangs, ask, asked, entering
from shoal.model.job import Fault, MemberRef
from shoal.model.kept import FileWanted, Kind
from shoal.model.report import LogChunk

REF = MemberRef("j1", 1, 0)


@pytest.fixture
def mount() -> Iterator[Fuse]:
    with fuse() as made:
        MOUNTS.read()
        yield made
    MOUNTS.read()


def test_what_only_this_kernel_answers_for_is_asked_directly(tmp_path: Path) -> None:
    MOUNTS.read()
    here = ask((str(tmp_path),), threading.get_ident)
    assert here == threading.get_ident()
    assert entering(str(tmp_path), ["true"]) == (str(tmp_path), ["true"])


@pytest.mark.parametrize(
    ("line", "point"),
    [
        ("36 29 0:44 / /mnt/a\\040b rw - nfs4 host:/x rw", "/mnt/a b"),
        ("36 29 0:44 / /mnt/f rw shared:1 - fuse.mfs mfs#host:9421 rw", "/mnt/f"),
        ("36 29 0:44 / /mnt/l rw - lustre 10.0.0.1@tcp:/fs rw", "/mnt/l"),
        ("36 29 8:17 / /mnt/n rw - fuseblk /dev/sdb1 rw", "/mnt/n"),
        ("36 29 0:44 / /tmp rw - tmpfs tmpfs rw", ""),
        ("36 29 0:44 / /home rw - btrfs /dev/sda2 rw", ""),
        ("29 1 254:0 / /data rw - ext4 /dev/vda rw", ""),
        ("half a line", ""),
    ],
)
def test_mounts_that_may_hang_are_known_from_the_kernels_table(line: str, point: str) -> None:
    assert paths._point(line) == point


def test_a_mount_that_hangs_is_refused_by_name_at_once_and_threads_do_not_pile_up(
    mount: Fuse, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(mount.path)
    assert ask((str(link / "x"),), os.path.isdir, str(link))
    logs = LogStore(mount.path / "logs")
    assert logs.append(LogChunk(REF, 0, b"one\n")) == 4
    mount.stop()
    threads = threading.active_count()
    with pytest.raises(Hangs, match=str(mount.path)):
        ask((f"{tmp_path}/../{tmp_path.name}/link",), os.statvfs, str(link))
    began = time.thread_time()
    for _ in range(100):
        with pytest.raises(Hangs):
            logs.append(LogChunk(REF, 4, b"two\n"))
        assert logs.kept(REF) == 0
    assert threading.active_count() <= threads + 1, time.thread_time() - began
    held = MOUNTS.under([str(link)])[str(link)]
    assert {str(link / "x"), str(link)} <= held.names.keys()
    assert entering(str(link), ["true"])[0] == "/", "whoever starts it does not wait"
    mount.go_on()
    until(lambda: held.silent_s == pytest.approx(0, abs=0.1), "it answers")
    assert logs.append(LogChunk(REF, 4, b"two\n")) == 8


def test_long_work_beside_the_loop_waits_for_the_mount_and_no_other_work_does(mount: Fuse) -> None:
    async def both() -> list[str]:
        mount.stop()
        slow = [
            asyncio.create_task(asked(str(mount.path), os.statvfs, mount.path)) for _ in "1234567"
        ]
        await asyncio.sleep(0)
        seen = await asked("/", os.listdir, "/")
        assert not any(task.done() for task in slow)
        mount.go_on()
        await asyncio.gather(*slow)
        return seen

    assert "proc" in asyncio.run(both())


def test_a_mount_whose_daemon_is_gone_counts_as_one_that_does_not_answer(
    mount: Fuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does answer, with an error: whoever looked for a folder would find none."""
    folder = mount.path / "data"
    folder.mkdir()
    monkeypatch.setattr(paths, "HANGS_S", 0.1)
    MOUNTS.read()
    mount.kill()
    with pytest.raises(Hangs, match=rf"{mount.path} does not answer since .*: .*not connected"):
        ask((str(folder),), _must_be, str(folder))
    with pytest.raises(Hangs):
        ask((str(folder),), os.stat, folder)
    until(lambda: [one.point for one in MOUNTS.hanging()] == [str(mount.path)], "it is not named")
    mount.unmount()
    mount.mount()
    MOUNTS.read()
    assert ask((str(folder),), _must_be, str(folder))
    until(lambda: not MOUNTS.hanging(), "it answers")


def _must_be(folder: str) -> bool:
    if not os.path.isdir(folder):
        raise CannotStart(f"{folder} is not a folder on this node", Fault.MISSING)
    return True


def test_a_new_mount_at_the_same_place_is_not_taken_for_the_one_that_hangs(mount: Fuse) -> None:
    """The kernel may say of both changes at once."""
    mount.stop()
    with pytest.raises(Hangs):
        ask((str(mount.path),), os.listdir, mount.path)
    mount.unmount()
    mount.kill()
    mount.mount()
    MOUNTS.read()
    assert ask((str(mount.path),), os.listdir, mount.path) == []


def test_files_of_a_folder_whose_disk_fails_were_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies stay."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "model.pt").touch()

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(contents, "_open", fails)
    with pytest.raises(OSError, match="Input/output error"):
        contents.scan(tmp_path)


def test_a_request_about_a_mount_that_hangs_is_refused_with_its_name_and_may_come_again() -> None:
    refused = answer_to(Hangs("/mnt/shoal", time.monotonic()), "GET /v1/jobs/j1/logs")
    assert (refused.status, refused.retry_s) == (503, 1)
    assert refused.problem.message.startswith("/mnt/shoal does not answer since ")


def test_work_beside_the_loop_is_refused_while_the_mount_hangs_and_asks_for_more_in_its_thread(
    mount: Fuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "HANGS_S", 0.1)
    store = KeptFiles(mount.path / "outputs")
    MOUNTS.read()
    held = MOUNTS.of(str(mount.path))
    assert held is not None
    wanted = FileWanted(REF, Kind.CHECKPOINT)
    assert asyncio.run(held.beside(lambda: store.sent(wanted))).files == ()
    mount.stop()
    for _ in range(2 * paths.WORKERS_MAX):
        with pytest.raises(Hangs, match=str(mount.path)):
            asyncio.run(held.beside(lambda: store.listing("j1")))
    with pytest.raises(Hangs):
        store.index("j1")
    mount.go_on()
    until(lambda: held.silent_s < paths.HANGS_S, "it answers")
    assert store.index("j1").attempt == 0
