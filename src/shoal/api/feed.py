"""Finds what changed in the cluster, once for all open pages.

A step changes little, so each look compares cheap marks of nodes and jobs with the previous ones
and builds lines only for those that differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from shoal.api.feed_rows import Gone, Own, for_all, job_line, node_line, rounded, service_line
from shoal.api.principal import THE_OPERATOR
from shoal.api.reach import Reach
from shoal.api.views import known_nodes, naps_mark, status_view
from shoal.control.loop import ControlLoop, Unreadable
from shoal.core.state.heard import Watch
from shoal.core.state.state import State
from shoal.machine.enduring import enduring
from shoal.model.feed import Change, Snapshot
from shoal.model.finding import JobFilter
from shoal.model.job import Job, Phase
from shoal.model.progress import Beat
from shoal.model.series import NodeSample

PAUSE_S = 0.25  # least time between two looks
PAUSE_FACTOR = 20  # ... and this many times a look's duration: at most 5 % of the time
QUIET_S = 1.0  # steps and loads are not events: look at them this often
WAITING_MAX = 500  # waiting jobs that are sent; of the rest only the number
ENDED_MAX = 100  # finished jobs in a snapshot
ENDED_LOOK = 50_000  # events that are searched for those of one tenant
KEPT_MAX = 256  # changes kept for pages that reconnect
BEHIND_MAX = 64  # changes queued for one slow page
PAGES_MAX = 200


class Line(NamedTuple):
    """A line, and the mark that it was made from."""

    mark: Any
    line: Any


class TooMany(Exception):
    """No more pages may be open."""


class Page:
    """One open page: the pieces not yet sent to it. `tenant`: the only one it shows; "": all."""

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND_MAX)

    def offer(self, piece: bytes) -> bool:
        """False if it is too far behind: it is disconnected, and reconnects when it can."""
        if self.pieces.qsize() >= BEHIND_MAX - 1:
            self.pieces.put_nowait(None)
            return False
        self.pieces.put_nowait(piece)
        return True


class Feed:
    """`samples`: returns the newest sample of each node that measures its GPUs."""

    def __init__(
        self, loop: ControlLoop, samples: Callable[[], Mapping[str, NodeSample]] = dict
    ) -> None:
        self._loop = loop
        self._reach = Reach(loop, THE_OPERATOR)
        self._samples = samples
        self._sampled: dict[str, NodeSample] = {}
        self._busy: dict[str, tuple[int, ...]] = {}
        self._run = secrets.token_hex(4)  # numbers of another controller are not valid here
        self._number = 0
        self._nodes: dict[str, Line] = {}
        self._jobs: dict[str, Line] = {}
        self._services: dict[str, Line] = {}
        self._seen: tuple[int, State | None] = (-1, None)
        self._ended_seq = loop.last_seq  # ends up to this event were sent, or were in a snapshot
        self._told: dict[str, tuple[int, dict[int, Beat]]] = {}  # job -> attempt, beats
        self._heats: dict[str, tuple[int, ...]] = {}
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MAX)
        self._pages: set[Page] = set()
        self._looking: asyncio.Task[None] | None = None
        self._snapshots: dict[str, bytes] = {}  # of this number, by tenant
        self._gone = Gone()
        self._others = loop.policy.others

    def open(self, last_id: str = "", tenant: str = "") -> Page:
        """A page that has seen `last_id` gets what it missed, if that is still kept. A page of one
        `tenant` gets everything again: changes are kept as those who see all get them."""
        if len(self._pages) >= PAGES_MAX:
            raise TooMany(f"{PAGES_MAX} pages are open already; close some")
        if self._looking is None or self._looking.done():
            self.advance()  # no look for a while: the snapshot must be current
            self._looking = asyncio.create_task(enduring("the page's feed", self._watch))
        page = Page(tenant)
        missed = None if tenant else self._missed(last_id)
        for piece in [self.snapshot(tenant)] if missed is None else missed:
            page.offer(piece)
        self._pages.add(page)
        return page

    def close(self, page: Page) -> None:
        self._pages.discard(page)

    def snapshot(self, tenant: str = "") -> bytes:
        if tenant not in self._snapshots:
            self._snapshots[tenant] = self._piece("snapshot", self._whole(tenant))
        return self._snapshots[tenant]

    def once(self, tenant: str = "") -> Snapshot:
        """The cluster as it is in the loop's state, for one reader who does not follow it."""
        self._pages = {Page(tenant)}
        self.look()
        return self._whole(tenant)

    def _whole(self, tenant: str) -> Snapshot:
        since = max(-1, self._loop.last_seq - ENDED_LOOK) if tenant else -1
        ended = self._loop.store.finished(ENDED_MAX, since, self._ended_of(tenant))
        told = Snapshot(
            status=status_view(self._reach),
            nodes=[known.line for known in self._nodes.values()],
            jobs=[known.line for known in self._jobs.values()],
            services=[known.line for known in self._services.values()],
            ended=[job_line(self._loop, job) for job in ended],
            busy=self._busy,
        )
        return Own(self._loop, tenant).snapshot(told) if tenant else for_all(told)

    def _ended_of(self, tenant: str) -> JobFilter:
        record = self._loop.state.identity.tenants.get(tenant)
        return JobFilter(tenant=tenant, first_job=record.first_job if record is not None else 0)

    def look(self) -> Change | None:
        """What changed since the last look; None if nothing did."""
        change, self._gone = Change(), Gone()
        # Every change of nodes and jobs is an event; only steps and loads change without one.
        seen = (self._loop.last_seq, self._loop.state)
        moved, self._seen = seen != self._seen, seen
        if moved:
            self._look_at_nodes(change)
            self._look_at_jobs(change)
        else:
            self._look_at_steps(change)
        self._look_at_services(change)
        self._look_at_gpus(change)
        full = (
            change.nodes or change.jobs or change.services or change.ended or change.busy
            or change.gone_nodes or change.gone_jobs or change.gone_services
        )  # fmt: skip
        if not moved and not full:
            return None
        change.status = status_view(self._reach)
        self._number += 1
        self._snapshots = {}
        return change

    async def _watch(self) -> None:
        while self._pages:
            try:
                await self._loop.changed("", QUIET_S)
            except Unreadable:
                continue  # without beats, pages know that they are out of date
            began = time.monotonic()
            change = self.look()
            if change is not None:
                self.send(self._keep(change))
                self._send_own(change)
            await asyncio.sleep(max(PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began)))

    def advance(self) -> bytes | None:
        """The next change, encoded and kept; None if there is none."""
        change = self.look()
        return None if change is None else self._keep(change)

    def _keep(self, change: Change) -> bytes:
        piece = self._piece("change", for_all(change))
        self._kept.append((self._number, piece))
        return piece

    def send(self, piece: bytes, tenant: str = "") -> None:
        self._pages = {page for page in self._pages if page.tenant != tenant or page.offer(piece)}

    def _send_own(self, change: Change) -> None:
        """To the pages of one tenant each: what was found is cut to size, not looked for again."""
        others, self._others = self._others, self._loop.policy.others
        for tenant in sorted(self._tenants()):
            if others is not self._others:  # all lines may have changed
                self.send(self.snapshot(tenant), tenant)
            else:
                own = Own(self._loop, tenant).change(change, self._gone)
                self.send(self._piece("change", own), tenant)

    def _tenants(self) -> set[str]:
        return {page.tenant for page in self._pages if page.tenant}

    def beat(self) -> bytes:
        """The current time. A page that gets no beat for long knows that it is out of date."""
        if not self._loop.readable:
            return b": the state is being stored or loaded\n\n"
        return b'event: beat\ndata: {"now_ms":%d}\n\n' % self._loop.clock.now_ms()

    def _piece(self, kind: str, told: object) -> bytes:
        name = f"{self._run}-{self._number}"
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (
            name.encode(),
            kind.encode(),
            msgspec.json.encode(told),
        )

    def _missed(self, last_id: str) -> list[bytes] | None:
        run, _, number = last_id.partition("-")
        if run != self._run or not number.isdecimal() or len(number) > 15:
            return None
        first = int(number) + 1
        if first > self._number + 1 or (first <= self._number and self._kept[0][0] > first):
            return None
        missed = [piece for kept, piece in self._kept if kept >= first]
        return missed if len(missed) < BEHIND_MAX - 1 else None

    # -- one look --------------------------------------------------------------------------

    def _look_at_nodes(self, change: Change) -> None:
        placed, before, now = self._loop.state.placed, self._nodes, {}
        for node in known_nodes(self._loop):
            mark = (
                node.health,
                node.intent,
                node.record.standing,
                node.why,
                node.end,
                node.spec,
                tuple(placed[node.id]),
                naps_mark(placed[node.id].values()),
            )
            known = before.get(node.id)
            if known is None or known.mark != mark:
                known = Line(mark, node_line(self._loop, node))
                change.nodes.append(known.line)
            now[node.id] = known
        change.gone_nodes = [node for node in before if node not in now]
        self._nodes = now

    def _look_at_jobs(self, change: Change) -> None:
        before, now, waiting = self._jobs, dict[str, Line](), 0
        own = dict.fromkeys(self._tenants(), 0)  # beyond the first: those of open pages
        for job in self._loop.state.jobs.values():
            if job.phase is Phase.WAITING:
                waiting += 1
                tenant = job.spec.tenant
                if waiting > WAITING_MAX:
                    if own.get(tenant, WAITING_MAX) >= WAITING_MAX:
                        continue
                    own[tenant] += 1
            now[job.id] = self._job(job, change)
        for array in self._loop.state.arrays.values():
            now[array.id] = self._array(array, change)
        self._jobs = now
        for job_id in before:
            if job_id not in now:
                self._gone.jobs[job_id] = before[job_id].line.tenant
                self._leave(job_id, change)
        self._look_at_ends(change)

    def _look_at_ends(self, change: Change) -> None:
        """A job may come and go between two looks, or wait too far back to be on any page."""
        after, self._ended_seq = self._ended_seq, self._loop.last_seq
        told = {line.id for line in change.ended}
        for job in self._loop.store.finished(ENDED_MAX, after):
            if job.id not in told:
                change.ended.append(job_line(self._loop, job))

    def _look_at_steps(self, change: Change) -> None:
        """Only jobs that report steps can have changed."""
        for job_id in self._loop.state.heard.watches:
            if job_id in self._jobs:
                self._jobs[job_id] = self._job(self._loop.state.jobs[job_id], change)

    def _job(self, job: Job, change: Change) -> Line:
        watch = self._loop.state.heard.watches.get(job.id)
        mark = (job.phase, job.attempt, len(job.members), job.why, job.wants, self._pace(watch))
        known = self._jobs.get(job.id)
        if known is not None and known.mark == mark:
            return known
        line = Line(mark, job_line(self._loop, job, self._heat(job, watch)))
        if known is None or known.line != line.line:
            change.jobs.append(line.line)
        return line

    def _array(self, array: Job, change: Change) -> Line:
        line = Line(None, job_line(self._loop, array))
        known = self._jobs.get(array.id)
        if known is None or known.line != line.line:
            change.jobs.append(line.line)
        return line

    def _leave(self, job_id: str, change: Change) -> None:
        self._told.pop(job_id, None)
        self._heats.pop(job_id, None)
        job = None if self._loop.state.live(job_id) else self._reach.find(job_id)
        if job is None or job.spec.array:  # an array ends as a whole
            change.gone_jobs.append(job_id)
        else:
            change.ended.append(job_line(self._loop, job))

    @staticmethod
    def _pace(watch: Watch | None) -> tuple[object, ...]:
        if watch is None or not watch.beats:
            return ()
        steps = max(beat.step for beat in watch.beats.values())
        return (steps, len(watch.slow), watch.pace.moved_ms)

    def _heat(self, job: Job, watch: Watch | None) -> tuple[int, ...]:
        """How much of the time since the last look each member worked."""
        if watch is None or not watch.beats:
            return ()
        attempt, before = self._told.get(job.id, (0, {}))
        if attempt != job.attempt:
            before = {}
        old = self._heats.get(job.id, ())
        heats = []
        for number in range(len(job.members)):
            beat, last = watch.beats.get(number), before.get(number)
            if beat is None:
                heats.append(-1)
                continue
            part = beat.compute_us - (last.compute_us if last else 0)
            whole = _told_us(beat) - (_told_us(last) if last else 0)
            told = rounded(part, whole)
            heats.append(old[number] if told < 0 and number < len(old) else told)
        self._told[job.id] = (job.attempt, dict(watch.beats))
        self._heats[job.id] = tuple(heats)
        return self._heats[job.id]

    def _look_at_services(self, change: Change) -> None:
        before, now = self._services, {}
        for name, service in self._loop.state.services.items():
            line = service_line(self._reach, service)
            known = before.get(name)
            if known is None or known.line != line:
                known = Line(None, line)
                change.services.append(line)
            now[name] = known
        change.gone_services = [name for name in before if name not in now]
        self._gone.services = {name: before[name].line.tenant for name in change.gone_services}
        self._services = now

    def _look_at_gpus(self, change: Change) -> None:
        for node, sample in self._samples().items():
            if self._sampled.get(node) is sample:
                continue
            self._sampled[node] = sample
            shares = [gpu.busy_milli for gpu in sample.gpus]
            busy = tuple(-1 if share is None else rounded(share, 1000) for share in shares)
            if busy and busy != self._busy.get(node):
                self._busy[node] = change.busy[node] = busy

    def end(self) -> None:
        """Disconnect the pages: they reconnect to the next controller."""
        for page in self._pages:
            with contextlib.suppress(asyncio.QueueFull):
                page.pieces.put_nowait(None)
        if self._looking is not None:
            self._looking.cancel()


def _told_us(beat: Beat) -> int:
    return beat.compute_us + beat.wait_us + beat.data_us + beat.save_us
