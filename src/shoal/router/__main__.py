"""`python -m shoal.router FOLDER`: the router of a gateway. It outlives whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from shoal.machine.files import lock, read_own, require_own, write_private
from shoal.model.tokens import RouterWanted
from shoal.router.books import Books, say
from shoal.router.exchange import Router
from shoal.router.front import Front
from shoal.router.wire import Pool
from shoal.router.world import World

SOCKET, CONTROL, CONFIG = "router.sock", "router-control.sock", "router.json"
LOCK, PID = "router.lock", "router.pid"
CONNECTIONS_MAX = 16_384  # from the proxy
CONTROLLERS_MAX = 8
LINE_BYTES_MAX = 16 << 20
TICK_S = 0.1
SAVE_S = 1.0
GRACE_S = 30.0  # for streams, when it is asked to end


class Process:
    """The router in its folder. It uses relative paths, so the folder may have any length."""

    def __init__(self) -> None:
        self.books = Books(Path())
        self.world = World(self.books)
        self.router = Router(self.world)
        self.fronts: set[Front] = set()
        self.stop = asyncio.Event()
        self._text = b""
        self._controllers = 0

    def load(self) -> None:
        """What the last controller wanted."""
        with contextlib.suppress(FileNotFoundError):
            self._text = read_own(Path(CONFIG))
            self.world.update(msgspec.json.decode(self._text, type=RouterWanted))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        serving = await loop.create_unix_server(self._front, SOCKET, backlog=4_096)
        control = await asyncio.start_unix_server(self._control, CONTROL, limit=LINE_BYTES_MAX)
        gc.collect()
        gc.freeze()  # what is there now stays, so it need not be looked at again
        tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._save())]
        await self.stop.wait()
        serving.close()
        control.close()
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(not one.idle for one in self.fronts):  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        for task in tasks:
            task.cancel()
        self._leave()

    def _end(self) -> None:
        """Asked once, it finishes what it has; asked twice, it does not."""
        if self.stop.is_set():
            self._leave()
        self.stop.set()

    def _leave(self) -> NoReturn:
        text = self.books.text()
        if text is not None:
            self.books.write(text)
        os._exit(0)

    def _front(self) -> Front:
        return Front(self.router.handle, self.fronts, CONNECTIONS_MAX)

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            Pool.lag_s = max(now - before - TICK_S, Pool.lag_s / 2)
            self.world.sweep(now)

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            text = self.books.text()
            if text is not None:
                # In a thread: a disk may take longer than a request should wait.
                await asyncio.to_thread(self._try, self.books.write, text)

    @staticmethod
    def _try(write: object, text: bytes) -> None:
        try:
            write(text)  # type: ignore[operator]
        except OSError as error:
            say(f"cannot write its counts: {error}")

    # -- the controller

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._controllers += 1
        try:
            while self._controllers <= CONTROLLERS_MAX and (line := await reader.readline()):
                await self._want(line.rstrip(b"\n"))
                writer.write(msgspec.json.encode(self.world.seen()) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            say(f"a controller was not understood: {type(error).__name__}")
        finally:
            self._controllers -= 1
            writer.close()

    async def _want(self, text: bytes) -> None:
        """An empty line asks only what is seen."""
        if not text or text == self._text:
            return
        self.world.update(msgspec.json.decode(text, type=RouterWanted))
        self._text = text
        await asyncio.to_thread(write_private, Path(CONFIG), text)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m shoal.router FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        require_own(folder)
        os.chdir(folder)
        if lock(Path(LOCK)) is None:
            print(f"shoal: a router runs in {folder} already", file=sys.stderr)
            return 1
        write_private(Path(PID), b"%d\n" % os.getpid())
        os.umask(0o177)
        for name in (SOCKET, CONTROL):
            Path(name).unlink(missing_ok=True)  # of one that was killed
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(started())
    except (OSError, msgspec.DecodeError) as error:
        print(f"shoal: router: {folder}: {error}", file=sys.stderr)
        return 1
    return 0


async def started() -> None:
    process = Process()
    process.load()
    await process.run()


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
