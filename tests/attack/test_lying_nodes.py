"""A machine that has joined and lies: about members that it does not have, of any tenant. It speaks
over a link of its own, and the controller behind the link is real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from harness.waiting import until_async

from shoal.control import certificates
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.packages import PackageStore
from shoal.control.store.sqlite import SqliteStore
from shoal.core.nodebook import NodeBook
from shoal.core.state.events.cluster import ControllerStarted
from shoal.link.channel import Dialled, dial
from shoal.link.wire import Commands, Heard, LinkFile, Log, Need, Piece
from shoal.model.job import JobSpec, MemberRef, Phase
from shoal.model.node import JOINED, NodeHealth, NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, LogChunk, MemberExit, NodeReport, Refusal, Slept, Submit
from tests.control.test_loop import HandClock
from tests.engines.linked_rig import NAME, Head, Keys
from tests.engines.test_link_attacks import Peer


class Victim(Peer):
    """A node that keeps its book, and answers commands as an agent does."""

    def __init__(self, node: str, gpus: int) -> None:
        super().__init__(node)
        spec = NodeSpec(id=node, gpus=gpus, cpu_milli=64_000, memory_mb=1_000, origin=JOINED)
        self.book = NodeBook(spec, 1)

    def follow(self) -> None:
        for message in [one for one in self.received if isinstance(one, Commands)]:
            self.book.take(message.envelope)
        self.received.clear()

    def report(self) -> NodeReport:
        self.follow()
        return self.book.report()


class Scene:
    def __init__(self, scratch: Path) -> None:
        self._lines: list[Dialled] = []
        self.store = SqliteStore(scratch / "db")
        self._door = socket.create_server((NAME, 0))
        self._served = certificates.own(scratch / "tls", (NAME,))
        keys = Keys(("honest", "liar"))
        self.head = Head(self._door, certificates.context_of(self._served), keys)
        self.logs = LogStore(scratch / "logs")
        self.packages = PackageStore(scratch / "packages")
        policy = Policy(silent_after_ms=10**9, grace_ms=10**9)
        self.loop = ControlLoop(
            self.store, self.head, HandClock(), policy, self.logs, self.packages
        )

    async def close(self) -> None:
        for line in self._lines:
            line.abort()
            await line.lost
        await self.head.close()
        self._door.close()

    async def dial(self, node: str, gpus: int) -> Victim:
        peer, url = Victim(node, gpus), f"https://{NAME}:{self._door.getsockname()[1]}"
        file = LinkFile(urls=(url,), key=f"key-of-{node}", certificate=self._served.anchor)
        peer.line = await dial(url, file, peer.make)
        self._lines.append(peer.line)
        peer.send(Heard(peer.report()))
        await until_async(lambda: self._ready(node))
        return peer

    def _ready(self, node: str) -> bool:
        known = self.loop.tick.state.nodes.get(node)
        return known is not None and known.health is NodeHealth.READY

    async def running(self, peer: Victim, **fields: object) -> str:
        spec = msgspec.convert({"command": ("work",), **fields}, JobSpec)
        answer = await self.loop.request(Submit(spec))
        assert isinstance(answer, Accepted)

        def runs() -> bool:
            peer.send(Heard(peer.report()))
            return self.loop.tick.state.jobs[answer.id].phase is Phase.RUNNING

        await until_async(runs)
        return answer.id

    async def heard(self, peer: Victim, report: NodeReport) -> None:
        said = self.loop.tick.state.heard.said
        peer.send(Heard(report))
        await until_async(lambda: said.get(peer.node, (0, 0))[1] >= report.sequence)


def play(scratch: Path, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        made = Scene(scratch)
        ticking = asyncio.create_task(made.loop.run())
        try:
            async with asyncio.timeout(60):
                await act(made)
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await made.close()

    asyncio.run(run())


def test_reports_of_members_that_a_gang_does_not_have_cost_nobody_a_submission(
    tmp_path: Path,
) -> None:
    async def act(scene: Scene) -> None:
        honest, liar = await scene.dial("honest", 4), await scene.dial("liar", 1)
        job = await scene.running(honest, gpus=1, members=2, where=["node=honest"])
        own = await scene.running(liar, gpus=1, where=["node=liar"])
        for number in range(25):
            refs = [MemberRef(one, 1, number + 1) for one in (job, own)] + [MemberRef(job, 1, 0)]
            lie = msgspec.structs.replace(
                liar.report(),
                alive=(MemberRef(own, 1, 0), *refs),
                asleep=tuple(Slept(ref, 1, 1) for ref in refs),
                refused=tuple(Refusal(ref, "no") for ref in refs),
                exits=tuple(MemberExit(ref, 1) for ref in refs),
            )
            await scene.heard(liar, lie)
            answer = await scene.loop.request(Submit(JobSpec(command=("work",), gpus=4)))
            assert isinstance(answer, Accepted)
        state = scene.loop.tick.state
        assert {state.jobs[one].phase for one in (job, own)} == {Phase.RUNNING}
        began = [
            one for one in scene.store.events(0, 9_999) if isinstance(one.event, ControllerStarted)
        ]
        assert len(began) == 1 and not scene.loop.tick.doubts.aside

    play(tmp_path, act)


def test_output_of_members_that_are_not_there_is_not_written(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        honest, liar = await scene.dial("honest", 4), await scene.dial("liar", 1)
        rule = {"restart": "on-failure", "retries": 3, "backoff_ms": 0}
        job = await scene.running(honest, gpus=1, where=["node=honest"], **rule)
        honest.book.exited(MemberRef(job, 1, 0), 1)

        def again() -> bool:
            honest.send(Heard(honest.report()))
            found = scene.loop.tick.state.jobs[job]
            return found.attempt == 2 and found.phase is Phase.RUNNING

        await until_async(again)
        for ref in (
            MemberRef(job, 2, 0),
            MemberRef(job, 2, 1),
            MemberRef(job, 1, 0),  # of the earlier attempt, which ran elsewhere, too
            MemberRef(job, 1, 7),
            MemberRef("j99", 1, 0),
        ):
            liar.send(Log(LogChunk(ref, 0, b"forged")))
        honest.send(Log(LogChunk(MemberRef(job, 1, 0), 0, b"what was left")))
        await until_async(lambda: scene.logs.kept(MemberRef(job, 1, 0)) == len(b"what was left"))
        assert scene.logs.read(MemberRef(job, 1, 0), 0).data == b"what was left"

    play(tmp_path, act)
    assert [path.name for path in tmp_path.glob("logs/*/*.log")] == ["1.0.log"]


def test_a_package_is_given_to_the_nodes_of_its_jobs_alone(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        import hashlib

        data = b"the code of somebody else"
        package = hashlib.sha256(data).hexdigest()
        upload = scene.packages.begin(package, len(data), set())
        upload.write(data)
        upload.finish()
        upload.close()
        honest, liar = await scene.dial("honest", 4), await scene.dial("liar", 1)
        await scene.running(honest, gpus=4, package=package)
        for peer in (honest, liar):
            peer.received.clear()
            peer.send(Need(package, 0))

        def answer(peer: Victim) -> list[Piece]:
            return [one for one in peer.received if isinstance(one, Piece)]

        await until_async(lambda: bool(answer(honest)) and bool(answer(liar)))
        assert answer(honest)[0].piece.data == data
        assert not answer(liar)[0].piece.data
        assert answer(liar)[0].piece.problem == "no job on this node has this package"

    play(tmp_path, act)
