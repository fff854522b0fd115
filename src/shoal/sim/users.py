"""Seeded users and operators: what they submit, cancel and drain, and what their programs do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from shoal.model.commands import Launch
from shoal.model.job import JobSpec, Restart, Within
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.report import Accepted, Answer, Cancel, SetIntent, Submit
from shoal.sim.lives import Untruth
from shoal.sim.machine import Fate
from shoal.sim.world import World

MANY = 1_000_000
ASK_AGAIN_MS = 1_500
PROGRAMS = ("works", "works", "works", "fails", "fails-once", "flaky")


class SeededFates:
    """The command line names the program; the seed decides the rest for each member."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def __call__(self, launch: Launch) -> Fate:
        program, duration_text = launch.argv
        rng = random.Random(f"{self._seed}/{launch.ref}")
        duration_ms = int(duration_text) * rng.randrange(50, 150) // 100
        fails = (
            program == "fails"
            or (program == "fails-once" and launch.ref.attempt == 1)
            or (program == "flaky" and rng.random() < 0.3)
        )
        return Fate(
            duration_ms=None if program == "endless" else duration_ms,
            code=rng.choice((1, 2, 137)) if fails else 0,
            stopping_ms=rng.choice((0, 20, 300, 3_000, None)),
            stopped_code=rng.choice((143, 143, 0, 1)),
        )


class Users:
    """Ask until they are answered, and are sure that a key names one job."""

    def __init__(
        self, world: World, nodes: Sequence[NodeSpec], rng: random.Random, counts: Counter[str]
    ) -> None:
        self.accepted: dict[str, str] = {}  # key -> job
        self.open_questions: dict[str, None] = {}  # keys of submissions without an answer
        self._world = world
        self._rng = rng
        self._counts = counts
        self._nodes = nodes
        self._too_large: dict[str, None] = {}  # keys of jobs accepted before a node was known

    def plan(self, jobs: int, until_ms: int) -> None:
        rng, agenda = self._rng, self._world.agenda
        for number in range(jobs):
            submit = Submit(self._draw_spec(), f"key-{number}")
            at_ms = rng.randrange(until_ms)
            agenda.at(at_ms, partial(self._submit, submit))
            if rng.random() < 0.1:  # an impatient client, or a proxy that repeats
                agenda.at(at_ms, partial(self._submit, submit))
            if rng.random() < 0.25:
                agenda.at(at_ms + rng.randrange(10_000), partial(self._cancel, submit.key))
        for _ in range(rng.randrange(4)):
            agenda.at(rng.randrange(until_ms), self._operate)

    def calm_down(self) -> None:
        """Every node is opened again, and nobody waits for what the cluster does not have."""
        for node in self._world.machines:
            self._set_intent(node, NodeIntent.OPEN)
        for key in self._too_large:
            self._cancel(key)

    def _draw_spec(self) -> JobSpec:
        rng = self._rng
        time_limit_ms = rng.choice((0, 0, 0, 0, 1_000, 6_000))
        program = "endless" if time_limit_ms and rng.random() < 0.3 else rng.choice(PROGRAMS)
        like = rng.choice(self._nodes)
        share = rng.choice((1, 2, 4))  # of that node
        members = rng.choice((1, 1, 1, 1, 2, 2, 3))
        gpus = rng.choice((0, 1, like.gpus // share))
        return JobSpec(
            command=(program, str(rng.choice((30, 1_000, 6_000, 15_000)))),
            members=members,
            gpus=gpus,
            cpu_milli=rng.choice((0, 1_000, like.cpu_milli // share)),
            memory_mb=rng.choice((0, 0, like.memory_mb // share)),
            priority=rng.choice((0, 0, 0, 5, -5)),
            **self._draw_wishes(members, gpus),
            restart=rng.choice(list(Restart)),
            retries=rng.choice((0, 1, 3)),
            backoff_ms=rng.choice((0, 200, 1_500)),
            time_limit_ms=time_limit_ms,
            stop_grace_ms=rng.choice((0, 100, 1_000, 4_000)),
        )

    def _draw_wishes(self, members: int, gpus: int) -> dict[str, Any]:
        """What not every job asks for; none of it makes a possible job impossible."""
        rng = self._rng
        wishes: dict[str, Any] = {"tenant": rng.choice(("default", "red", "blue"))}
        if rng.random() < 0.5:
            wishes["preemptible"] = True
            wishes["checkpoint_ms"] = rng.choice((0, 500, 2_000))
        if rng.random() < 0.3:
            wishes["members_max"] = members + rng.randrange(4)
        if gpus == 1 and rng.random() < 0.4:
            wishes["gpu_milli"] = rng.choice((100, 300, 500, 700))
        if rng.random() < 0.3:
            wishes["within"] = rng.choice(list(Within))
        if rng.random() < 0.3:
            wishes["estimate_ms"] = rng.choice((30, 1_000, 10_000))
        return wishes

    def _submit(self, submit: Submit) -> None:
        self.open_questions[submit.key] = None

        def answered(answer: Answer) -> None:
            self.open_questions.pop(submit.key, None)
            if isinstance(answer, Accepted):
                self._counts["answer: accepted"] += 1
                if self.accepted.setdefault(submit.key, answer.id) != answer.id:
                    raise Untruth(f"{submit.key} became {self.accepted[submit.key]}, {answer.id}")
                if not self._possible(submit.spec):
                    self._too_large[submit.key] = None
                    self._cancel(submit.key)
            else:
                self._counts["answer: refused"] += 1

        def ask() -> None:
            if submit.key in self.open_questions:
                self._world.ask(submit, answered)
                self._world.agenda.after(ASK_AGAIN_MS, ask)

        ask()

    def _possible(self, spec: JobSpec) -> bool:
        """Before any node has joined, a controller accepts whatever may be possible one day."""
        held = 0
        for node in self._nodes:
            have_and_need = (
                (node.gpus, spec.gpus),
                (node.cpu_milli, spec.cpu_milli),
                (node.memory_mb, spec.memory_mb),
            )
            held += min((have // need for have, need in have_and_need if need), default=MANY)
        return held >= spec.members

    def _cancel(self, key: str) -> None:
        if key in self.accepted:
            self._counts["cancel asked"] += 1
            self._world.ask(Cancel(self.accepted[key]), lambda _: None)

    def _operate(self) -> None:
        """An operator closes a node, and may or may not open it again soon."""
        rng = self._rng
        node = rng.choice(self._nodes).id
        intent = rng.choice((NodeIntent.CORDONED, NodeIntent.DRAINING, NodeIntent.DRAINING))
        self._counts[f"node {intent.value}"] += 1
        self._set_intent(node, intent)
        again_ms = rng.randrange(20_000)
        self._world.agenda.after(again_ms, lambda: self._set_intent(node, NodeIntent.OPEN))

    def _set_intent(self, node: str, intent: NodeIntent) -> None:
        self._world.ask(SetIntent(node, intent), lambda _: None)
