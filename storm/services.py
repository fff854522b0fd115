"""Seeded services: requests that set, change and stop them, what their servers do, and what the
gateway sees of them: late, not at all, or wrong for a while."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, MemberRef, Phase
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Answer, Refused, SetService, StopService
from shoal.model.service import (
    DAY_SLOTS,
    Probe,
    ReplicaLoad,
    Rollout,
    Route,
    Routing,
    Scale,
    Service,
    ServiceLoad,
    ServiceSpec,
)
from shoal.model.tokens import Goals, TokenLoad
from storm.faults import BadNetwork
from storm.lives import Life, Lives
from storm.world import World

PRIORITY = 100  # the priority of services
ASK_AGAIN_MS = 1_500
LOOK_MS = 1_000
LATEST_MS = 900  # a look that takes longer is overtaken by the next
SERVES, MUTE, CRASHES = "serves", "serves-mute", "serves-crashes"
PROGRAMS = (SERVES, SERVES, SERVES, SERVES, MUTE, CRASHES)
WORK_LEVELS = (0, 0, 1, 3, 8, 20)


def is_good(spec: ServiceSpec) -> bool:
    """Its replicas get ready."""
    return spec.replica.command[0] == SERVES


def ready_at_ms(spec: JobSpec, life: Life) -> int | None:
    """When its probe answers; None: never."""
    program, delay_text = spec.command
    return life.started_ms + int(delay_text) if program == SERVES else None


class Services:
    """All services of one history, their users, and the gateway link beside the controller."""

    def __init__(
        self,
        world: World,
        network: BadNetwork,
        lives: Lives,
        nodes: Sequence[NodeSpec],
        policy: Policy,
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._world = world
        self._network = network
        self._lives = lives
        self._rng = rng
        self._counts = counts
        self._nodes = nodes
        self._has_gpus = any(node.gpus for node in nodes)
        self._calm = False
        # All replicas of all services, and one more each, find a port on a single node. A gang
        # needs two.
        self._gangs = policy.port_count >= 10
        self._names = [f"s{number}" for number in range(2 if self._gangs else 1)]
        self._asked: dict[str, int] = {}  # the last wish about each service, by its number
        self._wishes = 0
        self._work: dict[str, int] = {}
        self._hung: set[tuple[str, int]] = set()  # jobs and attempts that answer nothing any more
        self._unanswered: dict[tuple[str, int], int] = {}
        self._drained_ms: dict[str, int] = {}  # job -> when what it has in flight is answered

    def plan(self, until_ms: int) -> None:
        rng, timeline = self._rng, self._world.timeline
        for name in self._names:
            at_ms = rng.randrange(until_ms // 2)
            spec = self._draw_spec(name)
            timeline.at(at_ms, partial(self._set, spec))
            for _ in range(rng.randrange(4)):
                at_ms += rng.randrange(until_ms // 2)
                spec = self._draw_change(spec)
                timeline.at(at_ms, partial(self._set, spec))
            if rng.random() < 0.3:
                timeline.at(rng.randrange(until_ms), partial(self._stop, name))
        timeline.after(LOOK_MS, self._look)

    def calm_down(self) -> None:
        self._calm = True

    def unsettled(self) -> str:
        """The first thing that is not yet as it was asked for, in words."""
        if not self._world.controller.readable:
            return "the controller recovers"
        state = self._world.controller.state
        for service in state.services.values():
            # A version that never gets ready, and has none to go back to, is left alone.
            settles = service.stopping or is_good(service.spec) or service.before is not None
            if settles and (text := _unsettled(state, service)):
                return text
            for job_id in service.ready:
                if (job_id, state.jobs[job_id].attempt) in self._hung:
                    return f"{job_id} of {service.spec.name} hangs, and is not replaced"
        return f"unanswered: {list(self._asked)}" if self._asked else ""

    def stop_all(self) -> None:
        for name in self._world.controller.state.services:
            self._stop(name)

    # -- users -----------------------------------------------------------------------------

    def _draw_spec(self, name: str) -> ServiceSpec:
        spec = self._draw_light(name)
        if name != self._names[0] or self._rng.random() > 0.3:
            return spec
        # Two of its replicas do not fit on a node, so a roll-out has to replace.
        self._counts["service of large replicas"] += 1
        replace = msgspec.structs.replace
        most = max(node.cpu_milli for node in self._suited(spec.replica.gpus))
        replica = replace(spec.replica, cpu_milli=most * 6 // 10, members=1)
        scale = Scale(least=1, most=1)
        return replace(spec, replica=replica, scale=scale, rollout=Rollout.REPLACE, at_a_time=1)

    def _draw_light(self, name: str) -> ServiceSpec:
        rng = self._rng
        least = rng.choice((0, 1, 1, 2))
        gpu_milli = rng.choice((0, 100)) if self._has_gpus else 0
        spec = ServiceSpec(
            name=name,
            replica=JobSpec(
                command=self._draw_command(),
                cpu_milli=rng.choice((0, 100)),
                gpus=int(gpu_milli > 0),
                gpu_milli=gpu_milli or 1000,
                priority=PRIORITY,
                stop_grace_ms=rng.choice((0, 100, 1_000)),
                **self._draw_gang(int(gpu_milli > 0)),
            ),
            scale=self._draw_scale(least),
            probe=Probe(start_ms=rng.choice((4_000, 8_000)), failures=rng.choice((2, 5))),
            drain_ms=rng.choice((1_000, 5_000, 20_000)),
            sleep_after_ms=rng.choice((0, 0, 1_000, 5_000)),
            **self._draw_rollout(),
        )
        if spec.scale.target == 1:  # no more draws: worlds stay as their seeds made them
            return spec
        self._counts["service with goals"] += 1
        route = Route(service=name, routing=Routing.CACHE)
        return msgspec.structs.replace(spec, route=route, goals=Goals(ttft_ms=500, share_milli=900))

    def _judge(self, service: Service, work: int) -> dict[str, Any]:
        """What a router would see: a few bad seconds, and a day of which some parts are known."""
        if not service.spec.goals:
            return {}
        now_ms = self._world.timeline.now_ms
        bad = 0 if self._calm or now_ms // 4_000 % 3 else 10 * work
        self._counts["look at missed goals"] += bool(bad)
        day = tuple((now_ms // 1_000 + slot) % 7 * 1_000 - 1 for slot in range(DAY_SLOTS))
        return {"tokens": TokenLoad(judged=20 * work, good=20 * work - bad), "day": day}

    def _suited(self, gpus: int) -> list[NodeSpec]:
        """The nodes that stay, with so many GPUs: a replica that fits nowhere is never ready."""
        return [node for node in self._nodes if node.gpus >= gpus]

    def _draw_gang(self, gpus: int) -> dict[str, Any]:
        """A third of the replicas are gangs, some of them with a member on each node."""
        if not self._gangs or self._rng.random() > 0.3:
            return {}
        self._counts["service of gangs"] += 1
        apart = len(self._nodes) > 1 and self._rng.random() < 0.5
        fits = len(self._suited(gpus)) > 1
        return {"members": 2, "members_per_node": int(apart and fits)}

    def _draw_rollout(self) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            return {}
        return {"rollout": Rollout.REPLACE, "at_a_time": self._rng.choice((0, 1, 2))}

    def _draw_command(self) -> tuple[str, str]:
        return self._rng.choice(PROGRAMS), str(self._rng.choice((10, 300, 2_000)))

    def _draw_scale(self, least: int) -> Scale:
        rng = self._rng
        return Scale(
            least=least,
            most=max(1, least, rng.choice((1, 2))),
            target=rng.choice((1, 4)),
            down_after_ms=rng.choice((1_000, 5_000)),
            idle_ms=rng.choice((2_000, 10_000)),
        )

    def _draw_change(self, spec: ServiceSpec) -> ServiceSpec:
        replace = msgspec.structs.replace
        if spec.at_a_time and spec.replica.cpu_milli > 100:
            return replace(spec, replica=replace(spec.replica, command=self._draw_command()))
        if self._rng.random() < 0.2:  # in the middle of a roll-out, perhaps
            return replace(spec, **{"rollout": Rollout.SURGE, **self._draw_rollout()})
        if self._rng.random() < 0.3:
            return replace(spec, scale=self._draw_scale(self._rng.choice((0, 1, 2))))
        return replace(spec, replica=replace(spec.replica, command=self._draw_command()))

    def _set(self, spec: ServiceSpec) -> None:
        if not self._calm:
            self._counts["service asked for"] += 1
            self._ask(spec.name, SetService(spec))

    def _stop(self, name: str) -> None:
        self._counts["service stop asked"] += 1
        self._ask(name, StopService(name))

    def _ask(self, name: str, request: SetService | StopService) -> None:
        """Ask until it is answered, or something else is wanted."""
        self._wishes += 1
        wish = self._asked[name] = self._wishes

        def answered(answer: Answer) -> None:
            waits = isinstance(answer, Refused) and "is stopping" in answer.message
            if self._asked.get(name) == wish and not waits:
                del self._asked[name]
                self._counts["service accepted"] += isinstance(answer, Accepted)

        def ask() -> None:
            if self._asked.get(name) == wish:
                self._world.ask(request, answered)
                self._world.timeline.after(ASK_AGAIN_MS, ask)

        ask()

    # -- the gateway link and its gateway --------------------------------------------------

    def _look(self) -> None:
        """Reads the controller's state as the gateway link does, and stops and starts with it."""
        controller, rng = self._world.controller, self._rng
        if controller.readable:
            for name, service in controller.state.services.items():
                if not self._calm and rng.random() < 0.2:
                    self._work[name] = rng.choice(WORK_LEVELS)
                load, attempts = self._see(controller.state, service)
                luck = 1.0 if self._calm else rng.random()
                if luck < 0.1:
                    self._counts["look at a service lost"] += 1
                    continue
                late_ms = rng.randrange(LATEST_MS) if luck < 0.3 else 1
                if luck < 0.15:
                    self._counts["gateway in trouble"] += 1
                    load = ServiceLoad(service=name, ready=load.ready, trouble="out of reach")
                hear = partial(self._hear, controller.life, load, attempts)
                self._world.timeline.after(late_ms, hear)
        self._world.timeline.after(LOOK_MS, self._look)

    def _hear(self, life: int, load: ServiceLoad, attempts: dict[str, int]) -> None:
        """Which replicas are ready is looked up when the gateway has answered."""
        controller = self._world.controller
        if not controller.readable or controller.life != life:
            return
        jobs = controller.state.jobs
        ready = tuple(
            job_id
            for job_id in load.ready
            if job_id in jobs
            and jobs[job_id].phase is Phase.RUNNING
            and jobs[job_id].attempt == attempts[job_id]
        )
        controller.served(msgspec.structs.replace(load, ready=ready))

    def _see(self, state: State, service: Service) -> tuple[ServiceLoad, dict[str, int]]:
        name, now_ms = service.spec.name, self._world.timeline.now_ms
        ready = []
        for job_id in state.replicas.get(name, {}):
            life = self._reached(state.jobs[job_id])
            at_ms = ready_at_ms(state.jobs[job_id].spec, life) if life is not None else None
            if at_ms is not None and at_ms <= now_ms:
                ready.append(job_id)
            if job_id in service.ready:
                self._feel(state.jobs[job_id], answers=life is not None)
        serving = [job_id for job_id in service.ready if job_id not in service.draining]
        work = self._work.get(name, 0)
        seen = {}
        for place, job_id in enumerate(serving):
            share = work // len(serving) + (place < work % len(serving))
            up = self._reached(state.jobs[job_id]) is not None
            seen[job_id] = ReplicaLoad(up=up, in_flight=share)
        for job_id in service.draining:
            if job_id in service.ready:
                more_ms = self._rng.choice((0, 0, 3_000, 30_000))
                self._drained_ms.setdefault(job_id, now_ms + more_ms)
                up = self._reached(state.jobs[job_id]) is not None
                seen[job_id] = ReplicaLoad(up=up, in_flight=int(self.has_work(job_id)))
        load = ServiceLoad(
            service=name,
            in_flight=sum(each.in_flight for each in seen.values()),
            held=0 if serving else work,
            replicas=seen,
            ready=tuple(ready),
            unanswered={
                job_id: times
                for job_id in service.ready
                if (times := self._unanswered.get((job_id, state.jobs[job_id].attempt), 0))
            },
            **self._judge(service, work),
        )
        return load, {job_id: state.jobs[job_id].attempt for job_id in ready}

    def _feel(self, job: Job, *, answers: bool) -> None:
        """Probes of a replica that was ready; sometimes one hangs for good."""
        key = job.id, job.attempt
        if not self._calm and self._rng.random() < 0.05:
            self._counts["replica hangs"] += key not in self._hung
            self._hung.add(key)
        hangs = key in self._hung or not answers
        self._unanswered[key] = self._unanswered.get(key, 0) + 1 if hangs else 0

    def hangs(self, job_id: str, attempt: int) -> bool:
        """It does not answer, or could not be reached at the last probe."""
        return self._unanswered.get((job_id, attempt), 0) > 0

    def has_work(self, job_id: str) -> bool:
        """Whether a replica that drains has requests left; they take a drawn time."""
        return self._world.timeline.now_ms < self._drained_ms.get(job_id, 0)

    def _reached(self, job: Job) -> Life | None:
        """Its living process, if the way to its node is open."""
        if job.phase is not Phase.RUNNING:
            return None
        if not self._network.calm and job.members[0].slice.node in self._network.cuts:
            return None
        life = self._lives.all.get(MemberRef(job.id, job.attempt, 0))
        return life if life is not None and life.how is None else None


def _unsettled(state: State, service: Service) -> str:
    name = service.spec.name
    jobs = [state.jobs[job_id] for job_id in state.replicas.get(name, {})]
    serving = [job.id for job in jobs if job.id in service.ready and job.id not in service.draining]
    serving += [job.id for job in jobs if job.phase is Phase.ASLEEP and not job.wants]
    if service.stopping:
        return f"{name} is still being stopped"
    if len(serving) != service.wanted:
        return f"{name} has {len(serving)} ready replicas of {service.wanted}"
    if any(state.jobs[job_id].spec.version != service.version for job_id in serving):
        return f"{name} is not all of version {service.version}"
    if len(state.replicas.get(name, {})) != service.wanted:
        return f"{name} has more replicas than it wants"
    return ""
