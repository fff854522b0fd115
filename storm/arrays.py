"""Users in the storm who submit arrays, cancel them or single elements, and retry what failed."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import msgspec

from shoal.model.job import JobSpec, Restart
from shoal.model.report import Accepted, Answer, Cancel, Retry, Submit
from shoal.model.sweep import IndexRange, Sweep
from storm.lives import Untruth
from storm.world import World

ARRAYS_PART = 0.4  # of the histories have such users
ASK_AGAIN_MS = 1_500
PROGRAMS = ("works", "works", "works", "fails", "fails-once", "flaky", "flaky")
ELEMENTS_MAX = 40
HALVED_PART = 0.4  # of the arrays stop trials early


class Arrays:
    """They ask until they are answered, and draw from a stream of their own."""

    def __init__(self, world: World, rng: random.Random, counts: Counter[str]) -> None:
        self.open_questions: dict[str, None] = {}  # by key
        self._accepted: dict[str, str] = {}
        self._world = world
        self._rng = rng
        self._counts = counts

    def plan(self, until_ms: int) -> None:
        rng = self._rng
        if rng.random() > ARRAYS_PART:
            return
        for number in range(rng.randrange(1, 4)):
            submit = Submit(self._spec(), f"array-{number}")
            at_ms = rng.randrange(until_ms)
            self._world.timeline.at(at_ms, partial(self._submit, submit))
            for _ in range(rng.randrange(5)):
                change = rng.choice((self._cancel, self._cancel_one, self._retry, self._retry))
                later_ms = at_ms + rng.randrange(20_000)
                self._world.timeline.at(later_ms, partial(change, submit.key))

    def _spec(self) -> JobSpec:
        rng = self._rng
        first, step = rng.choice((0, 0, 5)), rng.choice((1, 1, 3))
        last = first + step * rng.randrange(rng.choice((3, ELEMENTS_MAX)))
        sweep = Sweep(ranges=(IndexRange(first, last, step),), at_most=rng.choice((0, 0, 1, 3)))
        command = (rng.choice(PROGRAMS), str(rng.choice((30, 300, 2_000))))
        if rng.random() < HALVED_PART:
            command = ("trains", str(rng.choice((2_000, 6_000))))
            sweep = msgspec.structs.replace(
                sweep, halve=rng.choice((2, 3)), rung=rng.choice((1, 4))
            )
        return JobSpec(
            command=command,
            cpu_milli=rng.choice((0, 500)),
            tenant=rng.choice(("default", "red", "blue")),
            restart=rng.choice(list(Restart)),
            retries=rng.choice((0, 0, 1)),
            backoff_ms=rng.choice((0, 200)),
            stop_grace_ms=100,
            sweep=sweep,
        )

    def _submit(self, submit: Submit) -> None:
        self._counts["array"] += 1
        self.open_questions[submit.key] = None

        def answered(answer: Answer) -> None:
            self.open_questions.pop(submit.key, None)
            if isinstance(answer, Accepted):
                if self._accepted.setdefault(submit.key, answer.id) != answer.id:
                    raise Untruth(f"{submit.key} became {self._accepted[submit.key]}, {answer.id}")
            else:
                self._counts["array refused"] += 1

        def ask() -> None:
            if submit.key in self.open_questions:
                self._world.ask(submit, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def _cancel(self, key: str) -> None:
        if key in self._accepted:
            self._counts["array cancelled"] += 1
            self._world.ask(Cancel(self._accepted[key]), lambda _: None)

    def _cancel_one(self, key: str) -> None:
        if key in self._accepted:
            job = f"{self._accepted[key]}.{self._rng.randrange(ELEMENTS_MAX)}"
            self._world.ask(Cancel(job), lambda _: None)

    def _retry(self, key: str) -> None:
        """All that did not succeed, or one of the first."""
        if key not in self._accepted:
            return
        one = self._rng.choice(("", "", f".{self._rng.randrange(6)}"))

        def answered(answer: Answer) -> None:
            self._counts["array retried"] += isinstance(answer, Accepted)

        self._world.ask(Retry(f"{self._accepted[key]}{one}"), answered)
