"""Seeded users and operators: what they submit, cancel and drain, and what their programs do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from shoal.model.commands import Launch
from shoal.model.job import JobSpec, Restart, Within
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Places, Policy, version_of
from shoal.model.report import Accepted, Answer, Cancel, Refused, SetIntent, SetPolicy, Submit
from storm.captruth import without_gpu_caps
from storm.labels import area_of
from storm.lives import Untruth
from storm.node import Fate
from storm.services import CRASHES, MUTE, SERVES
from storm.training import Training
from storm.waittruth import with_wishes
from storm.world import World

MANY = 1_000_000
ASK_AGAIN_MS = 1_500
POLICY_AGAIN_MS = 700
POLICY_ASKS = 4
ENDLESS = ("endless", SERVES, MUTE)
IMAGE_EVERY = 5  # jobs; some nodes cannot run images
LEAVING_PART = 0.3  # of the histories have clients that leave
SETTLED_MS = 200  # by then what was asked before is in the log
PROGRAMS = (
    *("works", "works", "works", "works", "fails", "fails-once", "flaky", "flaky"),
    *("trains", "trains", "hangs", "hangs-once", "idles"),
)
HANGS_FROM = 8  # steps: a process that compiles is not called stuck before half an hour is over


class SeededFates:
    """The command line names the program; the seed decides the rest for each member."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def __call__(self, launch: Launch) -> Fate:
        program, duration_text = launch.argv
        rng = random.Random(f"{self._seed}/{launch.ref}")
        duration_ms = int(duration_text) * rng.randrange(50, 150) // 100
        fails = (
            program in ("fails", CRASHES)
            or (program == "fails-once" and launch.ref.attempt == 1)
            or (program == "flaky" and rng.random() < 0.3)
        )
        training = self._training(launch, program)
        endless = program in ENDLESS or (training is not None and training.hangs_at)
        return Fate(
            training=training,
            duration_ms=None if endless else duration_ms,
            code=rng.choice((1, 2, 137)) if fails else 0,
            stopping_ms=rng.choice((0, 20, 300, 3_000, None)),
            stopped_code=rng.choice((143, 143, 0, 1)),
            rests_ms=rng.choice((2_000, MANY)) if program == "idles" else 0,
            getting_ms=rng.choice((0, 0, 0, 30, 700, 6_000)),
            shipping_ms=rng.choice((0, 0, 0, 30, 700, 6_000)),
        )

    def _training(self, launch: Launch, program: str) -> Training | None:
        """The same for all members of an attempt, except for the one that is stuck."""
        if program not in ("trains", "hangs", "hangs-once", "flaky"):
            return None
        rng = random.Random(f"{self._seed}/{launch.ref.job}/{launch.ref.attempt}")
        hangs = program == "hangs" or (program == "hangs-once" and launch.ref.attempt == 1)
        return Training(
            step_ms=rng.choice((100, 250)),
            saves_every=rng.choice((0, 5, 20)),
            hangs_at=rng.randrange(HANGS_FROM, 40) if hangs else 0,
            stuck=launch.ref.member == rng.randrange(int(launch.env["SHOAL_MEMBERS"])),
        )


class Users:
    """Ask until they are answered, and expect that a key names one job."""

    def __init__(
        self,
        world: World,
        nodes: Sequence[NodeSpec],
        rng: random.Random,
        counts: Counter[str],
        other_policy: Callable[[Policy], Policy],
    ) -> None:
        self.accepted: dict[str, str] = {}  # key -> job
        self.open_questions: dict[str, None] = {}  # keys of submissions without an answer
        self._world = world
        self._rng = rng
        self._counts = counts
        self._nodes = nodes
        self._other_policy = other_policy
        self.crowded = rng.random() < 0.35  # more jobs want GPUs, for longer, and may be stopped
        self._patience: random.Random | None = None  # None: clients wait for their answers
        self.wish: Callable[[JobSpec], JobSpec] = lambda spec: spec  # what else a job asks for
        # Where it is, as a tour finds it.
        self.wired: Callable[[NodeSpec], str] = lambda node: node.place
        self._too_large: dict[str, None] = {}  # keys of jobs accepted before a node was known

    def plan(self, jobs: int, until_ms: int) -> None:
        rng, timeline = self._rng, self._world.timeline
        for number in range(jobs):
            spec = self._draw_spec()
            if number % IMAGE_EVERY == 0:
                spec = msgspec.structs.replace(spec, image="work:1")
            submit = Submit(with_wishes(self.wish(spec), number), f"key-{number}")
            at_ms = rng.randrange(until_ms)
            timeline.at(at_ms, partial(self._submit, submit))
            if rng.random() < 0.1:  # an impatient client, or a proxy that repeats
                timeline.at(at_ms, partial(self._submit, submit))
            if rng.random() < 0.25:
                # A cancel and a repeated submission may come at the same moment.
                repeated = submit if number % 3 == 0 else None
                cancel = partial(self._cancel, submit.key, repeated)
                timeline.at(at_ms + rng.randrange(10_000), cancel)
        for _ in range(rng.randrange(4)):
            timeline.at(rng.randrange(until_ms), self._operate)
        for _ in range(rng.choice((0, 0, 1, 2))):
            timeline.at(rng.randrange(until_ms), self._change_policy)

    def plan_leaving(self, rng: random.Random, until_ms: int) -> None:
        """In some histories clients leave before they are answered. Most ask again with the same
        key; some never do. Drawn from a stream of its own, so that the rest stays the same."""
        if rng.random() > LEAVING_PART:
            return
        self._patience = rng
        for number in range(rng.randrange(1, 5)):
            submit = Submit(JobSpec(command=("works", "30")), f"left-{number}")
            leave = partial(self._world.ask, submit, lambda _: None, self._patience_ms())
            self._world.timeline.at(rng.randrange(until_ms), leave)

    def _patience_ms(self) -> int | None:
        if self._patience is None:
            return None
        patience_ms = self._patience.choice((None, None, 0, 1, 10, 30))
        self._counts["client left"] += patience_ms is not None
        return patience_ms

    def calm_down(self) -> None:
        """Every node is opened again, and jobs that the cluster cannot hold are cancelled."""
        self._patience = None
        self._world.timeline.after(SETTLED_MS, self._open_all)
        for key in self._too_large:
            self._cancel(key)
        controller = self._world.controller  # a job that needs every node would wait for ever
        controller.obey(without_gpu_caps(msgspec.structs.replace(controller.policy, spares=0)))

    def _open_all(self) -> None:
        """Only those that were closed: opening a node would end its quarantine, too. Jobs that need
        one group of nodes, and more of them than a group has by its wiring, wait for ever: their
        owners read why, and cancel them."""
        if not self._world.controller.readable:
            self._world.timeline.after(SETTLED_MS, self._open_all)
            return
        for name in self._world.machines:
            node = self._world.controller.state.nodes.get(name)
            if node is None or node.intent is not NodeIntent.OPEN:
                self._set_intent(name, NodeIntent.OPEN)
        if self._world.controller.policy.place is not Places.MEASURED:
            return
        nodes = [msgspec.structs.replace(node, place=self.wired(node)) for node in self._nodes]
        for job in self._world.controller.state.jobs.values():
            if job.spec.within_required and not self.possible(job.spec, nodes):
                self._counts["cancel asked"] += 1
                self._world.ask(Cancel(job.id), lambda _: None)

    def _draw_spec(self) -> JobSpec:
        rng = self._rng
        time_limit_ms = rng.choice((0, 0, 0, 0, 1_000, 6_000))
        program = "endless" if time_limit_ms and rng.random() < 0.3 else rng.choice(PROGRAMS)
        like = rng.choice(self._nodes)
        share = rng.choice((1, 2, 4))  # of that node
        members = rng.choice((1, 1, 1, 1, 2, 2, 3))
        gpus = rng.choice((1, like.gpus // share) if self.crowded else (0, 1, like.gpus // share))
        times_ms = (30, 1_000, 6_000, 15_000)[2 * self.crowded :]
        wishes = self._draw_wishes(members, gpus)
        if program == "trains":
            times_ms = (6_000, 25_000)
            if rng.random() < 0.7:  # over several nodes, of which one may be slow
                members = min(3, len(self._nodes))
                wishes.update(members_per_node=1, within_required=False)
                wishes.pop("members_max", None)
        return JobSpec(
            command=(program, str(rng.choice(times_ms))),
            members=members,
            gpus=gpus,
            cpu_milli=rng.choice((0, 1_000, like.cpu_milli // share)),
            memory_mb=rng.choice((0, 0, like.memory_mb // share)),
            priority=rng.choice((0, 0, 0, 5, -5)),
            **wishes,
            restart=rng.choice(list(Restart)),
            retries=rng.choice((0, 1, 3)),
            backoff_ms=rng.choice((0, 200, 1_500)),
            time_limit_ms=time_limit_ms,
            stop_grace_ms=rng.choice((0, 100, 1_000, 4_000)),
        )

    def _draw_wishes(self, members: int, gpus: int) -> dict[str, Any]:
        """Fields that only some jobs set."""
        rng = self._rng
        wishes: dict[str, Any] = {"tenant": rng.choice(("default", "red", "blue"))}
        if rng.random() < (0.8 if self.crowded else 0.5):
            wishes["preemptible"] = True
            wishes["checkpoint_ms"] = rng.choice((0, 500, 2_000))
        if rng.random() < 0.3:
            wishes["members_max"] = members + rng.randrange(4)
        if gpus == 1 and rng.random() < 0.4:
            wishes["gpu_milli"] = rng.choice((100, 300, 500, 700))
        elif gpus == 1 and rng.random() < 0.2:
            wishes["gpu_milli"], wishes["gpu_memory_mb"] = 0, rng.choice((10, 25, 60))
        if rng.random() < 0.3:
            wishes["within"] = rng.choice(list(Within))
            wishes["within_required"] = rng.random() < 0.5
        if gpus and rng.random() < 0.2:
            wishes["gpu_models"] = rng.choice((("small",), ("large",), ("small", "large")))
        if gpus and rng.random() < 0.1:
            wishes.setdefault("gpu_memory_mb", rng.choice((40, 80)))
        if rng.random() < 0.1:
            wishes["whole_nodes"] = True
        if rng.random() < 0.1:
            wishes["members_per_node"] = rng.choice(
                [n for n in range(1, members + 1) if not members % n]
            )
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
                if not self.possible(submit.spec):
                    self._too_large[submit.key] = None
                    self._cancel(submit.key)
            else:
                full = isinstance(answer, Refused) and answer.full
                self._counts["answer: too many jobs" if full else "answer: refused"] += 1

        def ask() -> None:
            if submit.key in self.open_questions:
                self._world.ask(submit, answered, self._patience_ms())
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    def possible(self, spec: JobSpec, nodes: Sequence[NodeSpec] = ()) -> bool:
        """Before any node has joined, a controller accepts jobs of any size."""
        depth = {Within.BLOCK: 1, Within.RACK: 2}.get(spec.within, 0)
        near = spec.within_required and spec.within is not Within.ANYWHERE
        groups: dict[str, int] = {}
        for node in nodes or self._nodes:
            area = area_of(node, spec)
            if area is None:
                continue
            names = {node.id} if near else {"anywhere"}
            if near and depth and node.place.count("/") >= depth - 1:
                names.add("/".join(["", *node.place.split("/")[:depth]]))
            for name in names:
                key = f"{area} {name}"
                groups[key] = groups.get(key, 0) + _held_by(node, spec)
        return max(groups.values(), default=0) >= spec.members

    def _cancel(self, key: str, repeated: Submit | None = None) -> None:
        if key in self.accepted:
            self._counts["cancel asked"] += 1
            self._world.ask(Cancel(self.accepted[key]), lambda _: None)
            if repeated is not None:
                self._submit(repeated)

    def _operate(self) -> None:
        """An operator closes a node, and may or may not open it again soon."""
        rng = self._rng
        node = rng.choice(self._nodes).id
        intent = rng.choice((NodeIntent.CORDONED, NodeIntent.DRAINING, NodeIntent.DRAINING))
        self._counts[f"node {intent.value}"] += 1
        self._set_intent(node, intent)
        again_ms = rng.randrange(20_000)
        self._world.timeline.after(again_ms, lambda: self._set_intent(node, NodeIntent.OPEN))

    def _change_policy(self) -> None:
        """Two admins look at the same policy, and each sets another one at the same moment. Each
        asks again if no answer comes."""
        self._counts["policy changed"] += 1
        seen = self._world.controller.policy
        other = self._other_policy(seen)
        rival = msgspec.structs.replace(other, patience_ms=other.patience_ms + 1)
        won: list[Policy] = []
        for policy in (other, rival):
            request = SetPolicy(policy, expected=version_of(seen))
            self._set_policy(request, won, POLICY_ASKS)

    def _set_policy(self, request: SetPolicy, won: list[Policy], left: int) -> None:
        over = False

        def answered(answer: Answer) -> None:
            nonlocal over
            over = True
            if isinstance(answer, Accepted) and request.policy not in won:
                won.append(request.policy)
            self._counts["policy refused"] += isinstance(answer, Refused)
            if len(won) > 1:
                raise Untruth("two policies were made from the same one, and both were accepted")

        def again() -> None:
            if not over:
                self._set_policy(request, won, left - 1)

        if left:
            self._world.ask(request, answered)
            self._world.timeline.after(POLICY_AGAIN_MS, again)

    def _set_intent(self, node: str, intent: NodeIntent) -> None:
        self._world.ask(SetIntent(node, intent, why="a fan"), lambda _: None)


def _held_by(node: NodeSpec, spec: JobSpec) -> int:
    """How many members the node holds when it is empty."""
    cpus = node.cpu_milli // spec.cpu_milli if spec.cpu_milli else MANY
    memory = node.memory_mb // spec.memory_mb if spec.memory_mb else MANY
    if spec.image and not node.containers:
        return 0
    gpus = MANY
    if spec.gpus:
        share = spec.gpu_milli or -(-1000 * spec.gpu_memory_mb // node.gpu_memory_mb)
        gpus = node.gpus // spec.gpus if share >= 1000 else node.gpus * (1000 // share)
        if spec.gpu_models and node.gpu_model not in spec.gpu_models:
            gpus = 0
        if node.gpu_memory_mb < spec.gpu_memory_mb:
            gpus = 0
    held = min(cpus, memory, gpus)
    if spec.members_per_node:
        return spec.members_per_node if held >= spec.members_per_node else 0
    return held
