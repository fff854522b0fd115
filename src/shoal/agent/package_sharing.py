"""A large package comes in blocks: nodes that fetch it at the same time read each block of the head
once, and give it to each other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.sharing import Sharing
from shoal.agent.blocks.store import FILES, Holding
from shoal.link.wire import PIECE_BYTES
from shoal.model.blocks import BYTES_OF_MBIT, Layout, Seek, Sought, package_source
from shoal.model.job import MemberRef
from shoal.model.report import PackagePiece

ARCHIVE = "archive"
WINDOW = 4  # pieces requested of the head ahead of their answers


class PackageSharing:
    """`need` requests a piece of the head, which may get lost. `ref`: the member for which this
    node may have the package. In a thread of its own, which ends with `close`."""

    def __init__(
        self,
        folder: Path,
        package: str,
        size: int,
        ref: MemberRef,
        need: Callable[[str, int], None],
        seek: Callable[[Seek], None],
        *,
        node: str,
        mbit_s: int,
    ) -> None:
        self.got = 0
        self.archive = folder / FILES / ARCHIVE
        self._package, self._need, self._seek = package, need, seek
        self._loop = asyncio.get_running_loop()
        self._window = asyncio.Semaphore(WINDOW)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._layout = Layout([(ARCHIVE, size)])
        source = package_source(package)
        self._about = Seek(
            ref=ref, source=source, fingerprint=package, count=self._layout.count, begins=True
        )
        self._heard: queue.SimpleQueue[Sought] = queue.SimpleQueue()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._pace = Pace()
        self._pace.bytes_s = mbit_s * BYTES_OF_MBIT
        self._sharing: Sharing | None = None
        self._over = False
        work = threading.Thread(target=self._run, args=(folder, node), name="package", daemon=True)
        work.start()

    async def wait(self) -> None:
        """Until all of it is here. What fails the transfer is raised."""
        await asyncio.shield(self._done)

    def take(self, piece: PackagePiece) -> None:
        asked = self._asked.get(piece.offset)
        if asked is not None and not asked.done():
            if piece.problem:
                asked.set_exception(OSError(piece.problem))
            else:
                asked.set_result(piece.data)

    def found(self, sought: Sought) -> None:
        self._heard.put(sought)

    def ask_again(self) -> None:
        for offset, asked in self._asked.items():
            if not asked.done():
                self._need(self._package, offset)

    def close(self) -> None:
        self._over = True
        if self._sharing is not None:
            self._sharing.stop()
        for asked in self._asked.values():
            asked.cancel()
        self._seek(msgspec.structs.replace(self._about, over=True))

    # -- in its thread ---------------------------------------------------------------------

    def _run(self, folder: Path, node: str) -> None:
        problem: Exception | None = None
        try:
            holding = Holding(folder, self._layout, self._package)
            self._sharing = Sharing(holding, node, self._read, self._says, pace=self._pace)
            if self._over:
                self._sharing.stop()
            self._sharing.run(self._heard)
            holding.close()
        except Exception as error:  # what the head or this disk says
            problem = error
        with contextlib.suppress(RuntimeError):  # the agent has ended
            self._loop.call_soon_threadsafe(self._ended, problem)

    def _read(self, number: int) -> bytes:
        return asyncio.run_coroutine_threadsafe(self._block(number), self._loop).result()

    def _says(self, words: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._say, words)

    # -- in the agent's loop ---------------------------------------------------------------

    def _ended(self, problem: Exception | None) -> None:
        if not self._done.done():
            if problem is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(problem)

    async def _block(self, number: int) -> bytes:
        span = self._layout.span(number)
        offsets = range(span.offset, span.offset + span.size, PIECE_BYTES)
        data = b"".join(await asyncio.gather(*map(self._piece, offsets)))
        if len(data) < span.size:
            raise OSError("the head gave a part of a piece")
        return data[: span.size]

    async def _piece(self, offset: int) -> bytes:
        async with self._window:
            self._asked[offset] = self._loop.create_future()
            self._need(self._package, offset)
            try:
                return await self._asked[offset]
            finally:
                del self._asked[offset]

    def _say(self, words: dict[str, Any]) -> None:
        self.got = words["got"]
        if words["seeks"]:
            names = ("blocks", "refused", "origin", "peers", "wish")
            got, refused, origin, peers, wish = (words[name] for name in names)
            self._seek(
                msgspec.structs.replace(
                    self._about,
                    got=tuple(got),
                    refused=tuple(refused),
                    origin=origin,
                    peers=peers,
                    wish=wish,
                )
            )
            self._about = msgspec.structs.replace(self._about, begins=False)
