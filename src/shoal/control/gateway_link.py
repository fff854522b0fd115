"""The gateway link: gives the gateway its replicas, and the loop what the gateway sees.

It runs beside the control loop and looks twice a second. The gateway is a separate process that
outlives the controller; it starts with the first service.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from shoal.control.loop import ControlLoop, Unreadable
from shoal.core.state.state import State
from shoal.model.job import Job, Phase
from shoal.model.service import (
    GatewayEntry,
    Probe,
    Replica,
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
TICK_S = 0.1
LATE_S = 0.5  # if this process was held up this long, it may have read an answer too late
# Errors on this side of a connection say nothing about the other side.
OUR_OWN_ERRORS = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTUNREACH,
    )
)


class Pulse(msgspec.Struct):
    """What the probes of a replica that was ready have shown."""

    attempt: int
    due_s: float
    unanswered: int = 0  # in a row


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
        self.trouble = ""

    async def run(self) -> None:
        while True:
            try:
                await self._loop.settled()
                if self._loop.state.services or not self._idle:
                    await self._look()
            except Unreadable:
                pass  # the gateway goes on with the replicas it has
            except Exception:
                log.exception("a look at the gateway failed")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        self._probe(self._loop.state)
        wanted = wanted_of(self._loop.state, self._entry())
        loads = await asyncio.get_running_loop().run_in_executor(self._thread, self._tick, wanted)
        await self._loop.settled()
        state = self._loop.state
        ready = [
            job_id for job_id, attempt in self._probed.items() if _lives(state, job_id, attempt)
        ]
        self._probed = {job_id: self._probed[job_id] for job_id in ready}
        self._pulses = {j: pulse for j, pulse in self._pulses.items() if j in self._probed}
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
                msgspec.structs.replace(load, ready=of_service, unanswered=unanswered)
            )

    def _tick(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        """Runs in the balancer's own thread."""
        try:
            loads = self._balancer.look(wanted)
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
                probe = service.spec.probe
                if self._probed.get(job_id) != job.attempt:
                    work = self._greet(probe, job_id, job.attempt, door(state, job))
                elif (pulse := self._pulse(probe, job)).due_s <= now_s:
                    work = self._feel(probe, pulse, door(state, job))
                else:
                    continue
                self._probing[job_id] = asyncio.create_task(work)

    def _pulse(self, probe: Probe, job: Job) -> Pulse:
        pulse = self._pulses.get(job.id)
        if pulse is None or pulse.attempt != job.attempt:
            due_s = time.monotonic() + probe.every_ms / 1000
            pulse = self._pulses[job.id] = Pulse(job.attempt, due_s)
        return pulse

    async def _greet(self, probe: Probe, job_id: str, attempt: int, master: str) -> None:
        status = await ask(master, probe)
        if status is not None and 0 < status < 500:
            self._probed[job_id] = attempt

    async def _feel(self, probe: Probe, pulse: Pulse, master: str) -> None:
        status = await ask(master, probe)
        pulse.due_s = time.monotonic() + probe.every_ms / 1000
        if status is not None:
            pulse.unanswered = 0 if status else pulse.unanswered + 1


def wanted_of(state: State, entry: GatewayEntry) -> Wanted:
    """What the gateway should serve, by the state."""
    return Wanted(
        entry=entry,
        services=tuple(
            Served(route=service.spec.way, replicas=tuple(_replicas(state, service)))
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


def _lives(state: State, job_id: str, attempt: int) -> bool:
    job = state.jobs.get(job_id)
    return job is not None and job.attempt == attempt and job.phase is Phase.RUNNING


async def ask(master: str, probe: Probe) -> int | None:
    """The HTTP status of its answer; 0 if it does not answer; None if that is not known, because
    this process could not ask or was itself too late to read the answer."""
    host, _, port = master.rpartition(":")
    asked = asyncio.create_task(_status(host, int(port), probe.path))
    end_s, late_s = time.monotonic() + probe.timeout_ms / 1000, 0.0
    try:
        while not asked.done() and (now_s := time.monotonic()) < end_s:
            tick_s = min(TICK_S, end_s - now_s)
            await asyncio.wait({asked}, timeout=tick_s)
            late_s = max(late_s, time.monotonic() - now_s - tick_s)
        if not asked.done():
            return None if late_s > LATE_S else 0
        return asked.result()
    except OSError as error:
        return None if error.errno in OUR_OWN_ERRORS else 0
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return 0
    finally:
        asked.cancel()


async def _status(host: str, port: int, path: str) -> int:
    """The status of one GET; the rest of the answer is not read."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = f"[{host}]" if ":" in host else host
        request = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        line = await reader.readuntil(b"\n")
        return int(line.split()[1])
    except IndexError:
        raise ValueError("no status line") from None
    finally:
        writer.close()
