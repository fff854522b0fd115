"""Gangs that sleep, with real processes of an ordinary user, while what runs them is killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from tests.live.cluster import Live
from tests.needs import need_program, need_root

USER, OTHER = 65_534, 64_321
UP = """
import sys
from pathlib import Path
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up
from shoal.model.node import NodeSpec
nodes = tuple(
    NodeSpec(id=f"n{number}", gpus=1, cpu_milli=16_000, memory_mb=4_000) for number in (1, 2)
)
bring_up(Home(Path(sys.argv[1])), ClusterConfig(nodes=nodes, port=0), lambda _: None)
"""
# Until it is let go, each line is the hash of the one before.
CHAIN = """
last=begin
until [ -e {go} ]; do
    last=$(printf %s $last | setsid --wait sha256sum | cut -c1-64)
    echo $last
    sleep 0.05
done
"""


@contextmanager
def cluster() -> Iterator[Live]:
    """Two nodes with one GPU each, of a user who may not do much."""
    need_program("setpriv")
    path = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    os.chown(path, USER, USER)
    words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    # Python may be in root's home.
    words += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    home = Home(path)
    try:
        env = {**os.environ, "HOME": str(path)}
        subprocess.run(
            [*words, sys.executable, "-c", UP, str(path)], env=env, check=True, timeout=120
        )
        live = Live(home)
        try:
            yield live
        finally:
            live.client.close()
        take_down(home, lambda _: None)
        until(lambda: not live.processes(), "processes were left behind")
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def right(text: str) -> bool:
    """Is it what a chain writes that nobody disturbs?"""
    last = b"begin"
    for line in text.splitlines():
        last = hashlib.sha256(last).hexdigest().encode()
        if line.encode() != last:
            return False
    return True


def grows(live: Live, job: str, attempt: int = 0) -> None:
    def sizes() -> list[int]:
        return [len(live.output(job, member, attempt)) for member in (0, 1)]

    before = sizes()
    until(lambda: all(now > then for now, then in zip(sizes(), before, strict=True)))
    for member in (0, 1):
        whole = live.output(job, member, attempt).rpartition("\n")[0]
        assert whole and right(whole)


def test_a_gang_sleeps_as_a_whole_or_not_at_all_whatever_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_root()
    monkeypatch.setattr(os, "geteuid", lambda: USER)  # a client trusts only its own user's files
    with cluster() as live:
        folder = live.home.path.parent / f"{live.home.path.name}-foreign"
        folder.mkdir()
        try:
            story(live, folder)
        finally:
            shutil.rmtree(folder)


def story(live: Live, folder: Path) -> None:
    go, foreign = folder / "go", folder / "foreign"
    job = live.run(CHAIN.format(go=go), members=2, gpus=1)
    assert live.wait(job, "running") == "running"
    grows(live, job)

    # The controller is killed while it falls asleep, and while it wakes.
    live.client.sleep(job)
    live.kill_controller()
    assert live.wait(job, "asleep") == "asleep"
    live.client.wake(job)
    live.kill_controller()
    assert live.wait(job, "running") == "running"
    grows(live, job)
    assert live.client.job(job).attempt == 1

    # The agent is killed while a member sleeps there: it runs again, and no retry is used up.
    live.client.sleep(job)
    assert live.wait(job, "asleep") == "asleep"
    live.kill_agent("n1")
    until(lambda: live.client.job(job).attempt == 2)
    assert live.wait(job, "running") == "running"
    grows(live, job, attempt=2)
    go.touch()
    assert live.wait(job) == "succeeded"
    for member in (0, 1):
        assert right(live.output(job, member, attempt=2))

    # One member has a process that its node may not stop, so neither sleeps.
    go.unlink()
    shutil.copy(shutil.which("setpriv") or "setpriv", foreign)
    folder.chmod(0o755)
    foreign.chmod(0o4755)
    pid = folder / "pid"
    pid.touch(0o666)
    pid.chmod(0o666)
    begin = f'[ "$SHOAL_MEMBER" = 0 ] || {{ {foreign} --reuid={OTHER} --clear-groups sleep 600 & '
    begin += f"echo $! >{pid}; }}\n"
    job = live.run(begin + CHAIN.format(go=go), members=2, gpus=1)
    until(lambda: pid.read_text().endswith("\n"))
    other = int(pid.read_text())
    until(lambda: os.stat(f"/proc/{other}").st_uid == OTHER)
    assert live.wait(job, "running") == "running", "its first member may be late"
    live.client.sleep(job)
    until(lambda: "belongs to another user" in live.client.job(job).why)
    assert live.wait(job, "running") == "running"
    grows(live, job)
    os.kill(other, signal.SIGKILL)
    go.touch()
    assert live.wait(job) == "succeeded", live.client.job(job).why
    assert live.client.job(job).attempt == 1
