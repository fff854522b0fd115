"""Jobs with leases in the storm: renewals that are late, lost or repeated, and heads that are gone
for longer than a lease."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec
from shoal.model.report import Accepted, Answer, Refused, RenewLease, Submit
from storm.controller import Moment
from storm.faults import BadNetwork, Cut
from storm.lives import Untruth
from storm.users import ASK_AGAIN_MS
from storm.world import World

SKEW_MS = 10**12  # what a node's clock may be ahead or behind
SLOW_PARTS = 2_000  # it gains or loses up to one part in so many
LOST_PART, AGAIN_PART = 0.2, 0.3


class Leases:
    """Whoever renews knows the cluster's clock from an earlier moment, and asks later."""

    def __init__(
        self,
        world: World,
        network: BadNetwork,
        nodes: Sequence[NodeSpec],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self.open_questions: dict[str, None] = {}  # by key
        self._world, self._network, self._rng, self._counts = world, network, rng, counts
        self._nodes = [spec.id for spec in nodes]
        self._calm = False
        self._accepted: dict[str, str] = {}
        self._clocks: dict[str, tuple[int, int]] = {}  # node -> what it is ahead, and gains

    def plan(self, until_ms: int) -> None:
        rng, at = self._rng, self._world.timeline.at
        self._world.clock_of = self._clock_of
        for number in range(rng.randrange(2, 8)):
            at(rng.randrange(until_ms), partial(self._submit, f"lease-{number}"))
        for _ in range(rng.randrange(5)):
            at(rng.randrange(until_ms), self._cut)
        for _ in range(rng.randrange(3)):
            at(rng.randrange(until_ms), self._lose_head)
        if rng.random() < 0.5:
            self._network.slow_down()

    def calm_down(self) -> None:
        """Nobody renews any more, so the last lease of each job is its end."""
        self._calm = True
        self._network.cuts.clear()

    def _clock_of(self, node: str, now_ms: int) -> int:
        if node not in self._clocks:
            skew_ms = self._rng.randrange(-SKEW_MS, SKEW_MS)
            self._clocks[node] = skew_ms, self._rng.choice((-1, 0, 1))
        skew_ms, gains = self._clocks[node]
        return now_ms + skew_ms + gains * now_ms // SLOW_PARTS

    def _submit(self, key: str) -> None:
        rng, now_ms = self._rng, self._world.timeline.now_ms
        length_ms = rng.choice((3_000, 8_000, 20_000))
        spec = JobSpec(
            command=(rng.choice(("works", "endless", "endless")), str(rng.choice((500, 9_000)))),
            members=rng.choice((1, 1, 2)),
            cpu_milli=0,
            restart=rng.choice(list(Restart)),
            retries=1,
            preemptible=rng.random() < 0.3,
            stop_grace_ms=rng.choice((0, 100, 1_000, 4_000)),
        )
        request = Submit(spec, key, until_ms=now_ms + length_ms)
        self.open_questions[key] = None

        def answered(answer: Answer) -> None:
            self.open_questions.pop(key, None)
            if isinstance(answer, Accepted):
                if self._accepted.setdefault(key, answer.id) != answer.id:
                    raise Untruth(f"{key} became {self._accepted[key]} and {answer.id}")
                self._go_on(answer.id, length_ms)
            else:
                self._counts["lease refused"] += 1

        def ask() -> None:
            if key in self.open_questions:
                self._world.ask(request, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def _go_on(self, job: str, length_ms: int) -> None:
        """Renew it from time to time, until somebody forgets that."""
        rng = self._rng
        if self._calm or rng.random() < 0.1:
            return
        until_ms = self._world.timeline.now_ms + length_ms
        if rng.random() >= LOST_PART:
            for late_ms in (rng.choice((0, 50, 2_000, 10_000)) for _ in range(1 + self._again())):
                self._world.timeline.after(late_ms, partial(self._renew, job, until_ms))
        self._world.timeline.after(length_ms // 3, partial(self._go_on, job, length_ms))

    def _again(self) -> bool:
        return self._rng.random() < AGAIN_PART

    def _renew(self, job: str, until_ms: int) -> None:
        def answered(answer: Answer) -> None:
            said = "refused" if isinstance(answer, Refused) else "accepted"
            self._counts[f"renewal {said}"] += 1

        self._world.ask(RenewLease(job, until_ms), answered)

    def _cut(self) -> None:
        """For longer than the shortest leases last."""
        node, after = self._rng.choice(self._nodes), self._world.timeline.after
        if not self._calm:
            self._network.cuts[node] = self._rng.choice((Cut.BOTH, Cut.COMMANDS, Cut.REPORTS))
            after(self._rng.randrange(3_000, 25_000), partial(self._mend, node))

    def _mend(self, node: str) -> None:
        self._network.cuts.pop(node, None)

    def _lose_head(self) -> None:
        if not self._calm and self._world.controller.up:
            self._counts["head gone for long"] += 1
            self._world.crash_controller(Moment.IDLE, self._rng.randrange(3_000, 25_000))
