"""Saves the stacks of a member's processes before it is stopped."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

from shoal.agent.inherited import inherited_env

DUMP_S_MAX = 5.0
DUMP_BYTES_MAX = 16 * 1024
PROCESSES_MAX = 8
WHY_FRAMES_MAX = 8
WHY_LETTERS_MAX = 800
INSTALL = "for stacks of Python, install py-spy on this node: pip install py-spy"
FRAME = re.compile(r"^ {4}(\S.*) \((.+:\d+)\)$", re.MULTILINE)


def stacks(leader: int, mark: dict[str, str]) -> tuple[str, str]:
    """The text for the member's output, and one line for the reason of its end. Takes at most
    DUMP_S_MAX and DUMP_BYTES_MAX, whatever state the processes are in. `mark` goes into py-spy's
    environment, so that it is known to belong to the member."""
    deadline = time.monotonic() + DUMP_S_MAX
    program = find_py_spy()
    parts: list[str] = []
    for pid in family(leader)[:PROCESSES_MAX]:
        text = _py_spy(program, pid, mark, deadline) if program else ""
        parts.append(text or from_proc(pid))
    if not program:
        parts.append(INSTALL)
    whole = "\n".join(part.rstrip() for part in parts)
    return whole.encode()[:DUMP_BYTES_MAX].decode(errors="ignore"), in_one_line(parts)


def find_py_spy() -> str | None:
    """py-spy, from the PATH or beside the Python that runs the agent."""
    found = shutil.which("py-spy")
    if found is None:
        beside = os.path.join(sysconfig.get_path("scripts"), "py-spy")
        found = beside if os.access(beside, os.X_OK) else None
    return found


def family(leader: int) -> list[int]:
    """The process and its descendants, itself first."""
    found = [leader]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.extend(map(int, children.read_text().split()))
        if len(found) > 10 * PROCESSES_MAX:
            break
    return found


def from_proc(pid: int) -> str:
    """What the kernel shows of each thread: its state, and where it waits."""
    lines = [f"Process {pid}: {_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ').strip()}"]
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:64]
    except OSError:
        return f"Process {pid} is gone"
    for thread in threads:
        base = f"/proc/{pid}/task/{thread}"
        state = _read(f"{base}/stat").rpartition(")")[2].split()[:1]
        lines.append(f"Thread {thread} ({_read(f'{base}/comm').strip()}), state {''.join(state)}")
        stack = _read(f"{base}/stack") or _read(f"{base}/wchan")
        lines.extend(f"    {line.strip()}" for line in stack.splitlines()[:12])
    return "\n".join(lines)


def in_one_line(parts: list[str]) -> str:
    """The Python frames of the first process that has any, innermost first: those of its main
    thread, which has a name only where threads are in use, and else the id of the process."""
    for part in parts:
        threads = part.split("\nThread ")
        pid = threads[0].removeprefix("Process ").partition(":")[0]
        threads = [thread for thread in threads if _frames(thread)]
        threads.sort(key=lambda thread: not ('"MainThread"' in thread or thread.startswith(pid)))
        if threads:
            frames = " < ".join(_frames(threads[0])[:WHY_FRAMES_MAX])
            return f"was in {frames}"[:WHY_LETTERS_MAX]
    state = re.search(r", state (\S)", "\n".join(parts))
    return f"no Python stack could be read; process state {state[1]}" if state else ""


def _frames(thread: str) -> list[str]:
    return [f"{name} ({place})" for name, place in FRAME.findall(thread)]


def _py_spy(program: str, pid: int, mark: dict[str, str], deadline: float) -> str:
    """Read without stopping the process, because stopping one that is stopped already would wait
    forever. A running process may be misread, so there is a second try."""
    for _ in range(2):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(
                [program, "dump", "--nonblocking", "--pid", str(pid)],
                env={**inherited_env(), **mark},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=left_s,
                check=False,
            ).stdout.decode(errors="replace")
            if "Thread" in text:
                return text
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""
