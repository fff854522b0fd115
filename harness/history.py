"""What clients asked and heard, held against the log and against what the nodes launched.

Each client does one thing at a time and writes down when it began, when it ended and what it was
answered: `ok`, `fail` (refused, so it did not happen) or `unknown` (no answer, so it may have
happened). `check` then looks for each way in which a cluster could have broken its word:

- an acknowledged submission exists exactly once, one without an answer at most once, and a refused
  one never
- a cancelled job is not placed or launched afterwards
- no client reads something older than it has read or written before
- nothing that a client was shown is missing from the log or different there
- no member is launched twice, or without a placement in the log, and no GPU is held twice

It is pure: `harness/clients.py` records, and `harness/records.py` reads what the nodes wrote down.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from shoal.core.state.events.arrays import (
    ArrayCancelled,
    ArrayFinished,
    ArrayRetried,
    ArraySubmitted,
)
from shoal.core.state.events.log import Recorded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobAdopted,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
)
from shoal.model.job import Outcome, StopCause

OK, FAIL, UNKNOWN = "ok", "fail", "unknown"
# A node writes down a launch a moment after it, and a step has one time for all that it does.
SLACK_S = 0.05


class Seen(msgspec.Struct, frozen=True):
    """A job as an answer showed it."""

    job: str
    state: str
    attempt: int


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that one client did. `job` is what it was about, `made` the job that the answer
    names; `note` says that there was nothing to do. `listed`: all jobs of a list that was complete.
    `shown`: events by number and checksum."""

    client: int
    kind: str  # submit, cancel, requeue, retry, job, list, events
    began: float
    ended: float
    result: str
    key: str = ""
    job: str = ""
    made: str = ""
    note: str = ""
    seen: tuple[Seen, ...] = ()
    listed: tuple[str, ...] = ()
    shown: tuple[tuple[int, int], ...] = ()


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A member as its node has written it down. `ended` is None while it runs."""

    job: str
    attempt: int
    member: int
    node: str
    gpus: tuple[int, ...]
    began: float
    ended: float | None


def checksum(recorded: Recorded) -> int:
    return zlib.crc32(msgspec.json.encode(recorded.event))


def check(
    ops: Sequence[Op], log: Sequence[Recorded], launched: Iterable[Launched] = ()
) -> list[str]:
    """All that is wrong, in words; empty if every promise was kept. `log` is the whole log."""
    by_client: dict[int, list[Op]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.began, op.ended)):
        by_client[op.client].append(op)
    book = Book(log)
    found = [*_log_is_whole(log), *_submissions(ops, book), *_cancellations(ops, book)]
    found += _retries(ops, book)
    for client, own in by_client.items():
        found += _reads(client, own, book)
    members = list(launched)
    found += _launches(members, book)
    found += gpus_held_twice(members)
    return found


class Book:
    """The log, by key and by job."""

    def __init__(self, log: Sequence[Recorded]) -> None:
        self.sums = {one.seq: checksum(one) for one in log}
        self.by_key: dict[str, list[str]] = defaultdict(list)
        self.born: dict[str, int] = {}
        self.lives: dict[str, list[tuple[int, str, int]]] = defaultdict(list)  # seq, state, attempt
        self.placed: dict[tuple[str, int], int] = {}
        self.cancelled: dict[str, int] = {}  # the first event that says so
        self.ended: dict[str, tuple[int, float]] = {}
        self.retried: dict[str, list[int]] = defaultdict(list)
        self.found: list[str] = []
        for one in log:
            self._take(one)

    def _take(self, one: Recorded) -> None:
        seq, event = one.seq, one.event
        match event:
            case JobSubmitted() | ArraySubmitted():
                if event.key:
                    self.by_key[event.key].append(event.job)
                if event.job in self.born and not self.retried_since(event.job, 0, seq):
                    self.found.append(f"{event.job} is submitted twice in the log")
                self.born[event.job] = seq
                self.ended.pop(event.job, None)  # an element that was retried
                self._lives(seq, event.job, "waiting", 0)
            case JobPlaced():
                mark = self.cancelled.get(event.job)
                if mark is not None and not self.retried_since(event.job, mark, seq):
                    self.found.append(f"{event.job} was cancelled by {mark}, and placed by {seq}")
                self.placed[event.job, event.attempt] = seq
                self._lives(seq, event.job, "starting", event.attempt)
            case JobRunning() | JobAdopted():
                self._lives(seq, event.job, "running", event.attempt)
            case JobStopping():
                if event.cause is StopCause.CANCEL:
                    self.cancelled.setdefault(event.job, seq)
                self._lives(seq, event.job, "stopping", event.attempt)
            case JobRequeued():
                self._lives(seq, event.job, "waiting", event.attempt)
            case JobFinished() | ArrayFinished():
                if event.outcome is Outcome.CANCELLED:
                    self.cancelled.setdefault(event.job, seq)
                self.ended[event.job] = seq, event.at_ms / 1000
                attempt = event.attempt if isinstance(event, JobFinished) else 0
                self._lives(seq, event.job, event.outcome.value, attempt)
            case ArrayCancelled():
                self.cancelled.setdefault(event.job, seq)
            case ArrayRetried():
                self.retried[event.job].append(seq)
                self.ended.pop(event.job, None)
                self.cancelled.pop(event.job, None)
            case _:
                pass

    def _lives(self, seq: int, job: str, state: str, attempt: int) -> None:
        self.lives[job].append((seq, state, attempt))

    def retried_since(self, job: str, after: int, before: int) -> bool:
        """An element that is retried begins again under its name."""
        array = job.partition(".")[0]
        return any(after < seq < before for seq in self.retried.get(array, ()))

    def first_shown(self, seen: Seen, since: int) -> int | None:
        """The first moment from event `since` on at which the job was as it was shown."""
        life = self.lives.get(seen.job, [])
        at = max(0, bisect_right(life, since, key=lambda one: one[0]) - 1)
        for seq, state, attempt in life[at:]:
            if (state, attempt) == (seen.state, seen.attempt):
                return max(seq, since)
        return None


def _log_is_whole(log: Sequence[Recorded]) -> list[str]:
    gaps = [
        f"the log goes from event {one.seq} to {following.seq}"
        for one, following in pairwise(log)
        if following.seq != one.seq + 1
    ]
    return gaps[:10]


def _submissions(ops: Sequence[Op], book: Book) -> list[str]:
    """Of `submit`, and of `requeue` where that made a job."""
    found = list(book.found)
    asked: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        if op.key and (op.kind == "submit" or op.made):
            asked[op.key].append(op)
    for key, own in asked.items():
        jobs = book.by_key.get(key, [])
        acknowledged = {op.made for op in own if op.result == OK}
        if len(jobs) > 1:
            found.append(f"key {key} made {' and '.join(jobs)}")
        if len(acknowledged) > 1:
            found.append(f"key {key} was answered with {' and '.join(sorted(acknowledged))}")
        for job in acknowledged - set(jobs):
            found.append(f"{job} (key {key}) was acknowledged, and is not in the log")
        if jobs and all(op.result == FAIL for op in own):
            found.append(f"key {key} was refused, and made {jobs[0]}")
    return found


def _cancellations(ops: Sequence[Op], book: Book) -> list[str]:
    """An acknowledged cancellation is in the log, unless the job had ended before."""
    return [
        f"the cancellation of {op.job} was acknowledged, and is not in the log"
        for op in ops
        if op.kind == "cancel"
        and op.result == OK
        and op.job not in book.cancelled
        and op.job not in book.ended
        and not book.retried_since(op.job, 0, 1 << 62)
    ]


def _retries(ops: Sequence[Op], book: Book) -> list[str]:
    return [
        f"the retry of {op.job} was acknowledged, and is not in the log"
        for op in ops
        if op.kind == "retry"
        and op.result == OK
        and not op.note
        and not book.retried_since(op.job, 0, 1 << 62)
    ]


def _reads(client: int, own: Sequence[Op], book: Book) -> list[str]:
    """`newest` is the oldest state of the log that explains all that the client has read."""
    found, newest = [], 0
    known: set[str] = set()
    for op in own:
        if op.result == FAIL and op.kind == "job" and op.job in known:
            found.append(f"client {client} made {op.job}, and was told later that there is none")
        if op.result != OK:
            continue
        if op.made:
            known.add(op.made)
            newest = max(newest, book.born.get(op.made, 0))
        since = newest
        for seen in op.seen:
            shown = book.first_shown(seen, since)
            if shown is None:
                what = f"{seen.job} as {seen.state} in attempt {seen.attempt}"
                found.append(f"client {client} was shown {what}, after it had seen event {since}")
            else:
                newest = max(newest, shown)
        if op.listed:
            for job in sorted(known - set(op.listed)):
                found.append(f"client {client} made {job}, and did not find it in a list")
        for seq, sum_ in op.shown:
            if book.sums.get(seq) != sum_:
                words = "is another one" if seq in book.sums else "is missing"
                found.append(f"client {client} was shown event {seq}, which {words} in the log")
            newest = max(newest, seq)
    return found


def _launches(members: Sequence[Launched], book: Book) -> list[str]:
    found = []
    once: set[tuple[str, int, int]] = set()
    for one in members:
        ref = (one.job, one.attempt, one.member)
        name = ".".join(map(str, ref))
        if ref in once:
            found.append(f"{name} was launched twice")
        once.add(ref)
        if (one.job, one.attempt) not in book.placed:
            found.append(f"{name} was launched on {one.node}, and the log has no such placement")
        ended = book.ended.get(one.job)
        if ended is not None and one.began > ended[1] + SLACK_S:
            late = one.began - ended[1]
            found.append(f"{name} was launched {late:.3f} s after its job had ended")
    return found


def gpus_held_twice(members: Iterable[Launched]) -> list[str]:
    """By the nodes' own records: at no instant do two members hold one GPU."""
    held: dict[tuple[str, int], list[tuple[float, float, str]]] = defaultdict(list)
    for one in members:
        for gpu in one.gpus:
            until = float("inf") if one.ended is None else one.ended
            held[one.node, gpu].append((one.began, until, f"{one.job}.{one.attempt}.{one.member}"))
    found = []
    for (node, gpu), spans in held.items():
        free, last = 0.0, ""
        for began, until, name in sorted(spans):
            if began < free:
                found.append(f"GPU {gpu} of {node} was held by {last} and {name} at once")
            if until > free:
                free, last = until, name
    return found
