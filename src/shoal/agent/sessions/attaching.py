"""A session with the terminal of an interactive member: several users may be attached at once."""

from __future__ import annotations

import asyncio
import contextlib
import os

from shoal.agent.processes import Processes
from shoal.agent.sessions.running import writable
from shoal.agent.sessions.visit import Visit
from shoal.agent.terminals import Console, resize
from shoal.sessions.streams import Began, Ended, Resize, Stream, Word


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
