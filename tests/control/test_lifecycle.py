"""Ending a process whose file does not name it yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.waiting import until

from shoal.control.lifecycle import end_agent
from shoal.machine.files import AGENT_LOCK, held
from shoal.machine.kernel import AGENT_MARK

# Like an agent: it locks its folder first, and says who it is when it has started.
STARTS_SLOWLY = """
import json, os, pathlib, sys, time
from shoal.machine.files import AGENT_LOCK, lock
directory = pathlib.Path(sys.argv[1])
assert lock(directory / AGENT_LOCK) is not None
(directory / "locked").touch()
while not (directory / "go").exists():
    time.sleep(0.01)
(directory / "agent.json").write_text(json.dumps({"pid": os.getpid()}))
time.sleep(600)
"""


def test_an_agent_that_has_just_started_is_ended_and_nobody_else(tmp_path: Path) -> None:
    """Its file still names the agent before it, whose number is another program's by now."""
    stranger = subprocess.Popen(["sleep", "600"])
    (tmp_path / "agent.json").write_text(f'{{"pid": {stranger.pid}}}')
    words = [sys.executable, "-c", STARTS_SLOWLY, str(tmp_path)]
    agent = subprocess.Popen(words, env={**os.environ, AGENT_MARK: str(tmp_path)})
    began = [stranger, agent]
    try:
        until((tmp_path / "locked").exists, "it did not lock its folder")
        words = [sys.executable, "-c", END, str(tmp_path)]
        ending = subprocess.Popen(words)
        began.append(ending)
        until((tmp_path / "asked").exists, "nobody asked who it is")
        (tmp_path / "go").touch()
        assert ending.wait(60) == 0
        assert agent.wait(60) == -15
        assert stranger.poll() is None
        assert not held(tmp_path / AGENT_LOCK)
        end_agent(tmp_path)  # nobody is there: nothing is asked
    finally:
        for process in began:
            process.kill()
            process.wait()


END = """
import pathlib, sys
from shoal.control import lifecycle
asked = lifecycle._agent_pid
def pid(directory):
    found = asked(directory)
    if not found:
        (directory / "asked").touch()
    return found
lifecycle._agent_pid = pid
lifecycle.end_agent(pathlib.Path(sys.argv[1]))
"""
