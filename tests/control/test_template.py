"""A template: others see its forks as if they had been executed, and they are where it differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A template that starts `python -m seen` once, after BETWEEN.
PROGRAM = """
import os, signal, sys
from shoal.machine.template import Becoming, Template

def main():
    template = Template()
    template.load(["helped"])
    BETWEEN
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    secret = os.open("/dev/null", os.O_RDONLY)
    kept = os.open("/dev/null", os.O_RDONLY)
    words = [sys.executable, "-m", "seen", "one", "two words"]
    env = {"PYTHONPATH": os.environ["PYTHONPATH"], "MARK": "here"}
    pid = template.start(words, env, [kept])
    print(secret, kept, pid, flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

try:
    code = main()
except Becoming as fork:
    born = fork.with_traceback(None)
else:
    sys.exit(code)
sys.exit(born.run())
"""
SEEN = """
import json, os, signal, sys
print(json.dumps({
    "pid": os.getpid(), "session": os.getsid(0), "argv": sys.argv[1:], "name": __name__,
    "line": open("/proc/self/cmdline").read().split(chr(0))[:-1],
    "environ": open("/proc/self/environ").read().split(chr(0))[:-1], "mark": os.environ["MARK"],
    "shell": "HOME" in os.environ, "loaded": "helped" in sys.modules,
    "files": [n for n in range(3, 50) if os.path.exists(f"/proc/self/fd/{n}")],
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}), flush=True)
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "helped.py").write_text("")
    return tmp_path


def was_loaded(folder: Path, between: str = "pass") -> bool:
    """Did the process begin with what its template had loaded? All else is as after an exec."""
    env = {**os.environ, "PYTHONPATH": str(folder), "HOME": "/"}
    words = [sys.executable, "-c", PROGRAM.replace("BETWEEN", between)]
    run = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 7, "the exit code is the process's own"
    of_template, of_process = sorted(run.stdout.splitlines(), key=lambda line: line[0] == "{")
    secret, kept, pid = map(int, of_template.split())
    process: dict[str, Any] = json.loads(of_process)
    assert process["pid"] == process["session"] == pid
    assert process["argv"] == ["one", "two words"]
    assert process["name"] == "__main__"
    assert process["line"] == [sys.executable, "-m", "seen", "one", "two words"]
    assert process["environ"] == [f"PYTHONPATH={folder}", "MARK=here"]
    assert (process["mark"], process["shell"]) == ("here", False)
    assert (process["term"], process["int"], process["blocked"]) == (True, True, 0)
    assert process["files"] == [kept] != [secret]
    return bool(process["loaded"])


def test_a_fork_is_seen_as_if_it_had_been_executed(folder: Path) -> None:
    assert was_loaded(folder)


@pytest.mark.parametrize(
    "between",
    [
        "open(sys.modules['helped'].__file__, 'a').write('changed = True')",
        "os.unlink(sys.modules['helped'].__file__)",
        "template = Template(); template.load(['helped', 'missing_module'])",
        "import threading; threading.Thread(target=signal.pause, daemon=True).start(); "
        "template = Template(); template.load(['helped'])",
        "import shoal.machine.template as own; own.PR_SET_MM = 0",
    ],
    ids=["changed code", "removed code", "code that cannot load", "a thread", "the kernel refuses"],
)
def test_a_fork_that_would_not_be_the_same_executes(folder: Path, between: str) -> None:
    assert not was_loaded(folder, between)
