"""Users in the storm who change their minds about a job that waits: another one in its place."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from shoal.model.job import JobSpec
from shoal.model.report import Accepted, Answer, Submit
from storm.lives import Untruth
from storm.users import ASK_AGAIN_MS, Users
from storm.world import World


class Replacing:
    """They ask until they are answered, and draw from a stream of their own."""

    def __init__(
        self, world: World, users: Users, rng: random.Random, counts: Counter[str]
    ) -> None:
        self.open_questions: dict[str, None] = {}  # by key
        self._world, self._users, self._rng, self._counts = world, users, rng, counts
        self._accepted: dict[str, str] = {}

    def plan(self, until_ms: int) -> None:
        rng = self._rng
        for number in range(rng.randrange(1, 10)):
            at_ms = rng.randrange(until_ms)
            self._world.timeline.at(at_ms, partial(self._replace, f"instead-{number}"))

    def _replace(self, key: str) -> None:
        """Some job that is known, whatever became of it; two may want the place of the same."""
        known = list(self._users.accepted.items())
        if not known:
            return
        rng = self._rng
        waits = [id_ for _, id_ in known if self._waits(id_)]
        old = rng.choice(waits or [id_ for _, id_ in known])
        command = (rng.choice(("works", "works", "fails")), str(rng.choice((30, 1_000, 4_000))))
        job = self._world.controller.state.live(old) if self._world.controller.readable else None
        tenant = job.spec.tenant if job is not None else "default"
        spec = JobSpec(command=command, cpu_milli=0, tenant=tenant)
        self.open_questions[key] = None
        self._ask(Submit(spec, key, instead=old))

    def _waits(self, job_id: str) -> bool:
        controller = self._world.controller
        job = controller.state.jobs.get(job_id) if controller.readable else None
        return job is not None and not job.attempt

    def _ask(self, request: Submit) -> None:
        key = request.key

        def answered(answer: Answer) -> None:
            self.open_questions.pop(key, None)
            taken = isinstance(answer, Accepted)
            self._counts["job replaced" if taken else "replacement refused"] += 1
            if isinstance(answer, Accepted):
                if self._accepted.setdefault(key, answer.id) != answer.id:
                    raise Untruth(f"{key} became {self._accepted[key]} and {answer.id}")
                if self._rng.random() < 0.3:  # an answer that got lost
                    self._world.ask(request, answered)

        def ask() -> None:
            if key in self.open_questions:
                self._world.ask(request, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()
