"""An ordinary user's podman runs images as well: without root, and without a daemon."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.agent.images.runtimes import CONTAINERS
from shoal.model.job import MemberRef
from tests.agent.rig import Rig, rig_of
from tests.needs import need_program, need_root
from tests.podman import root_file_system

USER = 65_534
IMAGE = "localhost/busybox:test"


@pytest.fixture(scope="module")
def node() -> Iterator[Rig]:
    need_root()
    for program in ("podman", "runc", "busybox", "setpriv"):
        need_program(program)
    folder = Path(tempfile.mkdtemp(prefix="shoal-user-", dir="/dev/shm"))
    folder.chmod(0o755)
    try:
        (folder / "root.tar").write_bytes(root_file_system(folder / "root"))
        for name in ("home", "run", "nodes"):
            (folder / name).mkdir()
            os.chown(folder / name, USER, USER)
        command = [
            *("podman", "--runtime", shutil.which("runc") or "runc"),
            *("--cgroup-manager", "cgroupfs", "--storage-driver", "vfs"),
            *("--root", f"{folder}/home/store", "--runroot", f"{folder}/run/r"),
            *("--tmpdir", f"{folder}/run/t"),
        ]
        env = {
            CONTAINERS: shlex.join(command),
            "HOME": f"{folder}/home",
            "XDG_RUNTIME_DIR": f"{folder}/run",
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder / "nodes"))
            with rig_of(USER, env) as made:
                ref = MemberRef("j0", 1, 0)
                made.launch(ref, *command, "import", f"{folder}/root.tar", IMAGE, env=env)
                assert made.exit(ref).code == 0, made.text(ref)
                yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_it_is_the_user_outside_and_root_inside(node: Rig) -> None:
    ref = MemberRef("j1", 1, 0)
    node.launch(ref, "sh", "-c", "id; touch $SHOAL_CHECKPOINT_DIR/x; exit 3", image=IMAGE)
    assert node.exit(ref).code == 3, node.text(ref)
    assert "uid=0(root)" in node.text(ref)
    assert (node.directory / "kept" / "j1" / "x").stat().st_uid == USER


def test_it_is_stopped_and_killed_like_any_other(node: Rig) -> None:
    for number, (trap, code) in enumerate(
        (("", 128 + signal.SIGTERM), ("trap '' TERM;", 128 + signal.SIGKILL))
    ):
        ref = MemberRef("j2", 1 + number, 0)
        node.launch(ref, "sh", "-c", f"{trap} echo up; sleep 1000; sleep 1000", image=IMAGE)
        node.says(ref, "up")
        node.stop(ref, grace_ms=500)
        assert node.exit(ref).code == code, node.text(ref)
