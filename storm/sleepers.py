"""Sleep, decided by a seed: nodes that can do it, users who ask for it, and how each nap goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from shoal.model.commands import Launch
from shoal.model.job import JobSpec, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Sleeping
from shoal.model.report import Accepted, Answer, SleepJob, WakeJob
from shoal.model.resources import WHOLE_GPU_MILLI
from storm.lives import Lives
from storm.naps import Nap, Nights
from storm.sleeptruth import SleepTruth
from storm.users import Users
from storm.witness import NapWitness
from storm.world import World

NO_SLEEP_PART = 0.15  # of the jobs there
REFUSED_PART, LOST_PART = 0.12, 0.06  # of the naps
CROWDED_PART = 0.8  # of these histories have more jobs that want GPUs, for longer
ASK_AGAIN_MS = 700


def equipped(rng: random.Random, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
    """The same nodes, of which most can put jobs to sleep, and often with fewer GPUs, so that jobs
    wait for each other."""
    most = rng.choice((1, 2, 2, 8))
    return [
        msgspec.structs.replace(
            node,
            gpus=min(node.gpus, most),
            sleep=rng.choice(("freeze", "freeze", "cuda", "cuda", "")),
            remaps=rng.random() < 0.5,
        )
        for node in nodes
    ]


def with_sleep(rng: random.Random, policy: Policy) -> Policy:
    return msgspec.structs.replace(
        policy,
        sleep=rng.choice((*[Sleeping.PREFER] * 4, Sleeping.NEVER)),
        sleepers_max=rng.choice((0, 1, 3, 8, 8, 8, 8)),
        sleep_memory_percent=rng.choice((1, 10, 50, 100)),
        turn_cost_percent=rng.choice((0, 0, 20, 50, 50)),
        turn_ms_min=rng.choice((300, 1_000, 3_000)),
        run_ms_min=rng.choice((0, 0, 500)),
        idle_sleeps=rng.random() < 0.5,
    )


class SeededNights(Nights):
    def __init__(
        self, seed: str, nodes: Sequence[NodeSpec], witness: NapWitness, counts: Counter[str]
    ) -> None:
        super().__init__(witness)
        self._counts = counts
        self.calm = False  # whoever sleeps can be woken
        self._seed = seed
        self._cuda = {node.id for node in nodes if node.sleep == "cuda"}
        self._tells = {
            node.id for node in nodes if random.Random(f"{seed}/{node.id}").random() < 0.5
        }

    def tells(self, node: str, /) -> bool:
        return node in self._cuda & self._tells

    def note(self, what: str, /) -> None:
        self._counts[what] += 1

    def nap(self, ref: MemberRef, number: int, /) -> Nap:
        rng = random.Random(f"{self._seed}/{ref}/{number}")
        return Nap(
            locks_ms=rng.choice((0, 0, 5, 50, 500)),
            moves_ms=rng.choice((0, 10, 100, 1_500, 4_000)),
            refuses=rng.random() < REFUSED_PART,
            wakes_ms=rng.choice((0, 10, 100, 1_500)),
            lost=rng.random() < LOST_PART and not self.calm,
            full=rng.choice((0, 0, 0, 0, 0, 1, 2)),
        )

    def gpu_mb(self, launch: Launch, /) -> int:
        """The same for all attempts, and never more than the smallest GPU has, or share of one."""
        if launch.node not in self._cuda:
            return 0
        whole = launch.gpu_milli == WHOLE_GPU_MILLI and not launch.gpu_memory_mb
        some_mb = (5, 20, 40) if whole else (1, 2, 4)
        return random.Random(f"{self._seed}/{launch.ref.job}").choice(some_mb) * len(launch.gpus)


class Sleepers:
    """Users who put jobs to sleep and wake them, or forget to."""

    def __init__(
        self,
        world: World,
        users: Users,
        lives: Lives,
        truth: SleepTruth,
        nights: SeededNights,
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._users = users
        self._lives = lives
        self._truth = truth
        self._nights = nights
        self._rng = rng
        self._counts = counts

    def wish(self, spec: JobSpec) -> JobSpec:
        if self._rng.random() > NO_SLEEP_PART:
            return spec
        return msgspec.structs.replace(spec, no_sleep=True)

    def plan(self, until_ms: int) -> None:
        self._users.crowded |= self._rng.random() < CROWDED_PART
        for _ in range(self._rng.randrange(40)):
            self._world.timeline.at(self._rng.randrange(until_ms), self._ask)

    def _ask(self) -> None:
        """Mostly of jobs that run."""
        rng = self._rng
        running = [life.ref.job for life in self._lives.living if not life.asleep]
        asleep = self._truth.left_alone
        if rng.random() < 0.3 and asleep:
            self._wake(rng.choice(asleep))
            return
        jobs = running if running and rng.random() < 0.9 else list(self._users.accepted.values())
        if not jobs:
            return
        job = rng.choice(jobs)
        self._world.ask(SleepJob(job, "ann"), lambda answer: self._told("SleepJob", answer))
        if rng.random() < 0.5:
            self._world.timeline.after(rng.randrange(6_000), lambda: self._wake(job))

    def _wake(self, job: str) -> None:
        self._world.ask(WakeJob(job, "ann"), lambda answer: self._told("WakeJob", answer))

    def _told(self, what: str, answer: Answer) -> None:
        self._counts[f"{what} {'accepted' if isinstance(answer, Accepted) else 'refused'}"] += 1

    def calm_down(self) -> None:
        """Whoever sleeps is woken from now on, so that all can end."""
        self._nights.calm = True
        self._wake_all()

    def _wake_all(self) -> None:
        for job in self._truth.left_alone:
            self._wake(job)
        self._world.timeline.after(ASK_AGAIN_MS, self._wake_all)
