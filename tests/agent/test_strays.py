"""Processes that a member leaves behind go with it, and with nobody else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from shoal.agent.ownership import processes
from shoal.model.job import MemberRef
from tests.agent.rig import Rig, rig

FIRST, SECOND = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)

# It forks twice, makes a session of its own and clears its environment, as daemons do.
DAEMON = """
import os, signal, sys
path, stays = sys.argv[1:]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()))"
        code += "; time.sleep(600)"
        os.execve(sys.executable, [sys.executable, "-c", code, path + ".part"], {})
    os._exit(0)
os.wait()
while not os.path.exists(path + ".part") or not open(path + ".part").read():
    pass
os.rename(path + ".part", path)
print("daemon is up", flush=True)
if stays == "stays":
    signal.pause()
"""


def daemon(node: Rig, ref: MemberRef, *, stays: bool) -> int:
    path = node.directory / f"pid-{ref.job}"
    node.launch(ref, sys.executable, "-c", DAEMON, str(path), "stays" if stays else "goes")
    assert node.says(ref, "daemon is up")
    return int(path.read_text())


def lives(pid: int) -> bool:
    try:
        return "SHOAL" not in Path(f"/proc/{pid}/environ").read_text() and state(pid) != "Z"
    except OSError:
        return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_living_members_daemon_outlives_another_job_and_not_its_own() -> None:
    with rig() as node:
        pid = daemon(node, FIRST, stays=True)
        node.wait(lambda: processes()[pid].parent == agent(node))
        for number in range(2, 5):
            other = MemberRef(f"j{number}", 1, 0)
            node.launch(other, "/bin/true")
            assert node.exit(other).code == 0
        assert lives(pid), "it belongs to one that lives"
        node.stop(FIRST)
        node.exit(FIRST)
        node.wait(lambda: not lives(pid))


def test_a_daemon_goes_with_its_member_while_others_live() -> None:
    with rig() as node:
        node.launch(SECOND, sys.executable, "-c", "import time; print('up'); time.sleep(600)")
        assert node.says(SECOND, "up")
        pid = daemon(node, FIRST, stays=False)
        assert node.exit(FIRST).code == 0
        node.wait(lambda: not lives(pid))
        assert node.ask().alive == (SECOND,)


def agent(node: Rig) -> int:
    return int(msgspec.json.decode((node.directory / "agent.json").read_bytes())["pid"])


def test_a_process_is_known_by_its_id_and_its_start() -> None:
    seen = processes()[os.getpid()]
    assert seen.parent == os.getppid() and seen.session == os.getsid(0) and seen.started > 0
