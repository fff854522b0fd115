"""The two ends of a session, joined by connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from shoal.model.session import Kind
from shoal.sessions.streams import WINDOW_BYTES, Broken, Connection, Port, Stream, Streams
from shoal.sessions.terminal import Detached, Keys

BYTES = 3_000_000


class Half:
    """One end of a connection that breaks after some messages, which may be lost on the way."""

    def __init__(
        self, given: asyncio.Queue[bytes], taken: asyncio.Queue[bytes], lasts: int
    ) -> None:
        self._given, self._taken, self._left = given, taken, lasts

    async def send(self, data: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            raise ConnectionError
        await self._taken.put(data)

    async def recv(self) -> bytes:
        return await self._given.get()

    def __aiter__(self) -> Half:
        return self

    async def __anext__(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ConnectionError
        return await self._given.get()


def pair(lasts: int = 1 << 30) -> tuple[Connection, Connection]:
    one: asyncio.Queue[bytes] = asyncio.Queue(2)
    other: asyncio.Queue[bytes] = asyncio.Queue(2)
    return Half(one, other, lasts), Half(other, one, lasts)


async def keep_joined(near: Streams, far: Streams, dice: random.Random) -> None:
    """Again and again, until it is cancelled."""
    while True:
        ends = pair(dice.randint(1, 60))
        both = [near.reliable.carry(ends[0]), far.reliable.carry(ends[1])]
        tasks = [asyncio.ensure_future(one) for one in both]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def read_all(stream: Stream) -> bytes:
    got = b""
    while data := await stream.read():
        got += data
    return got


async def write_all(stream: Stream, data: bytes) -> None:
    await stream.write(data)
    stream.end()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled_over_connections_that_break(seed: int) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(BYTES)

    async def run() -> tuple[bytes, bytes]:
        near, far = Streams(lambda _: None), Streams(lambda _: None)
        (a, _), (b, _) = near.fixed(Kind.EXEC), far.fixed(Kind.EXEC)
        joining = asyncio.create_task(keep_joined(near, far, dice))
        try:
            work = (write_all(a, data), write_all(b, data[::-1]), read_all(a), read_all(b))
            *_, back, there = await asyncio.wait_for(asyncio.gather(*work), 60)
        finally:
            joining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await joining
        return there, back

    assert asyncio.run(run()) == (data, data[::-1])


def test_a_stream_that_nobody_reads_holds_up_no_other_and_is_bounded() -> None:
    async def run() -> tuple[bytes, bool]:
        opened: asyncio.Queue[Stream] = asyncio.Queue()
        near = Streams(lambda _: None)
        far = Streams(lambda _: None, lambda stream, _: opened.put_nowait(stream))
        ends = pair()
        carrying = [
            asyncio.create_task(near.reliable.carry(ends[0])),
            asyncio.create_task(far.reliable.carry(ends[1])),
        ]
        stuck, free = near.open(Port(1)), near.open(Port(2))
        writing = asyncio.create_task(stuck.write(bytes(4 * WINDOW_BYTES)))
        unread, read = await opened.get(), await opened.get()
        sending = asyncio.create_task(write_all(free, bytes(BYTES)))
        got = await asyncio.wait_for(read_all(read), 60)
        await sending
        held = unread._arrived_bytes <= WINDOW_BYTES and not writing.done()
        for task in (*carrying, writing):
            task.cancel()
        await asyncio.gather(*carrying, writing, return_exceptions=True)
        return got, held

    assert asyncio.run(run()) == (bytes(BYTES), True)


def test_an_end_that_sends_more_than_it_may_or_forgot_what_it_had_is_refused() -> None:
    async def run() -> None:
        near, far = Streams(lambda _: None), Streams(lambda _: None)
        (a, _), _ = near.fixed(Kind.EXEC), far.fixed(Kind.EXEC)
        a._may = 1 << 30
        ends = pair()
        sending = asyncio.create_task(near.reliable.carry(ends[0]))
        writing = asyncio.create_task(a.write(bytes(4 * WINDOW_BYTES)))
        with pytest.raises(Broken, match="more was sent than was granted"):
            await asyncio.wait_for(far.reliable.carry(ends[1]), 60)
        for task in (sending, writing):
            task.cancel()
        await asyncio.gather(sending, writing, return_exceptions=True)
        one, other = pair()
        stranger = Streams(lambda _: None)
        stranger.reliable._got = 99
        begins = asyncio.create_task(stranger.reliable.carry(other))
        with pytest.raises(Broken, match="has lost what it got before"):
            await asyncio.wait_for(near.reliable.carry(one), 60)
        begins.cancel()
        await asyncio.gather(begins, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        (b"a\x10\x11", None),
        (b"\r~.", None),
        (b"~.", None),
        (b"a~.", b"a~."),
        (b"\x10a\x11", b"\x10a\x11"),
        (b"\r~x", b"\r~x"),
        (b"\x10\x10\x11", None),
    ],
)
def test_only_the_two_ways_to_detach_detach(typed: bytes, passed: bytes | None) -> None:
    for parts in ([typed], [typed[i : i + 1] for i in range(len(typed))]):
        keys, got = Keys(), b""
        if passed is None:
            with pytest.raises(Detached):
                _ = [keys.take(part) for part in parts]
            continue
        for part in parts:
            got += keys.take(part)
        assert got == passed
