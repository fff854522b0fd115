"""The API of schedules: set, list, pause, resume, run and remove them."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
from litestar import Controller, Request

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.jobs import Key
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.views import COMMAND_CHARACTERS_MAX
from shoal.api.workflows import note_packages, own_jobs
from shoal.calls.jobs import FlowCalls
from shoal.cron import BadCron, due_times, next_due, parse, zone_of
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import DEFAULT_TENANT
from shoal.model.report import PauseSchedule, RemoveSchedule, RunSchedule, SetSchedule
from shoal.model.schedule import NEXT_SHOWN, Schedule, ScheduleSpec, ScheduleView
from shoal.model.views import Done


class Schedules(Controller):
    """A schedule is named by its tenant: `tenant` is for admins, who may name any."""

    @handles(FlowCalls.schedules)
    def listing(self, reach: Reach) -> list[ScheduleView]:
        found = reach.loop.state.schedules.values()
        return [_view(reach, one) for one in found if reach.who.sees(one.spec.tenant)]

    @handles(FlowCalls.schedule)
    def one(self, reach: Reach, name: str, tenant: Key = "") -> ScheduleView:
        return _view(reach, _find(reach, name, tenant))

    @handles(FlowCalls.set_schedule)
    async def set(
        self, request: Request[Any, Any, Any], reach: Reach, name: str, data: ScheduleSpec
    ) -> ScheduleView:
        if data.name != name:
            raise Refusal(422, f"is {data.name!r}, but the URL has {name[:64]!r}", "name")
        loop = reach.loop
        spec = msgspec.structs.replace(data, jobs=own_jobs(reach, data.jobs))
        owner = reach.who.user if reach.who.token else ""
        next_ms = _next(spec, loop.clock.now_ms())
        wanted = SetSchedule(spec, next_ms, owner, reach.name, reach.tenant)
        accepted(await loop.request(wanted))
        note(request.scope, on=spec.name)
        await loop.settled()
        note_packages(reach, spec.jobs)
        return _view(reach, _find(reach, name, spec.tenant))

    @handles(FlowCalls.pause_schedule)
    async def pause(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        key = _find(reach, name, tenant).spec.key
        answer = await reach.loop.request(PauseSchedule(key, 0, reach.name, reach.tenant))
        return _done(accepted(answer))

    @handles(FlowCalls.resume_schedule)
    async def resume(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        spec = _find(reach, name, tenant).spec
        next_ms = _next(spec, reach.loop.clock.now_ms())
        wanted = PauseSchedule(spec.key, next_ms, reach.name, reach.tenant)
        return _done(accepted(await reach.loop.request(wanted)))

    @handles(FlowCalls.run_schedule)
    async def run(self, reach: Reach, name: str, tenant: Key = "", key: Key = "") -> Done:
        spec = _find(reach, name, tenant).spec
        once = scoped_key(reach, spec.jobs[0].spec, key)
        wanted = RunSchedule(spec.key, once, reach.name, reach.tenant)
        return _done(accepted(await reach.loop.request(wanted)))

    @handles(FlowCalls.remove_schedule)
    async def remove(self, reach: Reach, name: str, tenant: Key = "") -> Done:
        key = _find(reach, name, tenant).spec.key
        answer = await reach.loop.request(RemoveSchedule(key, reach.name, reach.tenant))
        return _done(accepted(answer))


def _done(answer: Any) -> Done:
    return Done(id=answer.id, note=answer.note)


def _next(spec: ScheduleSpec, now_ms: int) -> int:
    try:
        zone_of(spec.timezone)
    except BadCron as error:
        raise Refusal(422, str(error), "timezone") from None
    try:
        return next_due(spec, now_ms)
    except BadCron as error:
        raise Refusal(422, str(error), "cron") from None


def _find(reach: Reach, name: str, tenant: str) -> Schedule:
    own = DEFAULT_TENANT if reach.who.tenant == EVERY_TENANT else reach.who.tenant
    found = reach.loop.state.schedules.get(f"{tenant or own}/{name}")
    if found is None or not reach.who.sees(found.spec.tenant):
        message = f"there is no schedule {name[:64]!r}; see: shoal schedule list"
        raise Refusal(404, message, "schedule")
    return found


def _view(reach: Reach, schedule: Schedule) -> ScheduleView:
    spec = schedule.spec
    shown: list[int] = []
    if schedule.next_ms:
        zone = zone_of(spec.timezone)
        shown = due_times(parse(spec.cron), zone, schedule.next_ms, NEXT_SHOWN - 1)
        shown.insert(0, schedule.next_ms)
    last = reach.find(schedule.last_job) if schedule.last_job else None
    command = shlex.join(spec.jobs[0].spec.command)
    if spec.workflow:
        command = f"{len(spec.jobs)} jobs: {', '.join(job.name for job in spec.jobs)}"
    return ScheduleView(
        name=spec.name,
        tenant=spec.tenant,
        user=schedule.owner or spec.user,
        cron=spec.cron,
        timezone=spec.timezone or "UTC",
        overlap=spec.overlap.value,
        missed_rule=spec.missed.value,
        state="active" if schedule.next_ms else "paused",
        why=reach.text(schedule.paused or schedule.note),
        next_ms=shown,
        runs=schedule.runs,
        missed=schedule.missed,
        skipped=schedule.skipped,
        last_ms=schedule.last_ms,
        last_job=schedule.last_job,
        last_state=last.state if last is not None else "",
        command=command[:COMMAND_CHARACTERS_MAX],
        spec=spec,
    )
