"""The sessions of a node: who is in which member, within bounds, and never longer than it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from shoal.agent.processes import Processes
from shoal.agent.sessions.beside import attach, run
from shoal.agent.sessions.visit import Ports, Unheard, Visit
from shoal.core.nodebook import NodeBook
from shoal.model.job import MemberRef
from shoal.model.session import Kind, SessionOrder
from shoal.sessions.streams import Began, Ended, Port, Stream, splice

log = logging.getLogger("shoal.agent")

SESSIONS_MAX = 64  # of a node
SESSIONS_PER_JOB_MAX = 16
WAKE_S_MAX = 60.0  # the client has waited already: it opens a session when the job is awake
WAKE_POLL_S = 0.05

Act = Callable[[Visit], Awaitable[Ended]]


class Sessions:
    def __init__(self, directory: Path, processes: Processes, book: NodeBook) -> None:
        self._directory = directory
        self._processes = processes
        self._book = book
        self._visits: dict[Visit, asyncio.Task[None]] = {}

    def begin(self, order: SessionOrder) -> None:
        """An order may come twice: it is sent again if we do not seem to answer."""
        same = order.ref, order.request.meeting
        if any((one.order.ref, one.order.request.meeting) == same for one in self._visits):
            return
        visit = Visit(self._directory, order)
        visit.streams.used = lambda: self._book.touch(order.ref)
        task = asyncio.create_task(visit.run(self._act(order)))
        self._visits[visit] = task
        task.add_done_callback(lambda done: self._gone(visit, done))

    def ended(self, ref: MemberRef) -> None:
        """A member has ended, and every session with it."""
        for visit in self._visits:
            attached = visit.order.request.kind is Kind.ATTACH  # it ends when all is shown
            if visit.order.ref == ref and not attached:
                visit.end(f"{visit.name} has ended")

    async def close(self) -> None:
        for task in self._visits.values():
            task.cancel()
        await asyncio.gather(*self._visits.values(), return_exceptions=True)

    def _gone(self, visit: Visit, task: asyncio.Task[None]) -> None:
        self._visits.pop(visit, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session with %s failed", visit.name, exc_info=error)

    def _act(self, order: SessionOrder) -> Act:
        alike = sum(1 for one in self._visits if one.order.ref.job == order.ref.job)
        if self._processes.pid(order.ref) is None:
            return _refusal(f"{order.ref.job}.{order.ref.member} is no longer running on this node")
        if alike >= SESSIONS_PER_JOB_MAX:
            return _refusal(f"{order.ref.job} has {alike} sessions on this node; close one")
        if len(self._visits) >= SESSIONS_MAX:
            return _refusal(f"this node has {SESSIONS_MAX} sessions; try again later")
        match order.request.kind:
            case Kind.FORWARD:
                return self._forward
            case Kind.SSH:
                return self._ssh
            case Kind.EXEC:
                return self._exec
            case Kind.ATTACH:
                return lambda visit: attach(visit, self._processes)

    async def _exec(self, visit: Visit) -> Ended:
        """In a sleeper it would not run, or run alone: so it waits until the member is awake."""
        ref, deadline = visit.order.ref, time.monotonic() + WAKE_S_MAX
        self._book.touch(ref)
        while ref in self._book.dozing or ref in self._book.asleep or ref in self._book.waking:
            if time.monotonic() > deadline:
                why = f"{ref.job} is asleep, and there is no room to wake it: shoal why {ref.job}"
                return Ended(code=255, why=why)
            await asyncio.sleep(WAKE_POLL_S)
        return await run(visit, self._processes)

    async def _ssh(self, visit: Visit) -> Ended:
        from shoal.agent.sessions.ssh import serve

        return await serve(visit, self._processes, self._ports(visit))

    def _ports(self, visit: Visit) -> Ports:
        ref = visit.order.ref
        return Ports(visit.name, lambda: self._processes.all_of(ref))

    async def _forward(self, visit: Visit) -> Ended:
        """Until the client goes: each of its streams is a connection."""
        ref = visit.order.ref
        ports = self._ports(visit)
        own = self._book.alive[ref].env.get("PORT", "") if ref in self._book.alive else ""
        tasks: set[asyncio.Task[None]] = set()

        def opened(stream: Stream, about: bytes) -> None:
            task = asyncio.create_task(connect(stream, about, ports, own))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        visit.opened = opened
        visit.streams.say(Began())
        try:
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _refusal(why: str) -> Act:
    async def refuse(_: Visit) -> Ended:
        return Ended(code=255, why=why)

    return refuse


async def connect(stream: Stream, about: bytes, ports: Ports, own: str) -> None:
    try:
        port = msgspec.msgpack.decode(about, type=Port).port or int(own or 0)
        if not port:
            raise Unheard("the job has no $PORT of its own; name a port")
        found = ports.find(port)
        reader, writer = await asyncio.open_connection(found.address, found.port)
    except (Unheard, msgspec.DecodeError, ValueError) as error:
        stream.reset(str(error))
        return
    except OSError as error:
        stream.reset(f"the connection was refused: {error.strerror or error}")
        return
    with contextlib.suppress(OSError):
        await splice(stream, reader, writer)
