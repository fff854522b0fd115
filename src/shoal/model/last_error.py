"""Finds in a program's output why it failed, behind what launchers print about their processes.

torchrun, accelerate, DeepSpeed, mpirun and srun start processes, and when one fails they print a
summary of their own. Without it, the last error of the process that failed first is the reason.
"""

from __future__ import annotations

import re
from typing import NamedTuple

RULE = " \t\r-=_*"  # a line of these alone says nothing
TRACEBACK = "Traceback (most recent call last):"
# A line may begin with who wrote it: torch's [rank1]: , mpirun's [1,1]<stderr>: and srun's 1: .
WRITER = re.compile(r"(?:\[rank(\d+)\]: ?|\[\d+,(\d+)\]<std\w+>: ?)")
# What launchers log on their own, and how their tracebacks end.
LOGGED = re.compile(
    r"[IWE]\d{4} [\d:.]+ .*torch/distributed/elastic/"
    r"|\[[^]]*\] \[(INFO|ERROR|WARNING)\] \[launch\.py:\d+:"
    r"|srun: (error|Job step|Terminating)|slurmstepd: "
    r"|(See|Run) 'docker run --help'"
    r"|time=\"[^\"]*\" level=\w+ msg=\"error waiting for container: context canceled"
)
RAISED = re.compile(
    r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError"
    r"|subprocess\.CalledProcessError: Command '\["
)
MPI_BOX = re.compile(
    r"(mpirun|prterun|mpiexec|orterun) (detected|noticed|has exited)|Primary job +terminated"
    r"|MPI_ABORT was invoked"
)
ROOT_CAUSE = "Root Cause (first observed failure):"
UNKNOWN_CAUSE = "To enable traceback see"
# Errors of processes whose peer has ended.
CONSEQUENCE = re.compile(
    r"(connection (closed|reset) by (remote )?peer|broken pipe|remote process (exited|has exited)"
    r"|ncclRemoteError|SignalException|DistNetworkError|RendezvousClosed|RendezvousConnectionError"
    r"|collective operation timeout|socket timeout|failed to recv)",
    re.IGNORECASE,
)


class Error(NamedTuple):
    """The line with which a traceback ends, and the rank that printed it, if it is known."""

    rank: str
    line: str


def last_error(text: str) -> str:
    """The line that says best why the program failed; empty if it printed nothing."""
    lines = _lines(text)
    own, root = _without_summaries(lines)
    last = next((line for line in reversed(own) if line.strip(RULE)), "")
    summed_up = len(own) < len(lines)
    if not summed_up and not CONSEQUENCE.search(last):
        return last.strip()
    errors = [one for one in _errors(own) if not CONSEQUENCE.search(one.line)]
    first = [one for one in errors if root and one.rank == root.rank]
    if root and root.line:
        return _named(root)
    if errors:
        return _named((first or errors)[-1])
    if last:
        return last.strip()
    return next((line.strip() for line in reversed(lines) if line.strip(RULE)), "")


def own_lines(text: str) -> list[str]:
    """What is not empty, without launchers' summaries, if that leaves anything."""
    lines = _lines(text)
    own = [line for line in _without_summaries(lines)[0] if line.strip()]
    return own or [line for line in lines if line.strip()]


def _lines(text: str) -> list[str]:
    # A progress bar overwrites itself: only its last state counts.
    return [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]


def _without_summaries(lines: list[str]) -> tuple[list[str], Error | None]:
    """And what torchrun calls the root cause."""
    own: list[str] = []
    root: Error | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.strip() == TRACEBACK:
            end = _end_of_traceback(lines, at)
            if RAISED.match(lines[end - 1]):
                if "ChildFailedError" in lines[end - 1]:
                    end, root = _summary(lines, end)
                at = end
                continue
        elif LOGGED.match(line):
            at = end
            continue
        elif line and not line.strip("-"):
            box = next((n for n in range(end, len(lines)) if _is_rule(lines[n])), len(lines))
            if any(MPI_BOX.search(one) for one in lines[end:box]):
                at = box + 1
                continue
        own += lines[at:end]
        at = end
    return own, root


def _is_rule(line: str) -> bool:
    return len(line) > 20 and not line.strip("-")


def _end_of_traceback(lines: list[str], begin: int) -> int:
    """Behind its last line, which is the first one that is not indented."""
    for at in range(begin + 1, len(lines)):
        if lines[at] and not lines[at].startswith(" "):
            return at + 1
    return len(lines)


def _summary(lines: list[str], begin: int) -> tuple[int, Error | None]:
    """torchrun's table of failures: where it ends, and its root cause."""
    ends = [n for n in range(begin, len(lines)) if lines[n] and not lines[n].strip("=")]
    end = ends[1] if len(ends) > 1 else len(lines) - 1
    rows = lines[begin:end]
    if ROOT_CAUSE in rows:
        rows = rows[rows.index(ROOT_CAUSE) :]
    rank, said = "", ""
    for number, row in enumerate(rows):
        name, _, value = row.strip().partition(" ")
        if name == "rank":
            rank = value.strip(" :").partition(" ")[0]
        elif name == "traceback":
            said = next((one for one in reversed(rows[number:]) if one.strip(RULE)), "")
            break
    said = said.strip().removeprefix("traceback : ")
    return end + 1, Error(rank, "" if said.startswith(UNKNOWN_CAUSE) else said)


def _errors(lines: list[str]) -> list[Error]:
    """The last lines of all tracebacks, in order. Those of several processes may be mixed."""
    found: list[Error] = []
    inside: set[str] = set()
    for line in lines:
        writer = WRITER.match(line)
        rank = (writer[1] or writer[2] or "") if writer else ""
        said = line[writer.end() :] if writer else line
        if said.strip() == TRACEBACK:
            inside.add(rank)
        elif rank in inside and said and not said.startswith(" "):
            inside.discard(rank)
            found.append(Error(rank, said))
    return found


def _named(error: Error) -> str:
    return f"{error.line.strip()} (rank {error.rank})" if error.rank else error.line.strip()
