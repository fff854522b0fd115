"""The truth about jobs that other clusters run: no two processes of one job are alive at a time,
whichever cluster they are on, what has ended well never runs again, and accounts agree.

It sees the processes and the logs of all clusters, and knows what each job there is at its home by
the key under which it came, which is all that the clusters share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import AwayEvent, JobHanded, JobReturned, JobSettled
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRequeued
from shoal.model.commands import Launch
from shoal.model.job import JobSpec, MemberRef, Outcome, Restart
from shoal.model.neighbor import Ending, key_of
from shoal.model.policy import Policy
from shoal.model.report import DeclareGone, Request
from storm.lives import Untruth
from storm.timeline import Timeline
from storm.truth import Truth
from storm.witness import End

GONE = "was declared gone by"


class Origin(NamedTuple):
    """A job, named by the cluster where it was submitted."""

    home: str
    job: str


class Process(NamedTuple):
    cluster: str
    ref: MemberRef


class Hosted:
    """One job at its host, as the host's log has it."""

    def __init__(self, job: str, spec: JobSpec) -> None:
        self.job, self.spec = job, spec
        self.ending: Ending | None = None
        self._since_ms: int | None = None
        self._gpus = 0
        self._started = False
        self._gpu_ms = 0

    def placed(self, event: JobPlaced) -> None:
        self._since_ms, self._started = event.at_ms, True
        self._gpus = sum(len(slice_.gpus) for slice_ in event.slices)

    def over(self, at_ms: int) -> None:
        if self._since_ms is not None:
            self._gpu_ms += self._gpus * (at_ms - self._since_ms)
            self._since_ms = None

    def finished(self, event: JobFinished) -> None:
        self.over(event.at_ms)
        self.ending = Ending(
            outcome=event.outcome,
            code=event.code,
            why="as its host says",
            started=self._started,
            gpu_ms=self._gpu_ms,
            money=3 * self._gpu_ms,
        )


class Everywhere:
    """All clusters. `keys`: jobs that were handed over, by the key that says whose they are."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.sites: dict[str, SiteTruth] = {}
        self.keys: dict[str, dict[str, Hosted]] = {}  # cluster -> key -> the job there
        self._origins: dict[Process | tuple[str, str], Origin] = {}
        self._alive: dict[Origin, dict[Process, None]] = {}
        self._runs: dict[Origin, set[tuple[str, str, int]]] = {}
        self._done: dict[Origin, str] = {}  # where it ended well
        self.gone: set[tuple[str, str]] = set()  # (home, neighbor) by somebody's word
        self.excused: set[Origin] = set()  # a person took on that it runs twice
        self.cut: set[Origin] = set()  # given up as it wished, because its lease was over
        self.owed: dict[tuple[str, str], int] = {}  # key, neighbor -> what home says it owes

    def origin_of(self, cluster: str, job: str) -> Origin:
        return self._origins.get((cluster, job), Origin(cluster, job))

    def came(self, cluster: str, event: JobSubmitted) -> None:
        home, _, rest = event.key.partition("/")
        job, _, attempt = rest.partition("/")
        if home in self.sites and attempt:
            self._origins[cluster, event.job] = Origin(home, job)
            self.keys.setdefault(cluster, {})[event.key] = Hosted(event.job, event.spec)

    def started(self, process: Process, restart: Restart) -> None:
        cluster, ref = process
        origin = self.origin_of(cluster, ref.job)
        alive = self._alive.setdefault(origin, {})
        runs = self._runs.setdefault(origin, set())
        if origin not in self.excused:
            for other in alive:
                same = (other.cluster, other.ref.job, other.ref.attempt) == (cluster, *ref[:2])
                if not same and not self._given_up(other) and not self._given_up(process):
                    raise Untruth(f"{origin}: {process} was started while {other} is alive")
            if origin in self._done and origin not in self.cut:
                raise Untruth(f"{origin}: {process} was started, but {self._done[origin]}")
        runs.add((cluster, ref.job, ref.attempt))
        if restart is Restart.NEVER and len(runs) > 1:
            raise Untruth(f"{origin} must not run twice, and did: {sorted(runs)}")
        alive[process] = None

    def _given_up(self, process: Process) -> bool:
        """Its own cluster has lost its node or its trace: there, too, nobody would know."""
        return process.ref in self.sites[process.cluster].jobs[process.ref.job].given_up

    def ended(self, process: Process) -> None:
        self._alive[self.origin_of(process.cluster, process.ref.job)].pop(process)

    def finished(self, cluster: str, event: JobFinished) -> None:
        origin = self.origin_of(cluster, event.job)
        if event.outcome is Outcome.SUCCEEDED and origin not in self.excused:
            before = self._done.setdefault(origin, f"it ended well as {event.job} of {cluster}")
            if origin.home != cluster and event.job not in before and origin not in self.cut:
                raise Untruth(f"{origin}: {event} again, though {before}")

    # -- what home says of jobs that are away ----------------------------------------------

    def hosted(self, home: str, handed: JobHanded) -> Hosted | None:
        return self.keys.get(handed.neighbor, {}).get(key_of(home, handed.job, handed.attempt))

    def may_end(self, home: str, handed: JobHanded, event: JobFinished, *, asked: bool) -> None:
        hosted = self.hosted(home, handed)
        ending = hosted.ending if hosted is not None else None
        if ending is not None and (ending.outcome, ending.code) == (event.outcome, event.code):
            self.counts[f"job {event.outcome.value} away"] += 1
            return
        gone = (home, handed.neighbor) in self.gone
        over = gone or bool(self.sites[home].jobs[event.job].spec.if_cut_ms)
        if event.outcome is Outcome.CANCELLED and over and (asked or gone):
            return
        raise Untruth(f"{home}: {event}, but {handed.neighbor} has {ending}")

    def returned(self, home: str, handed: JobHanded, event: JobReturned) -> None:
        """Because its host has ended it, because its lease is over, or because a person said that
        its host is gone. If it has ended well there and home cannot know, it runs again, as its
        owner wished for that case."""
        origin, hosted = Origin(home, event.job), self.hosted(home, handed)
        ending = hosted.ending if hosted is not None else None
        if GONE in event.why and (home, handed.neighbor) in self.gone:
            self.counts["job came back, neighbor gone"] += 1
            self.excused.add(origin)
        elif ending is not None and ending.outcome is Outcome.CANCELLED:
            self.counts["job came back, ended by its host"] += 1
        elif self.sites[home].jobs[event.job].spec.if_cut_ms:
            self.counts["job came back, lease over"] += 1
            self.cut.add(origin)
            for other in self._alive.get(origin, ()):
                if not self._given_up(other):
                    raise Untruth(f"{origin} came back by its lease, but {other} is alive")
        else:
            raise Untruth(f"{origin} came back, but {handed.neighbor} has {ending}: {event.why}")

    def owes(self, home: str, event: JobReturned | JobSettled) -> None:
        key = key_of(home, event.job, event.attempt)
        owed = self.owed.get((key, event.neighbor), 0)
        if owed:
            raise Untruth(f"{home} owes for {key} twice")
        self.owed[key, event.neighbor] = event.gpu_ms

    def verify_accounts(self) -> None:
        """Every hand-over that has ended is owed once, as its host counted it."""
        for cluster, keys in self.keys.items():
            for key, hosted in keys.items():
                if hosted.ending is None:
                    raise Untruth(f"{key} has not ended at {cluster}")
                owed = self.owed.get((key, cluster), 0)
                if owed != hosted.ending.gpu_ms:
                    raise Untruth(f"{key}: {owed} is owed to {cluster}, not {hosted.ending}")


class SiteTruth(Truth):
    """Of one cluster, which is judged as if it were alone, too."""

    def __init__(self, name: str, timeline: Timeline, policy: Policy, all_: Everywhere) -> None:
        super().__init__(timeline, policy)
        self._name, self._all = name, all_
        self.may_end_away = self._may_end_away
        all_.sites[name] = self

    def started(self, node: str, launch: Launch) -> None:
        super().started(node, launch)
        restart = self.jobs[launch.ref.job].spec.restart
        self._all.started(Process(self._name, launch.ref), restart)

    def ended(self, ref: MemberRef, code: int | None, how: End) -> None:
        super().ended(ref, code, how)
        self._all.ended(Process(self._name, ref))

    def asked(self, request: Request) -> None:
        super().asked(request)
        if isinstance(request, DeclareGone):
            self._all.gone.add((self._name, request.neighbor))

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            self._see(event)
        super().committed(events)

    def _see(self, event: Event) -> None:
        self._all.counts[type(event).__name__] += isinstance(event, AwayEvent | JobHanded)
        match event:
            case JobSubmitted():
                self._all.came(self._name, event)
            case JobReturned():
                self._all.returned(self._name, self.away[event.job], event)
                self._all.owes(self._name, event)
            case JobSettled():
                self._all.owes(self._name, event)
            case JobPlaced() | JobRequeued() | JobFinished():
                for hosted in self._all.keys.get(self._name, {}).values():
                    if hosted.job == event.job:
                        self._book(hosted, event)
                if isinstance(event, JobFinished):
                    self._all.finished(self._name, event)
            case _:
                pass

    def _book(self, hosted: Hosted, event: JobPlaced | JobRequeued | JobFinished) -> None:
        match event:
            case JobPlaced():
                hosted.placed(event)
            case JobRequeued():
                hosted.over(event.at_ms)
            case JobFinished():
                hosted.finished(event)

    def _may_end_away(self, handed: JobHanded, event: JobFinished) -> None:
        asked = event.job in self._cancels or self.after.may_be_cancelled(event.job)
        self._all.may_end(self._name, handed, event, asked=asked)
