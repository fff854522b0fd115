"""What a hostile, broken or half-open link can do to the head: nothing but end."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import WAIT_S, until_async

from shoal.agent import dialling
from shoal.control import certificates
from shoal.control.logs import LogStore
from shoal.control.packages import PackageStore
from shoal.core.nodebook import NodeBook
from shoal.engines.linked import engine as linked
from shoal.link.channel import Dialled, Refused, dial
from shoal.link.wire import (
    COMPRESSED,
    AsBefore,
    Died,
    Heard,
    Link,
    LinkFile,
    Log,
    ToAgent,
    Turned,
    encode,
)
from shoal.model.commands import Envelope, Stop
from shoal.model.job import MemberRef
from shoal.model.node import JOINED, NodeSpec
from shoal.model.report import LogChunk, NodeGone, NodeReport, Still
from tests.engines.hand import Ears
from tests.engines.linked_rig import NAME, Head, Keys

LENGTH = struct.Struct("!I")


class Peer:
    """The other end of one link, in whoever's hands."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.received: list[Any] = []
        self.link: Link | None = None
        self.line: Dialled | None = None

    def make(self) -> Link:
        self.link = Link(ToAgent, lambda _: None, self.received.append, lambda _: None)
        return self.link

    def send(self, message: Any) -> None:
        assert self.link is not None
        self.link.send(message)

    def raw(self, data: bytes) -> None:
        assert self.line is not None and self.line.channel is not None
        self.line.channel.write(data)

    @property
    def lost(self) -> bool:
        assert self.line is not None
        return self.line.lost.done()


class Scene:
    def __init__(self, scratch: Path) -> None:
        self._lines: list[Dialled] = []
        self.keys = Keys(("n1", "n2"))
        self._door = socket.create_server((NAME, 0))
        self._port = self._door.getsockname()[1]
        self._served = certificates.own(scratch / "tls", (NAME,))
        context = certificates.context_of(self._served)
        self.head = Head(self._door, context, self.keys)
        self.ears = Ears(LogStore(scratch / "logs"), PackageStore(scratch / "packages"))

    async def dial(self, node: str, key: str = "") -> Peer:
        peer, url = Peer(node), f"https://{NAME}:{self._port}"
        file = LinkFile(urls=(url,), key=key or f"key-of-{node}", certificate=self._served.anchor)
        peer.line = await dial(url, file, peer.make)
        self._lines.append(peer.line)
        return peer

    async def close(self) -> None:
        for line in self._lines:
            line.abort()
            await line.lost
        await self.head.close()
        self._door.close()


@asynccontextmanager
async def scene(scratch: Path) -> AsyncIterator[Scene]:
    made = Scene(scratch)
    await made.head.start(made.ears)
    try:
        yield made
    finally:
        await made.close()


def play(scratch: Path, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with scene(scratch) as made:
            await act(made)

    asyncio.run(run())


def report(node: str = "n1", incarnation: int = 7, **more: Any) -> NodeReport:
    spec = NodeSpec(id=node, cpu_milli=1_000, memory_mb=100, origin=JOINED, **more)
    return NodeBook(spec, incarnation).report()


def test_a_node_speaks_for_itself_alone(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        for message in (
            Heard(report("n2")),
            AsBefore(Still("n2", 7, 1)),
            Died(NodeGone("n2", 7, "murdered")),
        ):
            peer = await scene.dial("n1")
            peer.send(message)
            await until_async(lambda: peer.lost)  # noqa: B023
        assert not scene.ears.newest and not scene.ears.deaths

    play(tmp_path, act)


def test_an_origin_that_only_the_heads_own_nodes_have_is_not_believed(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        peer = await scene.dial("n1")
        peer.send(Heard(NodeBook(NodeSpec(id="n1", cpu_milli=1, memory_mb=1), 7).report()))
        await until_async(lambda: "n1" in scene.ears.newest)
        assert scene.ears.newest["n1"].spec.origin == JOINED

    play(tmp_path, act)


def test_of_two_links_of_one_node_the_newer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "ALIVE_S", 0.0)  # the machine of the first lost its power

    async def act(scene: Scene) -> None:
        first = await scene.dial("n1")
        first.send(Heard(report(incarnation=7)))
        await until_async(lambda: "n1" in scene.ears.newest)
        second = await scene.dial("n1")
        second.send(Heard(report(incarnation=8)))
        await until_async(lambda: scene.ears.newest["n1"].incarnation == 8)
        await until_async(lambda: first.lost)
        again = await scene.dial("n1")  # the same life, after its link broke
        again.send(Heard(report(incarnation=8)))
        await until_async(lambda: second.lost)
        assert len(scene.head) == 1

    play(tmp_path, act)


def test_a_copy_of_a_nodes_folder_does_not_cut_off_the_node(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        node = await scene.dial("n1")
        node.send(Heard(report(incarnation=8)))
        await until_async(lambda: "n1" in scene.ears.newest)
        for life in (7, 9, 7):  # a copy that was started later does not win either
            node.send(Heard(report(incarnation=8)))
            waiting, copy = await scene.dial("n1"), await scene.dial("n1")
            await until_async(lambda: waiting.lost)  # noqa: B023
            copy.send(Heard(report(incarnation=life)))
            await until_async(lambda: copy.lost)  # noqa: B023
            assert [type(word) for word in copy.received] == [Turned]  # the copy knows why
        node.send(Heard(report(incarnation=8)))
        ends = await scene.dial("n1")  # nor does the end of the copy end the node
        ends.send(Died(NodeGone("n1", 9, "its agent has ended")))
        await until_async(lambda: ends.lost)
        assert not scene.ears.deaths
        assert not node.lost and scene.ears.newest["n1"].incarnation == 8
        assert len(scene.head._all()) == 1

    play(tmp_path, act)


def test_a_key_that_is_taken_away_opens_no_link(tmp_path: Path) -> None:
    """One that is open is ended by the watcher: `tests/attack/test_void_principals.py`."""

    async def act(scene: Scene) -> None:
        other = await scene.dial("n2")
        del scene.keys.of["key-of-n1"]
        with pytest.raises(Refused):
            await scene.dial("n1")
        other.send(Heard(report("n2")))
        await until_async(lambda: "n2" in scene.ears.newest)

    play(tmp_path, act)


def test_a_link_from_which_nothing_comes_any_more_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "LOOK_S", 0.05)
    monkeypatch.setattr(linked, "SILENT_S", 1.0)

    async def act(scene: Scene) -> None:
        peer, other = await scene.dial("n1"), await scene.dial("n2")
        while not peer.lost:
            other.send(Heard(report("n2")))
            await asyncio.sleep(0.1)
        assert not other.lost

    play(tmp_path, act)


def test_an_agent_notices_a_head_that_no_longer_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "PING_S", 0.05)
    monkeypatch.setattr(dialling, "SILENT_S", 1.0)

    async def act(scene: Scene) -> None:
        peer = await scene.dial("n1")
        assert peer.line is not None
        heard_at = peer.line.heard_at
        holding = asyncio.create_task(dialling.Dialling(tmp_path, peer.make)._hold(peer.line))
        await until_async(lambda: peer.line is not None and peer.line.heard_at > heard_at + 0.5)
        assert not holding.done()  # the head answers pings
        peer.line._transport.pause_reading()
        await asyncio.wait_for(holding, WAIT_S)

    play(tmp_path, act)


def frames(seed: int) -> list[tuple[bytes, bool]]:
    """Streams that no agent sends, and whether the link must end; the others change nothing."""
    rng = random.Random(seed)
    good = encode(Heard(report()))
    bomb = zlib.compress(bytes(128 << 20), 1)
    broken = bytearray(good)
    for _ in range(8):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    deep = b"\x91" * 100_000
    refs = tuple(MemberRef(f"j{number}", 1, 0) for number in range(linked.MEMBERS_MAX + 1))
    many = msgspec.structs.replace(report(), alive=refs)
    return [
        (LENGTH.pack(len(bomb) | COMPRESSED) + bomb, True),
        (LENGTH.pack(COMPRESSED | 4) + b"nope", True),
        (LENGTH.pack(linked.MESSAGE_BYTES_MAX + 1), True),
        (LENGTH.pack(2**31 - 1) + b"x", True),
        (b"\x7f" + rng.randbytes(200_000), True),
        (LENGTH.pack(len(broken)) + bytes(broken), False),
        (LENGTH.pack(len(deep)) + deep, False),
        (LENGTH.pack(0) * 1_000, True),
        (b"".join(LENGTH.pack(9) + rng.randbytes(9) for _ in range(1_000)), True),
        (b"".join(_framed(Heard(report(incarnation=life))) for life in range(7, 60)), True),
        (_framed(Heard(report(gpu_model="x" * 100_000))), True),
        (_framed(Heard(many)), True),
        (_framed(Log(LogChunk(MemberRef("j1", 1, 0), -1, b"x", -5))), False),
    ]


def _framed(message: Any) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def test_garbage_bombs_and_floods_end_their_link_and_nothing_else(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        other = await scene.dial("n2")
        for seed in range(2):
            for data, ends in frames(seed):
                peer = await scene.dial("n1")
                before_kb = _resident_kb()
                for start in range(0, len(data), 50_000):
                    peer.raw(data[start : start + 50_000])
                await until_async(lambda: peer.lost or not ends)  # noqa: B023
                scene.ears.newest.pop("n2", None)
                other.send(Heard(report("n2")))
                await until_async(lambda: "n2" in scene.ears.newest)
                assert _resident_kb() - before_kb < 64_000
                assert peer.line is not None
                peer.line.abort()
        assert not other.lost
        assert set(scene.ears.newest) <= {"n1", "n2"}

    play(tmp_path, act)


def _resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def test_what_a_node_that_does_not_read_makes_the_head_hold_is_bounded(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        peer = await scene.dial("n1")
        peer.send(Heard(report()))
        await until_async(lambda: "n1" in scene.ears.newest)
        assert peer.line is not None
        peer.line._transport.pause_reading()
        rng, most = random.Random(1), 0
        (line,) = scene.head._lines.values()
        for number in range(1, 1_000):
            if "n1" not in scene.head:
                break
            why = rng.randbytes(100_000).hex()  # which does not compress to nothing
            order = Stop(node="n1", incarnation=7, ref=MemberRef("j1", 1, 0), grace_ms=0, why=why)
            scene.head.send("n1", Envelope(1, number, (order,)))
            most = max(most, line.link.backlog_bytes)
            await asyncio.sleep(0)
        assert "n1" not in scene.head
        assert linked.PIECES_BYTES_MAX < most < linked.BACKLOG_BYTES_MAX + 1_000_000

    play(tmp_path, act)


def test_a_thousand_agents_do_not_come_back_in_one_moment() -> None:
    """Pauses are spread over their span, and a span doubles up to a bound."""
    spans = [dialling.SPAN_FIRST_S]
    while spans[-1] < dialling.SPAN_MAX_S:
        spans.append(dialling.next_span_s(spans[-1], dialling.SPAN_MAX_S))
    assert spans == [1.0, 2.0, 4.0, 8.0, 10.0]
    for span_s in spans:
        pauses = sorted(dialling.pause_s(span_s) for _ in range(1_000))
        assert span_s / 10 <= pauses[0] and pauses[-1] <= span_s
        in_tenths = [int(10 * pause_s / span_s) for pause_s in pauses]
        assert max(in_tenths.count(tenth) for tenth in range(1, 10)) < 250
