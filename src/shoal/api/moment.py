"""`GET /v1/moment`: the map, the queue and the events as they were then, from a process of its own
that is started when somebody asks and ends when nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from shoal.api.handling import handles, respond
from shoal.api.http import Response
from shoal.api.moment_reader import MomentAsk, MomentView
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.simulate import NICENESS
from shoal.api.timeline import Moment
from shoal.calls.page import PageCalls
from shoal.model.views import Problem

MOMENTS = "moments"  # in the app's state
ANSWER_S_MAX = 30.0  # the process itself stops after ten
IDLE_S = 60.0
ASKING_MAX = 8  # requests that wait for each other
ANSWER_BYTES_MAX = 64 << 20
HEADER_BYTES_MAX = 64
BUSY = "several moments of the past are being read already; try again in a moment"
NO_HOME = "this controller has no home with a log of events"


class Moments:
    """At most one process, and one request at a time."""

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asking = 0
        self._ending: asyncio.TimerHandle | None = None

    async def ask(self, ask: MomentAsk) -> bytes:
        if self._home is None:
            raise Refusal(422, NO_HOME)
        if self._asking >= ASKING_MAX:
            raise Refusal(503, BUSY, retry_s=1)
        self._asking += 1
        try:
            async with self._lock:
                return await self._ask(self._home, ask)
        finally:
            self._asking -= 1

    async def _ask(self, home: Path, ask: MomentAsk) -> bytes:
        if self._ending is not None:
            self._ending.cancel()
        whole = False
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                status, body = await self._exchange(home, ask)
            whole = True
        except TimeoutError:
            raise Refusal(503, f"that moment took longer than {ANSWER_S_MAX:.0f} s") from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            raise Refusal(503, "the process that reads the past has ended; ask again") from None
        finally:
            if whole:
                self._ending = asyncio.get_running_loop().call_later(IDLE_S, self.end)
            else:
                self.end()  # nobody knows how much of an answer is still to come
        if status != 200:
            problem = msgspec.json.decode(body, type=Problem)
            raise Refusal(status, problem.message, problem.field, 1 if status == 503 else 0)
        return body

    async def _exchange(self, home: Path, ask: MomentAsk) -> tuple[int, bytes]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start(home)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(ask) + b"\n")
        await process.stdin.drain()
        header = await process.stdout.readuntil(b"\n")
        status, length = map(int, header[:HEADER_BYTES_MAX].split())
        if length > ANSWER_BYTES_MAX:
            raise ValueError(length)
        return status, await process.stdout.readexactly(length)

    @staticmethod
    async def _start(home: Path) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "shoal.api.moment_reader",
            str(home),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        process = self._process
        self.end()
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            while await process.stdout.read(1 << 20):  # what nobody will ask for any more
                pass
            await process.wait()


class MomentApi:
    @handles(PageCalls.moment)
    async def moment(self, reach: Reach, moments: Moments, at_ms: Moment) -> Response[MomentView]:
        loop = reach.loop
        ask = MomentAsk(
            at_ms=at_ms, now_ms=loop.clock.now_ms(), who=reach.who, others=loop.policy.others
        )
        body: Any = await moments.ask(ask)
        return respond(body)
