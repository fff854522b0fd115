"""Drives the neighbors: asks what they offer, sends what the state has handed over, and reports
what they say to the loop. It is made with the first neighbor, and gone with the last.

Each neighbor has a task of its own, so that one that hangs holds up nobody: what the others say in
a round goes to the loop together, and what a slow one says goes with a later round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.control.loop import ControlLoop, Unreadable
from shoal.control.neighboring.known import Known, write_known
from shoal.control.neighboring.services import ServiceOut, sent_spec
from shoal.control.neighboring.site import Out, Plan, Site
from shoal.control.secretstore import tenant_since_ms
from shoal.core.features.neighbors import outgoing, wanted_offers, why_not
from shoal.core.features.service.serve import owner_of
from shoal.core.features.service.sites import outgoing_services, unsettled
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import AwayEvent, JobHanded, JobReturned
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.services import ServiceSet, ServiceStopping, SiteAsked
from shoal.database.settings import Settings
from shoal.machine.enduring import enduring
from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.neighbor import NeighborReport, Outgoing
from shoal.model.report import Report
from shoal.model.sites import SiteWork

log = logging.getLogger("shoal.neighbors")

ROUND_S, IDLE_S = 2.0, 10.0
SOON_S = 0.2  # after something has happened; then twice that, up to a round
TOGETHER_S = 1.0  # for what is said in one round
ALARM = "neighbor {}"


def start(loop: ControlLoop, settings: Settings, known: dict[str, Known]) -> Neighboring:
    """Of a head that leads."""
    loop.neighboring = Neighboring(loop, settings, known)
    return loop.neighboring


class Neighboring:
    def __init__(self, loop: ControlLoop, settings: Settings, known: dict[str, Known]) -> None:
        self._loop, self._settings = loop, settings
        self.sites: dict[str, Site] = {}
        self._woken = asyncio.Event()
        self._pause_s = SOON_S
        self._rolling = False
        self._changing = asyncio.Lock()
        for name, one in known.items():
            self._add(name, one)
        loop.followers.append(self)
        self._task = asyncio.create_task(enduring("the neighbors", self._run))

    @property
    def known(self) -> dict[str, Known]:
        return {name: site.known for name, site in self.sites.items()}

    def close(self) -> None:
        self._task.cancel()
        if self in self._loop.followers:
            self._loop.followers.remove(self)
        for name in list(self.sites):
            self._drop(name)
        if self._loop.neighboring is self:
            self._loop.neighboring = None

    # -- who they are ----------------------------------------------------------------------------

    async def put(self, name: str, known: Known) -> None:
        """Stored before it is used."""
        async with self._changing:
            await asyncio.to_thread(write_known, self._settings, {**self.known, name: known})
            self._drop(name)
            self._add(name, known)
        self.wake()

    async def remove(self, name: str) -> None:
        async with self._changing:
            known = {one: value for one, value in self.known.items() if one != name}
            await asyncio.to_thread(write_known, self._settings, known)
            self._drop(name)
        if not self.sites:
            self.close()

    def _add(self, name: str, known: Known) -> None:
        self.sites[name] = Site(self._loop, self._loop.cluster, name, known)

    def _drop(self, name: str) -> None:
        site = self.sites.pop(name, None)
        if site is not None:
            site.close()
            self._loop.alarms.clear(ALARM.format(name))

    # -- rounds ----------------------------------------------------------------------------------

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        """A follower of the loop: what has just been decided is done at once."""
        for event in events:
            handed = isinstance(event, AwayEvent | JobHanded) and not isinstance(event, JobReturned)
            asks = isinstance(event, JobSubmitted) and event.spec.cluster
            if handed or asks or self._moves(event):
                self.wake()
                return

    def _moves(self, event: Event) -> bool:
        """A service that is at a neighbor."""
        if not isinstance(event, SiteAsked | ServiceStopping | ServiceSet):
            return False
        known = self._loop.tick.state.services.get(event.service)
        return known is not None and bool(known.sites)

    def wake(self) -> None:
        self._pause_s = SOON_S
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            busy, begun = True, list[asyncio.Task[NeighborReport]]()
            try:
                await self._loop.settled()
                busy, begun = self._begin()
            except Unreadable:
                pass  # the state is being loaded again
            await self._gather(begun)
            await self._rest(busy)

    async def _rest(self, busy: bool) -> None:
        wait_s = min(ROUND_S, self._pause_s) if busy else IDLE_S
        self._pause_s = min(IDLE_S, self._pause_s * 2)
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            pass

    def _begin(self) -> tuple[bool, list[asyncio.Task[NeighborReport]]]:
        """A round with each neighbor that has none under way; whether there is anything to do."""
        plans, begun = self._plans(), []
        for name, plan in plans.items():
            site = self.sites[name]
            if site.due:
                site.task = asyncio.create_task(site.round(plan))
                begun.append(site.task)
        busy = any(plan.asked or plan.out for plan in plans.values())
        return busy or self._rolling, begun

    def _plans(self) -> dict[str, Plan]:
        state, policy, now_ms = self._loop.state, self._loop.policy, self._loop.clock.now_ms()
        plans = {name: Plan([], [], []) for name in self.sites}
        for job in wanted_offers(state, policy, now_ms):
            for name, plan in plans.items():
                # One that may not have the job does not hear of it.
                if not why_not(state, policy, job, name, now_ms):
                    plan.asked.append((job.id, job.spec))
        for one in outgoing(state):
            if one.away.neighbor in plans:
                site = self.sites[one.away.neighbor]
                plans[site.name].out.append(self._out(site, one))
        self._rolling = False
        for name, work in outgoing_services(state):
            if name in plans:
                plans[name].services.append(self._service(self.sites[name], work))
                self._rolling |= unsettled(state, work, name)
        return plans

    def _service(self, site: Site, work: SiteWork) -> ServiceOut:
        state = self._loop.state
        spec = state.services[work.service].spec
        tenant = spec.replica.tenant
        since_ms = tenant_since_ms(state.identity, tenant) if spec.replica.secrets else 0
        hidden = site.carrier.hidden(spec.replica, since_ms)
        sent = None
        if work.version and not work.ends:
            sent = sent_spec(spec, self._loop.cluster, work.version, owner_of(state, tenant))
        return ServiceOut(work, sent, hidden, spec.replica.package)

    def _out(self, site: Site, one: Outgoing) -> Out:
        spec: JobSpec = one.spec
        since_ms = tenant_since_ms(self._loop.state.identity, spec.tenant) if spec.secrets else 0
        hidden = site.carrier.hidden(spec, since_ms) if spec.secrets else {}
        return Out(one.job, one.attempt, one.away, spec, hidden, one.stray)

    async def _gather(self, begun: Sequence[asyncio.Task[NeighborReport]]) -> None:
        """What all have said by now, together."""
        if begun:
            await asyncio.wait(begun, timeout=TOGETHER_S)
        reports = [report for site in self.sites.values() if (report := self._said(site))]
        if reports:
            self._loop.heard_neighbors(reports)

    def _said(self, site: Site) -> NeighborReport | None:
        task = site.task
        if task is None or not task.done():
            return None
        site.task = None
        cause = ALARM.format(site.name)
        try:
            report = task.result()
        except asyncio.CancelledError:
            return None
        except Exception:
            log.exception("a round with %s failed", site.name)
            report = site.failed("a round with it failed; the log (controller.log) has the details")
        if report.problem and site.silent:
            self._loop.alarms.raise_(cause, f"neighbor {site.name}: {report.problem}")
        elif not report.problem:
            self._loop.alarms.clear(cause)
        return report

    # -- for readers -----------------------------------------------------------------------------

    async def bring_output(self, job: Job, member: int, wait_s: float) -> None:
        """What a job that is away has printed there comes here, or what comes within the time."""
        away = job.away
        site = self.sites.get(away.neighbor) if away is not None else None
        there = site.there.get((job.id, job.attempt)) if site is not None else None
        if site is None or site.problem or there is None or not there.id or not there.attempt:
            await asyncio.sleep(min(wait_s, 1.0))
            return
        ref = MemberRef(job.id, job.attempt, member)
        await site.carrier.bring_output(ref, there.id, there.attempt, wait_s)
