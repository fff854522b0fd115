"""The gateway link: gives the gateway its replicas, and the loop what the gateway sees.

It runs beside the control loop and looks twice a second. The gateway is a separate process that
outlives the controller; it starts with the first service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from shoal.control.asking import Answer, get, lists_a_model
from shoal.control.engine_reader import EngineReader
from shoal.control.gateways import read_reports, report_of, together
from shoal.control.loop import Busy, ControlLoop, Unreadable
from shoal.control.pulse import Pulse
from shoal.control.secretstore import SecretStore
from shoal.control.service_certificates import SecretKey, ServiceCertificates, keys_of
from shoal.core.phases.claims import owner_of
from shoal.core.state.state import State
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.service import (
    GatewayEntry,
    Probe,
    Replica,
    ReplicaLoad,
    ReplicaState,
    Served,
    Service,
    ServiceLoad,
    Wanted,
)
from shoal.ports import Balancer, ServingError

log = logging.getLogger("shoal.gateway_link")

LOOK_S = 0.5
PROBES_MAX = 256  # at once
MODELS_BYTES_MAX = 1 << 20  # of a list of models


class GatewayLink:
    def __init__(
        self, loop: ControlLoop, balancer: Balancer, entry: Callable[[], GatewayEntry]
    ) -> None:
        self._loop = loop
        self._balancer = balancer
        self._entry = entry
        self._idle = True
        # One thread at a time may call the balancer, and its sockets may block.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway")
        self._probed: dict[str, int] = {}  # job -> the attempt whose probe answered
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._pulses: dict[str, Pulse] = {}
        self._loads: dict[str, ReplicaLoad] = {}  # as all gateways last saw the replicas
        self._engines = EngineReader(door)
        # Where a standby finds secrets; the leader's loop has them.
        self.secrets: Callable[[], SecretStore | None] | None = None
        self._certificates = ServiceCertificates(self._secrets)
        self.trouble = ""
        # Where this gateway's figures go while another head leads, and those of the other heads.
        self.report: Callable[[bytes], None] | None = None
        self.others: Callable[[], Iterable[bytes]] = tuple

    def serve(self, loop: ControlLoop) -> None:
        """From now on by the state of this loop, which decides what the gateway serves."""
        self._loop = loop
        self.report = self.secrets = None

    def _secrets(self) -> SecretStore | None:
        return self._loop.secrets if self.secrets is None else self.secrets()

    async def run(self) -> None:
        while True:
            try:
                await self._loop.settled()
                if self._loop.state.services or not self._idle:
                    await self._look()
            except (Busy, Unreadable):
                pass  # the gateway goes on with the replicas it has
            except Exception:
                log.exception("a look at the gateway failed")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        if self.report is None:
            self._probe(self._loop.state)
            self._engines.look(self._loop.state)
        wanted = wanted_of(self._loop.state, self._entry())
        keys = keys_of(self._loop.state)
        run = asyncio.get_running_loop().run_in_executor
        seen = await run(self._thread, self._tick, wanted, keys)
        self._loop.alarms.show("gateway", self.trouble and f"no service is reached: {self.trouble}")
        if self.report is not None:  # the leader probes, and decides who is ready
            self.report(report_of(wanted, seen))
            return
        await self._loop.settled()
        state = self._loop.state
        loads = together(state.services, seen, read_reports(self.others()), _dozing(state))
        ready = [
            job_id for job_id, attempt in self._probed.items() if _lives(state, job_id, attempt)
        ]
        self._probed = {job_id: self._probed[job_id] for job_id in ready}
        self._pulses = {
            j: pulse for j, pulse in self._pulses.items() if _lives(state, j, pulse.attempt)
        }
        self._loads = {j: one for load in loads.values() for j, one in load.replicas.items()}
        for name in list(state.services):
            unseen = ServiceLoad(service=name, seen=False, trouble=self.trouble)
            load = loads.get(name, unseen)
            of_service = tuple(j for j in ready if state.jobs[j].spec.service == name)
            unanswered = {
                job_id: pulse.unanswered
                for job_id in of_service
                if (pulse := self._pulses.get(job_id)) and pulse.unanswered
            }
            self._loop.served(
                msgspec.structs.replace(
                    load,
                    ready=of_service,
                    unanswered=unanswered,
                    engines=self._engines.figures(of_service),
                )
            )

    def _tick(self, wanted: Wanted, keys: dict[str, SecretKey]) -> dict[str, ServiceLoad]:
        """Runs in the balancer's own thread."""
        try:
            loads = self._balancer.look(self._certificates.fill(wanted, keys))
        except ServingError as error:
            if str(error) != self.trouble:
                log.error("the gateway: %s", error)
            self.trouble = str(error)
            return {}
        self.trouble = ""
        self._idle = not wanted.services
        return loads

    def _probe(self, state: State) -> None:
        """Probe replicas that have not answered yet, and from time to time those that have. Each
        probe is a task of its own, so one that hangs holds up no other."""
        now_s = time.monotonic()
        for job_id in [one for one, task in self._probing.items() if task.done()]:
            del self._probing[job_id]
        for name, service in state.services.items():
            for job_id in state.replicas.get(name, {}):
                job = state.jobs[job_id]
                if job.phase is not Phase.RUNNING or job_id in self._probing:
                    continue
                if len(self._probing) >= PROBES_MAX:
                    return
                probe, pulse = service.spec.probe, self._pulse(job)
                ready = self._probed.get(job_id) == job.attempt
                itself = answers_itself(state, job_id, job.attempt)
                if ready:
                    pulse.plan(probe, self._loads.get(job_id) if itself else None, now_s)
                if pulse.due_s > now_s or not (ready or itself):
                    continue
                where = door(state, job)
                work = (
                    self._feel(probe, pulse, job_id, where)
                    if ready
                    else self._greet(probe, pulse, job_id, where)
                )
                self._probing[job_id] = asyncio.create_task(work)

    def _pulse(self, job: Job) -> Pulse:
        pulse = self._pulses.get(job.id)
        if pulse is None or pulse.attempt != job.attempt:
            pulse = self._pulses[job.id] = Pulse(job.attempt)
        return pulse

    async def _greet(self, probe: Probe, pulse: Pulse, job_id: str, where: str) -> None:
        answer = await ask(where, probe)
        ready = greets(answer, probe) and self._itself(job_id, pulse.attempt)
        answered = answer is not None and bool(answer.status)
        pulse.greeted(time.monotonic(), answered=answered, ready=ready)
        if ready:
            self._probed[job_id] = pulse.attempt

    async def _feel(self, probe: Probe, pulse: Pulse, job_id: str, where: str) -> None:
        """It lives if it answers at all, and it is not somebody else who does."""
        answer = await ask(where, probe)
        lives = answer is not None and bool(answer.status)
        lives = lives and self._itself(job_id, pulse.attempt)
        pulse.felt(time.monotonic(), answered=None if answer is None else lives)

    def _itself(self, job_id: str, attempt: int) -> bool:
        """While a step is being stored, what nodes have reported can be read all the same."""
        return answers_itself(self._loop.tick.state, job_id, attempt)


def wanted_of(state: State, entry: GatewayEntry) -> Wanted:
    """What the gateway should serve, by the state."""
    return Wanted(
        entry=entry,
        services=tuple(
            Served(
                route=service.spec.way,
                replicas=tuple(_replicas(state, service)),
                owner=owner_of(state, service.spec.replica.tenant),
            )
            for service in state.services.values()
        ),
    )


def _replicas(state: State, service: Service) -> list[Replica]:
    found = []
    for job_id in service.ready:
        job = state.jobs[job_id]
        host, _, port = door(state, job).rpartition(":")
        drains = job_id in service.draining
        state_ = ReplicaState.DRAINING if drains else ReplicaState.READY
        found.append(Replica(id=job_id, address=host, port=int(port), state=state_))
    return found


def door(state: State, job: Job) -> str:
    """Where the gateway reaches a replica: its member 0. On the head's own machine it may listen
    there alone, whatever address others use."""
    node = state.nodes.get(job.members[0].slice.node)
    near = node is not None and not node.spec.origin
    return f"127.0.0.1:{job.serves_at.rpartition(':')[2]}" if near else job.serves_at


def answers_itself(state: State, job_id: str, attempt: int) -> bool:
    """Does the replica's own process listen on its port, as its node says? Of an older agent,
    nothing else is known than that somebody answers."""
    job = state.jobs.get(job_id)
    if job is None or job.attempt != attempt or not job.members:
        return False
    listens = state.heard.listens.get(job.members[0].slice.node, frozenset())
    return listens is None or MemberRef(job_id, attempt, 0) in listens


def _dozing(state: State) -> dict[str, list[str]]:
    """Replicas that fall asleep, by service."""
    found: dict[str, list[str]] = {}
    for job in (state.jobs[job_id] for job_id in state.napping):
        if job.phase is Phase.DOZING and job.spec.service:
            found.setdefault(job.spec.service, []).append(job.id)
    return found


def _lives(state: State, job_id: str, attempt: int) -> bool:
    job = state.jobs.get(job_id)
    return job is not None and job.attempt == attempt and job.phase is Phase.RUNNING


async def ask(door: str, probe: Probe) -> Answer | None:
    """None if it is not known whether it answers."""
    body_max = MODELS_BYTES_MAX if probe.models else 0
    return await get(door, probe.path, probe.timeout_ms / 1000, body_max)


def greets(answer: Answer | None, probe: Probe) -> bool:
    """Whether the answer shows that the replica is ready."""
    if answer is None:
        return False
    return lists_a_model(answer) if probe.models else 0 < answer.status < 500
