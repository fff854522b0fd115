"""The gateway link: gives the gateway its replicas, and the loop what the gateway sees.

It runs beside the control loop and looks twice a second. The gateway is a separate process that
outlives the controller; it starts with the first service.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec

from shoal.control.engine_reader import Answer, EngineReader, get, lists_a_model
from shoal.control.loop import Busy, ControlLoop, Unreadable
from shoal.control.secretstore import SecretStore
from shoal.control.service_certificates import SecretKey, ServiceCertificates, keys_of
from shoal.core.features.access import callers_of
from shoal.core.features.budget import refused_keys
from shoal.core.features.service.serve import owner_of
from shoal.core.state.state import State
from shoal.model.access import Caller, access_of
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.service import (
    GatewayEntry,
    Probe,
    Replica,
    ReplicaLoad,
    Served,
    Service,
    ServiceLoad,
    Wanted,
)
from shoal.model.tokens import ReplicaState, RoutedLoad, TokenLoad
from shoal.ports import Balancer, ServingError, StoreError

log = logging.getLogger("shoal.gateway_link")

LOOK_S = 0.5
SOON_S = 0.02  # when replicas have just become ready: they get requests with the next look
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
        self._door = 0, ""
        self._soon = False
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
            self._soon = False
            try:
                await self._loop.settled()
                if self._loop.state.services or not self._idle:
                    await self._look()
            except (Busy, Unreadable):
                pass  # the gateway goes on with the replicas it has
            except Exception:
                log.exception("a look at the gateway failed")
            await asyncio.sleep(SOON_S if self._soon else LOOK_S)

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
            self._soon |= not state.services[name].ready.keys() >= set(of_service)
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
                    day=self._loop.day(name),
                )
            )

    def _tick(self, wanted: Wanted, keys: dict[str, SecretKey]) -> dict[str, ServiceLoad]:
        """Runs in the balancer's own thread."""
        try:
            if any(one.far for one in wanted.services):
                wanted = self._with_door(wanted)
            loads = self._balancer.look(self._certificates.fill(wanted, keys))
        except ServingError as error:
            if str(error) != self.trouble:
                log.error("the gateway: %s", error)
            self.trouble = str(error)
            return {}
        self.trouble = ""
        self._idle = not wanted.services
        return loads

    def _with_door(self, wanted: Wanted) -> Wanted:
        """Without its certificate, it serves on alone."""
        if not self._door[1]:
            with contextlib.suppress(StoreError):
                self._door = self._loop.door()
        port, pem = self._door
        if not pem:
            alone = tuple(msgspec.structs.replace(one, far=()) for one in wanted.services)
            return msgspec.structs.replace(wanted, services=alone)
        entry = msgspec.structs.replace(wanted.entry, door=port, door_pem=pem)
        return msgspec.structs.replace(wanted, entry=entry)

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


PAGE = "page"  # the caller that the page is, once it has looked whether its user may


@cache
def page_key() -> str:
    """With which this process asks its own gateway for the page. Nobody else ever has it."""
    return secrets.token_urlsafe(32)


def _page() -> Caller:
    hash_ = hashlib.sha256(page_key().encode()).hexdigest()
    return Caller(id=PAGE, hash=hash_, tenant=EVERY_TENANT)


def wanted_of(state: State, entry: GatewayEntry) -> Wanted:
    """What the gateway should serve, by the state."""
    services = tuple(_served(state, service) for service in state.services.values())
    if not any(one.route.asks for one in services):
        return Wanted(entry=entry, services=services)
    return Wanted(
        entry=entry,
        services=services,
        callers=(*callers_of(state), _page()),
        refused=refused_keys(state),
    )


def _served(state: State, service: Service) -> Served:
    spec, tenant = service.spec, service.spec.replica.tenant
    owner, route = owner_of(state, tenant), spec.way
    if owner and not route.access:
        route = msgspec.structs.replace(route, access=access_of((), owner))
    return Served(
        route=route,
        replicas=tuple(_replicas(state, service)),
        owner=owner,
        tenant=tenant,
        goals=spec.goals,
        adapters=spec.adapters,
        adapters_max=spec.adapters_max,
        far=service.far,
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


# When a replica is probed next. Servers log every request, so a probe is sent only if it can show
# something that the gateway does not see anyway.


IDLE_TIMES = 30  # an idle replica is probed this much less often; nobody waits for its answers
# A replica that answers, but is not ready, is asked again after a tenth of the time since it first
# answered, and after this long at most.
LOADING_PART = 10
LOADING_S_MAX = 5.0


class Pulse(msgspec.Struct):
    """What the probes of one attempt have shown, and when the next is due."""

    attempt: int
    due_s: float = 0.0
    unanswered: int = 0  # in a row, since it was ready
    heard_s: float | None = None  # when it first answered
    _probed_s: float = 0.0

    def greeted(self, now_s: float, *, answered: bool, ready: bool) -> None:
        """After a probe of a replica that was not ready. One that does not listen logs nothing."""
        if answered and self.heard_s is None:
            self.heard_s = now_s
        since_s = now_s - (now_s if self.heard_s is None else self.heard_s)
        self.due_s = now_s + min(since_s / LOADING_PART, LOADING_S_MAX)
        if ready:
            self._probed_s = now_s

    def felt(self, now_s: float, *, answered: bool | None) -> None:
        """After a probe of a ready one. None: it is not known whether it answers."""
        self._probed_s = now_s
        if answered is not None:
            self.unanswered = 0 if answered else self.unanswered + 1

    def plan(self, probe: Probe, load: ReplicaLoad | None, now_s: float) -> None:
        """Decides when a ready replica is probed next, by what the gateway sees of it: one that
        answers requests is alive, and one that has none may be left alone for longer."""
        if load is not None and load.answers_per_ks:
            self._probed_s, self.unanswered = now_s, 0
        idle = load is not None and not load.in_flight and not self.unanswered
        self.due_s = self._probed_s + probe.every_ms / 1000 * (IDLE_TIMES if idle else 1)


# What the gateways of several heads see together. Pure.
#
# Each head has a gateway. A standby's report of its own is in its row of the table `heads`, and the
# leader adds it to what its own gateway sees.


REPORT_BYTES_MAX = 1 << 20


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """`open`: replicas that the gateway may send new requests to."""

    loads: tuple[ServiceLoad, ...] = ()
    open: tuple[str, ...] = ()


def report_of(wanted: Wanted, loads: Mapping[str, ServiceLoad]) -> bytes:
    """After the gateway has put `wanted` in place. A report that would be too long for a row says
    less about each replica."""
    ready = tuple(
        replica.id
        for served in wanted.services
        for replica in served.replicas
        if replica.state is ReplicaState.READY
    )
    body = msgspec.json.encode(GatewayReport(loads=tuple(loads.values()), open=ready))
    if len(body) <= REPORT_BYTES_MAX:
        return body
    brief = tuple(msgspec.structs.replace(load, replicas={}) for load in loads.values())
    return msgspec.json.encode(GatewayReport(loads=brief, open=ready))


def read_reports(rows: Iterable[bytes]) -> list[GatewayReport]:
    """Of heads of other versions, what can be read."""
    found = []
    for row in rows:
        try:
            found.append(msgspec.json.decode(row, type=GatewayReport))
        except msgspec.DecodeError:
            continue
    return found


def together(
    services: Mapping[str, Service],
    own: Mapping[str, ServiceLoad],
    others: Sequence[GatewayReport],
    dozing: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, ServiceLoad]:
    """Sums, so that services scale by all their requests. A replica that drains counts as busy
    until every gateway has stopped sending it new requests; so does one that falls asleep
    (`dozing`, by service)."""
    if not others:
        return dict(own)
    found = {}
    for name, service in services.items():
        loads = [load for load in (own.get(name), *_loads(name, others)) if load is not None]
        if not loads:
            continue
        load = loads[0]
        for other in loads[1:]:
            load = _sum(load, other)
        leaving = (*service.draining, *(dozing or {}).get(name, ()))
        late = {job for job in leaving if any(job in one.open for one in others)}
        found[name] = msgspec.structs.replace(load, replicas=_held(load.replicas, late))
    return found


def _loads(name: str, others: Sequence[GatewayReport]) -> list[ServiceLoad]:
    return [load for one in others for load in one.loads if load.service == name and load.tells]


def _sum(one: ServiceLoad, two: ServiceLoad) -> ServiceLoad:
    """Times are those of the mean request; of high percentiles, the higher one."""
    parts = one.answers_per_ks, two.answers_per_ks
    ids = dict.fromkeys((*one.replicas, *two.replicas))
    return msgspec.structs.replace(
        one,
        seen=one.seen or two.seen,
        in_flight=one.in_flight + two.in_flight,
        queued=one.queued + two.queued,
        held=one.held + two.held,
        answers_per_ks=sum(parts),
        failures_per_ks=one.failures_per_ks + two.failures_per_ks,
        response_ms=_mean(one.response_ms, two.response_ms, parts),
        p50_ms=_mean(one.p50_ms, two.p50_ms, parts),
        p95_ms=max(one.p95_ms, two.p95_ms),
        p99_ms=max(one.p99_ms, two.p99_ms),
        replicas={job: _both(one.replicas.get(job), two.replicas.get(job)) for job in ids},
        tokens=_tokens(one.tokens, two.tokens),
        token_counts=(*one.token_counts, *two.token_counts),
    )


HIGHER = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
RATES = ("prompt_per_s", "generated_per_s")
SUMMED = ("queued", "judged", "good", "refused", "resumed", "broken", *RATES)


def _tokens(one: TokenLoad | None, two: TokenLoad | None) -> TokenLoad | None:
    """Of two routers. Of times, the higher one: a median cannot be made of two."""
    if one is None or two is None:
        return one or two
    found: dict[str, Any] = {name: max(getattr(one, name), getattr(two, name)) for name in HIGHER}
    found |= {name: getattr(one, name) + getattr(two, name) for name in SUMMED}
    hits = _mean(one.hit_milli, two.hit_milli, (one.prompt_per_s, two.prompt_per_s))
    replicas, names = dict(one.replicas), RoutedLoad.__struct_fields__
    for job, load in two.replicas.items():
        own = replicas.get(job, RoutedLoad())
        replicas[job] = RoutedLoad(
            **{name: getattr(own, name) + getattr(load, name) for name in names}
        )
    return TokenLoad(**found, hit_milli=hits, replicas=replicas)


def _both(one: ReplicaLoad | None, two: ReplicaLoad | None) -> ReplicaLoad:
    """Up if any gateway reaches it."""
    if one is None or two is None:
        found = one or two
        assert found is not None
        return found
    parts = one.answers_per_ks, two.answers_per_ks
    return ReplicaLoad(
        one.up or two.up,
        one.in_flight + two.in_flight,
        sum(parts),
        _mean(one.response_ms, two.response_ms, parts),
    )


def _mean(one: int, two: int, parts: tuple[int, int]) -> int:
    if not sum(parts):
        return max(one, two)
    return (one * parts[0] + two * parts[1]) // sum(parts)


def _held(replicas: Mapping[str, ReplicaLoad], late: set[str]) -> dict[str, ReplicaLoad]:
    found = dict(replicas)
    for job in sorted(late):
        seen = found.get(job, ReplicaLoad(up=True, in_flight=0))
        found[job] = msgspec.structs.replace(seen, in_flight=max(1, seen.in_flight))
    return found
