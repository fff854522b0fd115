"""The link at the real API: which keys open it, and what a node can do there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import WAIT_S

from shoal.api.access import new_token
from shoal.core.nodebook import NodeBook
from shoal.engines.linked import engine as linked
from shoal.engines.linked.engine import LinkedEngine
from shoal.link.channel import Dialled, Refused, dial
from shoal.link.wire import Heard, Kept, Link, LinkFile, Log, ToAgent
from shoal.model.identity import NodeKey
from shoal.model.job import JobSpec, MemberRef
from shoal.model.node import JOINED, NodeSpec
from shoal.model.report import LogChunk, RemoveKey, SetKey, Submit
from tests.api.server import OPERATORS, Server, serving


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(linked, "LOOK_S", 0.05)
    engine = LinkedEngine()
    with serving(tmp_path / "home", linked=engine) as server:
        asyncio.run_coroutine_threadsafe(engine.start(server.loop), server.asyncio).result(WAIT_S)
        yield server
        asyncio.run_coroutine_threadsafe(engine.close(), server.asyncio).result(WAIT_S)


def key(server: Server, node: str) -> tuple[str, str]:
    """A new key of a node, or a join token; its id and its text."""
    key_id, text, hash_ = new_token()
    server.ask(SetKey(NodeKey(id=key_id, hash=hash_, node=node)))
    return key_id, text


async def opened(
    server: Server, text: str, received: Callable[[Any], None]
) -> tuple[Dialled, Link]:
    made: list[Link] = []

    def make() -> Link:
        made.append(Link(ToAgent, lambda _: None, received, lambda _: None))
        return made[0]

    url = f"http://{server.address}:{server.port}"
    line = await dial(url, LinkFile(urls=(url,), key=text), make)
    return line, made[0]


def play(act: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            await act()

    asyncio.run(run())


def report(node: str) -> Heard:
    spec = NodeSpec(id=node, cpu_milli=1_000, memory_mb=1_000, origin=JOINED)
    return Heard(NodeBook(spec, 5).report())


def test_only_a_nodes_own_key_opens_a_link(server: Server) -> None:
    server.tenant("ours")
    wrong = {
        "no key": "",
        "the operator": OPERATORS,
        "a user": server.token("ann", "ours"),
        "a join token": key(server, "")[1],
        "another secret": key(server, "far")[1][:-1] + "!",
    }

    async def act() -> None:
        for who, text in wrong.items():
            with pytest.raises(Refused):
                await opened(server, text, lambda _: None)
            assert not server.run(lambda: len(server.linked or ())), who
        line, link = await opened(server, key(server, "far")[1], lambda _: None)
        link.send(report("far"))
        while "far" not in server.run(lambda: list(server.loop.tick.state.nodes)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        line.abort()
        await line.lost

    play(act)


def test_a_key_that_is_revoked_ends_its_link(server: Server) -> None:
    key_id, text = key(server, "far")

    async def act() -> None:
        line, _ = await opened(server, text, lambda _: None)
        await asyncio.to_thread(server.ask, RemoveKey(key_id))
        await line.lost
        with pytest.raises(Refused):
            await opened(server, text, lambda _: None)

    play(act)


def test_a_node_writes_no_log_of_a_member_that_is_not_its_own(
    server: Server, tmp_path: Path
) -> None:
    """Such a message may name any file, and must not be sent again and again."""
    server.ask(Submit(JobSpec(command=("sleep", "600"), cpu_milli=100)))
    (job,) = server.run(lambda: list(server.loop.tick.state.jobs.values()))
    ran = MemberRef(job.id, job.attempt, 0)
    refs = (ran, MemberRef("../../evil", 1, 0), MemberRef("j999", 1, 0), MemberRef(job.id, 9, 0))
    kept: list[Kept] = []

    async def act() -> None:
        def received(message: Any) -> None:
            if isinstance(message, Kept):
                kept.append(message)

        line, link = await opened(server, key(server, "far")[1], received)
        link.send(report("far"))
        for ref in refs:
            link.send(Log(LogChunk(ref, 0, b"forged")))
        while len(kept) < len(refs):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        line.abort()
        await line.lost

    play(act)
    assert [one.size for one in kept] == [6] * len(refs)
    assert server.run(lambda: server.loop.logs.kept(ran)) == 0
    assert not list(tmp_path.rglob("*evil*"))
    assert not list(server.home.logs.rglob("*.log"))
