"""What processes ask the kernel for: system calls, counted in the log of a real `strace`.

Counts do not depend on how busy the machine is, apart from what is left out here: waits (a thread
that is woken more often waits more often), and `getpid`, with which asyncio of Python 3.11 asks
each time whether it was forked.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from harness.waiting import WAIT_S, until

STRACE = ("strace", "-f", "-qq", "-y", "-s", "0", "-ttt", "-e", "signal=none")
NOT_COUNTED = frozenset({"getpid", "futex", "restart_syscall", "sched_yield"})
NAMES_SHOWN = 12
END_S = 20.0
WAKEUP_BYTES = 8  # a send of so few wakes a thread or a loop of one's own

_BEGUN = re.compile(r"(\d+) +(\d+\.\d+) (\w+)\((.*)")
_RESUMED = re.compile(r"(\d+) +\d+\.\d+ <\.\.\. \w+ resumed>(.*)")
_RESULT = re.compile(r"\) += (-?\d+)")
_FILE = re.compile(r"\d+<(/[^>]*)>")
_NAMED = re.compile(r'[^"]*"([^"]*)"')
_FLUSHES = frozenset({"fsync", "fdatasync", "sync_file_range", "syncfs", "sync"})
_WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "pwritev2"})
_SENDS = frozenset({"write", "writev", "sendto", "sendmsg", "sendmmsg"})
_OPENS = frozenset({"open", "openat"})


class Call(NamedTuple):
    """`task`: the thread. `result` is -1 if the call failed, or has not ended."""

    at_s: float
    task: int
    name: str
    arguments: str
    result: int


class Counts(NamedTuple):
    """Of some calls. `messages`: sends to another process. `modules`: Python files that were read.
    `handovers`: calls with which threads wait for each other."""

    calls: float
    execs: float
    flushes: float
    file_bytes: float
    messages: float
    modules: float
    handovers: float

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Counts:
        counted = execs = flushes = file_bytes = messages = handovers = 0
        modules = set()
        for call in calls:
            name, result = call.name, call.result
            counted += name not in NOT_COUNTED
            handovers += name == "futex"
            flushes += name in _FLUSHES
            if name in ("execve", "execveat"):
                execs += result == 0
            elif name in _OPENS and result >= 0:
                if (module := _module(call.arguments)) is not None:
                    modules.add((call.task, module))
            elif name in _WRITES and _FILE.match(call.arguments):
                file_bytes += max(0, result)
            elif name in _SENDS and "<socket:" in call.arguments[:24]:
                messages += result > WAKEUP_BYTES
        return cls(counted, execs, flushes, file_bytes, messages, len(modules), handovers)


def _module(arguments: str) -> str | None:
    """A module that has no bytecode yet is opened as both, and counted once."""
    named = _NAMED.match(arguments)
    if named is None or not named[1].endswith((".py", ".pyc")):
        return None
    folder, _, file = named[1].rpartition("/")
    return f"{folder.removesuffix('/__pycache__')}/{file.split('.')[0]}"


def by_name(calls: Iterable[Call], jobs: int = 1) -> str:
    """The most frequent ones per job, for the message of a test that failed."""
    counted = Counter(call.name for call in calls).most_common(NAMES_SHOWN)
    return ", ".join(f"{name} {count / jobs:.4g}" for name, count in counted)


class Trace:
    """A command and all processes that it starts, also those that outlive it."""

    def __init__(self, argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        log.unlink(missing_ok=True)  # of a command before it
        self.log = log
        self.argv = argv
        self.tracer = subprocess.Popen(
            [*STRACE, "-o", str(log), *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    @cached_property
    def command(self) -> int:
        """The process of the command itself, which makes the first call."""
        until(lambda: self.log.exists() and self.log.stat().st_size, f"a call of {self.argv}")
        with self.log.open() as lines:
            return int(lines.readline().split()[0])

    def wait_for_command(self) -> None:
        """Until it has ended; what it has started may live on."""
        until(lambda: not Path(f"/proc/{self.command}").exists(), f"the end of {self.argv}")

    def wait_for_all(self) -> None:
        self.tracer.wait(WAIT_S)

    def close(self) -> None:
        """What is still alive then goes on without a tracer."""
        try:
            self.tracer.wait(END_S)
        except subprocess.TimeoutExpired:
            self.tracer.kill()
            self.tracer.wait()

    def size(self) -> int:
        """Of the log by now: a place for `calls`."""
        return self.log.stat().st_size

    def calls(self, begin: int = 0, end: int | None = None) -> list[Call]:
        """Those between two places."""
        with self.log.open("rb") as log:
            log.seek(begin)
            text = log.read() if end is None else log.read(end - begin)
        return list(parse(text.decode(errors="replace").splitlines()))


def parse(lines: Iterable[str]) -> Iterator[Call]:
    """In the order in which they began, as far as another thread's calls do not come between."""
    pending: dict[int, Call] = {}
    for line in lines:
        if begun := _BEGUN.match(line):
            call = Call(float(begun[2]), int(begun[1]), begun[3], begun[4], -1)
            if line.endswith("<unfinished ...>"):
                pending[call.task] = call
            else:
                yield _ended(call, call.arguments)
        elif (resumed := _RESUMED.match(line)) and int(resumed[1]) in pending:
            yield _ended(pending.pop(int(resumed[1])), resumed[2])
    yield from pending.values()


def _ended(call: Call, end: str) -> Call:
    found = _RESULT.search(end, max(0, end.rfind(")")))
    return call._replace(result=int(found[1])) if found else call


def traced_by(tracer: int) -> dict[int, list[int]]:
    """The living processes under a tracer, each with its threads."""
    living = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "status").read_text()
            if f"\nTracerPid:\t{tracer}\n" in status:
                living[int(folder.name)] = [int(task.name) for task in (folder / "task").iterdir()]
        except OSError:
            continue  # it has ended meanwhile
    return living
