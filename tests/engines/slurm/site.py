"""A Shoal cluster that an ordinary user attaches to a real Slurm, by the command line alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.slurm import Slurm
from harness.waiting import until

import shoal

NOBODY = 65534
PROBE = "import shoal, msgspec, uvicorn, uvloop"


class Site:
    """Its user is "nobody" if one of the interpreters here can be run by other users, and root if
    that is asked for."""

    def __init__(self, real: Slurm, root: Path, as_root: bool = False) -> None:
        self.real = real
        root.chmod(0o755)
        self.home = root / "user"
        self.home.mkdir()
        installed = (p for p in sys.path if "packages" in p or "entry-points" in p)
        paths = [str(Path(shoal.__file__).parent.parent), *installed]
        path = real.env["PATH"]
        self.env = {
            "PATH": path,
            "SLURM_CONF": real.env["SLURM_CONF"],
            "HOME": str(self.home),
            "SHOAL_HOME": str(self.home / "h"),
            "PYTHONPATH": os.pathsep.join(paths),
            "LANG": "C.UTF-8",
        }
        self.uid, self._python = (0, sys.executable) if as_root else self._found()
        os.chown(self.home, self.uid, self.uid)
        # What runs on the machines: Slurm's jobs get none of our variables.
        self.python = root / "python"
        self.python.write_text(
            f'#!/bin/sh\nPYTHONPATH={self.env["PYTHONPATH"]} exec {self._python} "$@"\n'
        )
        self.python.chmod(0o755)

    def _found(self) -> tuple[int, str]:
        """The virtual environment's own interpreter may be in a folder of root's."""
        for uid, python in ((NOBODY, sys.executable), (NOBODY, "/usr/bin/python3")):
            with contextlib.suppress(OSError):
                if self._call(uid, python, "-c", PROBE).returncode == 0:
                    return uid, python
        return 0, sys.executable

    def _call(self, uid: int, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env=self.env,
            cwd=self.home if uid == 0 or self.home.stat().st_uid == uid else "/",
            user=uid,
            group=uid,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )

    def shoal(self, *words: str, code: int = 0) -> str:
        done = self._call(self.uid, self._python, "-m", "shoal.main", *words)
        assert done.returncode == code, f"shoal {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *words: str) -> Any:
        done = self._call(self.uid, self._python, "-m", "shoal.main", *words, "--json")
        assert done.returncode == 0, f"shoal {' '.join(words)}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def supply(self, **words: object) -> None:
        """The policy's only supply; its nodes have two GPUs unless it says otherwise."""
        self.supplies(words)

    def supplies(self, *several: dict[str, object]) -> None:
        own = {"name": "pool", "engine": "slurm", "gpus": 2, "cpus": 2, "memory": "600M"}
        own |= {"most": 4, "idle": "2s", "python": str(self.python)}
        policy = self.home / "policy.json"
        supply = [{**own, **words} for words in several]
        policy.write_text(json.dumps({"base": "fair", "name": "elastic", "supply": supply}))
        self.shoal("policy", "set", str(policy))

    def run(self, script: str, *flags: str) -> str:
        return self.shoal("run", "-g", "2", *flags, "--", "sh", "-c", script).split()[0]

    def job(self, id_: str) -> dict[str, Any]:
        return next(job for job in self.json("ps", "-a") if job["id"] == id_)

    def until_job(self, id_: str, *states: str) -> dict[str, Any]:
        def there() -> bool:
            return self.job(id_)["state"] in states

        self.until(f"{id_} to be {' or '.join(states)}", there)
        return self.job(id_)

    def events(self) -> str:
        return self.shoal("events")

    def slurm_jobs(self) -> list[str]:
        """Those of this user that wait or run."""
        listed = self.real.run("squeue", "--noheader", f"--user={self.uid}", "--format=%A")
        return listed.split()

    def until(self, what: str, fact: Callable[[], bool]) -> None:
        until(fact, what, self._story, look_s=0.2)

    def _story(self) -> str:
        outputs = "".join(path.read_text() for path in (self.home / "h" / "slurm").glob("*.out"))
        return f"{self.events()}\n{self.shoal('supply')}\n{outputs}\n{self.real.run('squeue')}"


@contextmanager
def site(real: Slurm, as_root: bool = False) -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="shoal-site-"))
    made = Site(real, root, as_root)
    try:
        made.shoal("up", "--engine", "slurm", "--port", "0")
        yield made
    finally:
        with contextlib.suppress(AssertionError):
            made.shoal("down")
        real.clear()
        shutil.rmtree(root, ignore_errors=True)
