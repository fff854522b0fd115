"""A session that runs a process beside the member's own: its input, its output and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, Protocol, cast

from shoal.agent.process import Console, resize
from shoal.agent.processes import Processes
from shoal.agent.sessions import beside
from shoal.agent.sessions.beside import Beside
from shoal.agent.sessions.visit import Visit
from shoal.sessions.streams import PIECE_BYTES, Began, Ended, Resize, Signal, Stream, Word

# After the end of the process, for what others that it started still hold open.
DRAIN_S = 0.3
# What a client may pass on.
SIGNALS = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
)


async def run(visit: Visit, processes: Processes) -> Ended:
    request = visit.order.request
    made = beside.start(
        processes,
        visit.order.ref,
        request.command,
        terminal=request.terminal,
        rows=request.rows,
        columns=request.columns,
    )

    def heard(word: Word) -> None:
        if isinstance(word, Resize):
            made.resize(word.rows, word.columns)
        elif isinstance(word, Signal) and word.number in SIGNALS:
            beside.send(processes, made, word.number)

    visit.heard = heard
    visit.streams.say(Began())
    first, second = visit.fixed
    return Ended(code=await converse(processes, made, first, first, second))


class Source(Protocol):
    async def read(self) -> bytes: ...


class Sink(Protocol):
    async def write(self, data: bytes, /) -> None: ...

    def end(self) -> None: ...


async def converse(
    processes: Processes,
    made: Beside,
    given: Source,
    output: Sink,
    error: Sink,
    *,
    stay: bool = False,
) -> int:
    """Until the process has ended; returns its exit code. `stay`: what it leaves in its process
    group may stay, as with ssh elsewhere."""
    feeding = asyncio.create_task(feed(given, made))
    left = False
    try:
        await asyncio.gather(drain(made, made.output, output), drain(made, made.error, error))
        assert made.code is not None
        code = await made.code
        left = stay
        return code
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
        if left:
            made.close()
        else:
            await asyncio.shield(beside.end(processes, made))


async def feed(stream: Source, made: Beside) -> None:
    """The client's input. After its end, a process without a terminal reads that."""
    loop = asyncio.get_running_loop()
    os.set_blocking(made.input, False)
    try:
        while data := await stream.read():
            while data:
                try:
                    data = data[os.write(made.input, data) :]
                except BlockingIOError:
                    await writable(loop, made.input)
    except OSError:
        pass  # it does not read any more
    if made.master is None and made.input >= 0:
        handle, made.input = made.input, -1
        os.close(handle)


async def writable(loop: asyncio.AbstractEventLoop, handle: int) -> None:
    """Until the descriptor can be written to."""
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(handle, _note, ready)
    try:
        await ready
    finally:
        loop.remove_writer(handle)


def _note(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def drain(made: Beside, handle: int, stream: Sink) -> None:
    """What the process writes, until nothing more can come."""
    if handle < 0:
        stream.end()
        return
    loop = asyncio.get_running_loop()
    os.set_blocking(handle, False)
    over = cast("asyncio.Future[int]", made.code)
    while True:
        try:
            data = os.read(handle, PIECE_BYTES)
        except BlockingIOError:
            if not await _readable(loop, handle, over):
                break
            continue
        except OSError:  # the other end of a terminal is closed
            break
        if not data:
            break
        await stream.write(data)
    stream.end()


async def _readable(
    loop: asyncio.AbstractEventLoop, handle: int, over: asyncio.Future[int]
) -> bool:
    """False: the process has ended, and nothing has come since."""
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(handle, _note, ready)
    try:
        if not over.done():
            either: list[asyncio.Future[Any]] = [ready, over]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await asyncio.wait([ready], timeout=DRAIN_S)
        return ready.done()
    finally:
        loop.remove_reader(handle)
        ready.cancel()


# A session with the terminal of an interactive member: several users may be attached at once.


async def attach(visit: Visit, processes: Processes) -> Ended:
    process = processes.get(visit.order.ref)
    console = process.console if process is not None else None
    job = visit.order.ref.job
    if console is None:
        why = f"{job} has no terminal, because it was not submitted with --interactive"
        return Ended(code=1, why=f"{why}; for a shell beside it: shoal exec {job}")
    request = visit.order.request
    resize(console.master, request.rows, request.columns)

    def heard(word: Word) -> None:
        if isinstance(word, Resize) and console.code is None:
            resize(console.master, word.rows, word.columns)

    visit.heard = heard
    visit.streams.say(Began())
    first, second = visit.fixed
    second.end()
    feeding = asyncio.create_task(_feed(console, first))
    try:
        place = 0
        while True:
            place, data = await console.after(place)
            if not data:
                break
            await first.write(data)
        first.end()
        return Ended(code=console.code or 0)
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding


async def _feed(console: Console, stream: Stream) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await stream.read():
            while data and console.code is None:
                try:
                    data = data[os.write(console.master, data) :]
                except BlockingIOError:
                    await writable(loop, console.master)
