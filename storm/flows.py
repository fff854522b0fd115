"""Users in the storm whose jobs wait for others, begin later, or come as workflows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from shoal.cron import next_due
from shoal.model.job import JobSpec
from shoal.model.report import (
    Accepted,
    Answer,
    Cancel,
    CancelWorkflow,
    RemoveSchedule,
    Request,
    SetSchedule,
    Submit,
    SubmitWorkflow,
    WorkflowJob,
)
from shoal.model.schedule import Missed, Overlap, ScheduleSpec
from storm.lives import Untruth
from storm.users import Users
from storm.world import World

FLOWS_PART = 0.35  # of the histories have such users
ASK_AGAIN_MS = 1_500
CRONS = ("*/2 * * * * *", "*/7 * * * * *", "*/5 */2 * * * *", "0 * * * * *")
WHENS = ("", ":ok", ":any", ":fail")
PROGRAMS = ("works", "works", "works", "fails", "fails-once", "flaky")


class Flows:
    """They ask until they are answered, and draw from a stream of their own."""

    def __init__(
        self, world: World, users: Users, rng: random.Random, counts: Counter[str]
    ) -> None:
        self.open_questions: dict[str, None] = {}  # by key
        self.active = rng.random() < FLOWS_PART
        self.schedules = True
        self.wish: Callable[[JobSpec], JobSpec] = lambda spec: spec  # of parts of workflows
        self._world = world
        self._users = users
        self._rng = rng
        self._counts = counts
        self._known: list[str] = []  # jobs that were accepted here
        self._accepted: dict[str, str] = {}

    def plan(self, until_ms: int) -> None:
        rng = self._rng
        if not self.active:
            return
        for number in range(rng.randrange(1, 8)):
            last = self._schedule if self.schedules else self._workflow
            wants = rng.choice((self._job, self._job, self._workflow, last))
            self._world.timeline.at(rng.randrange(until_ms), partial(wants, f"flow-{number}"))

    def _spec(self) -> JobSpec:
        rng = self._rng
        command = (rng.choice(PROGRAMS), str(rng.choice((30, 1_000, 4_000))))
        begin_ms = self._world.timeline.now_ms + rng.randrange(1, 8_000)
        return JobSpec(command=command, cpu_milli=0, begin_ms=begin_ms if rng.random() < 0.3 else 0)

    def _others(self) -> tuple[str, ...]:
        """Some jobs that are known, whatever became of them, and rarely one that is not."""
        rng = self._rng
        known = [*self._users.accepted.values(), *self._known]
        found = rng.sample(known, min(len(known), rng.choice((0, 1, 1, 2))))
        if rng.random() < 0.05:
            found.append("j999")
        return tuple(f"{job}{rng.choice(WHENS)}" for job in found)

    def _job(self, key: str) -> None:
        spec = self._spec()
        wanted = JobSpec(
            command=spec.command, cpu_milli=0, begin_ms=spec.begin_ms, after=self._others()
        )
        self._counts["job after others"] += bool(wanted.after)
        self._ask(key, Submit(wanted, key), self._cancel)

    def _workflow(self, key: str) -> None:
        rng, jobs = self._rng, list[WorkflowJob]()
        for number in range(rng.randrange(1, 6)):
            before = rng.sample(jobs, min(len(jobs), rng.choice((0, 1, 1, 2))))
            after = tuple(f"{one.name}{rng.choice(WHENS)}" for one in before)
            spec = self._spec()
            if number == 0:
                spec = JobSpec(command=spec.command, cpu_milli=0, after=self._others())
            jobs.append(WorkflowJob(f"part-{number}", self.wish(spec), after))
        if rng.random() < 0.1:  # the first waits for the last: a circle, unless it is alone
            first = jobs[0]
            jobs[0] = WorkflowJob(first.name, first.spec, (jobs[-1].name,))
        rng.shuffle(jobs)
        self._counts["workflow"] += 1
        self._ask(key, SubmitWorkflow(tuple(jobs), key), self._cancel_flow)

    def _schedule(self, key: str) -> None:
        """Added, and changed later: by other jobs, or under another clock."""
        rng = self._rng
        spec = ScheduleSpec(
            name=f"every-{rng.randrange(3)}",
            cron=rng.choice(CRONS),
            timezone=rng.choice(("", "Europe/Berlin")),
            overlap=rng.choice(list(Overlap)),
            missed=rng.choice(list(Missed)),
            jobs=tuple(
                WorkflowJob(f"part-{number}", JobSpec(command=self._spec().command, cpu_milli=0))
                for number in range(rng.choice((1, 1, 2)))
            ),
        )
        spec = msgspec.structs.replace(spec, workflow=len(spec.jobs) > 1)
        next_ms = next_due(spec, self._world.timeline.now_ms)
        self._counts["schedule set"] += 1
        self._ask(key, SetSchedule(spec, next_ms), self._remove)

    def _remove(self, name: str) -> None:
        self._counts["schedule removed"] += 1
        self._world.ask(RemoveSchedule(f"default/{name}"), lambda _: None)

    def calm_down(self) -> None:
        """A schedule would run for ever."""
        controller, timeline = self._world.controller, self._world.timeline
        if not self.active:
            return
        if not controller.readable or self.open_questions:
            timeline.after(ASK_AGAIN_MS, self.calm_down)
            return
        left = list(controller.state.schedules)
        for key in left:
            self._world.ask(RemoveSchedule(key), lambda _: None)
        if left:
            timeline.after(ASK_AGAIN_MS, self.calm_down)

    def _ask(self, key: str, request: Request, then: Callable[[str], None]) -> None:
        self.open_questions[key] = None

        def answered(answer: Answer) -> None:
            self.open_questions.pop(key, None)
            if not isinstance(answer, Accepted):
                self._counts["flow refused"] += 1
                return
            if self._accepted.setdefault(key, answer.id) != answer.id:
                raise Untruth(f"{key} became {self._accepted[key]} and {answer.id}")
            if not isinstance(request, SetSchedule):
                self._known.append(answer.id)
            if self._rng.random() < 0.15:
                self._world.timeline.after(self._rng.randrange(6_000), partial(then, answer.id))

        def ask() -> None:
            if key in self.open_questions:
                self._world.ask(request, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def _cancel(self, job: str) -> None:
        self._world.ask(Cancel(job), lambda _: None)

    def _cancel_flow(self, workflow: str) -> None:
        self._counts["workflow cancelled"] += 1
        self._world.ask(CancelWorkflow(workflow), lambda _: None)
