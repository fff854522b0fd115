"""A real Ray cluster for tests: `shoal up --engine ray` in a home of its own, and nothing left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from tests.live.cluster import Live, all_pids, eventually

TIMEOUT_S = 120


def shoal(
    home: Path, *args: str, namespace: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """The command line as a process, on a host of its own if a network namespace is named."""
    enter = ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []
    return subprocess.run(
        [*enter, sys.executable, "-m", "shoal.main", *args],
        env={**os.environ, "SHOAL_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def ray_cluster(*flags: str) -> Iterator[Live]:
    path = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))
    home = Home(path)
    try:
        up = shoal(path, "up", "--engine", "ray", "--port", "0", *flags)
        assert up.returncode == 0, up.stderr
        live = Live(home)
        try:
            yield live
        finally:
            live.client.close()
        take_down(home, lambda _: None)
        assert eventually(lambda: not live.processes()), "processes were left behind"
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def second_home() -> Iterator[Path]:
    """Of another machine, or as if it were."""
    path = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))
    try:
        yield path
    finally:
        take_down(Home(path), lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def reach(live: Live) -> str:
    """Where others join."""
    config = live.home.read_config()
    assert config is not None
    return config.reach


def kill_ray(home: Path, program: str) -> int:
    """SIGKILL this home's `gcs_server` or `raylet`; returns how many there were."""
    killed = 0
    for pid in all_pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            ours = any(os.fsencode(home) in word for word in words)
            if ours and words[0].endswith(b"/" + program.encode()):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed
