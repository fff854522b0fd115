"""Commands of several jobs come together, and one that is bad harms no other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from shoal.agent.agent import Agent
from shoal.agent.member import EDGES, Member, State
from shoal.agent.process import Ended
from shoal.agent.shipping import Output
from shoal.link.wire import Commands, FromAgent, Heard, Kept
from shoal.machine.cgroups import Ceiling, Cgroups, Used
from shoal.machine.exits import MEMBERS
from shoal.model.commands import Acknowledge, Envelope, Launch, Stop
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import Beat
from shoal.model.report import MemberExit, NodeReport
from tests.agent.rig import Rig, rig

BAD, GOOD, LATER = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0), MemberRef("j3", 1, 0)


def _launch(node: Rig, ref: MemberRef, *argv: str, env: dict[str, str] | None = None) -> Launch:
    assert node.report is not None
    return Launch(
        node="n1",
        incarnation=node.report.incarnation,
        ref=ref,
        argv=argv,
        env=env or {},
        workdir="",
        stop_grace_ms=1_000,
    )


def test_an_order_that_cannot_be_carried_out_ends_alone() -> None:
    with rig() as node:
        node.order(
            _launch(node, BAD, "echo", "never", env={"SHOAL_SERVICE": "x"}),
            _launch(node, GOOD, "sleep", "600"),
        )
        ended = node.exit(BAD)
        assert ended.code == 127
        assert "PORT" in ended.why
        node.until(lambda: node.report is not None and node.report.alive == (GOOD,))
        node.stop(GOOD)
        assert node.exit(GOOD).stopped


def test_what_no_process_can_be_given_is_an_exit_and_not_a_ghost() -> None:
    """A NUL byte makes the start raise something that is no OSError."""
    with rig() as node:
        node.order(
            _launch(node, BAD, "echo", "nul\0byte"),
            _launch(node, GOOD, "echo", "fine"),
        )
        assert node.exit(BAD).code == 127
        assert "cannot start" in node.exit(BAD).why
        assert node.exit(GOOD).code == 0


class _Silent(asyncio.Transport):
    """A link whose other end only counts what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[NodeReport] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        message = msgspec.msgpack.decode(bytes(data)[4:], type=FromAgent)
        if isinstance(message, Heard):
            self.reports.append(message.report)

    def get_write_buffer_size(self) -> int:
        return 0


def _agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, _Silent]:
    """In this very process, whose children are not the agent's to look at."""
    none = Cgroups("", {}, {}, (), unified=False)
    monkeypatch.setattr(Cgroups, "open", lambda *_, **__: none)
    spec = NodeSpec(id="n1", gpus=0, cpu_milli=16_000, memory_mb=4_000)
    agent, transport = Agent(tmp_path, spec, 1), _Silent()
    for name in ("reap", "notice", "kill_leftovers"):
        monkeypatch.setattr(agent.members.processes, name, tuple)
    agent.connect().connection_made(transport)
    return agent, transport


def _launches(refs: list[MemberRef]) -> tuple[Launch, ...]:
    made = Launch(
        node="n1", incarnation=1, ref=refs[0], argv=("true",), env={}, workdir="", stop_grace_ms=1
    )
    return tuple(msgspec.structs.replace(made, ref=ref) for ref in refs)


def test_a_node_that_starts_thousands_is_busy_and_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start takes a second here; who has not had its turn is not told as alive."""
    now = [0.0]
    refs = [MemberRef("j1", 1, number) for number in range(10)]

    async def main() -> list[NodeReport]:
        agent, transport = _agent(tmp_path, monkeypatch)
        monkeypatch.setattr(agent.members, "launch", lambda _: now.append(now[-1] + 1.1))
        monkeypatch.setattr("shoal.agent.agent.time.monotonic", lambda: now[-1])
        agent._obey(Envelope(1, 1, _launches(refs)))
        await asyncio.sleep(0)
        agent.members.beats.close()
        return transport.reports

    reports = asyncio.run(main())
    assert len(reports) > len(refs)
    assert [len(report.alive) for report in reports[1:10]] == list(range(1, 10))
    assert reports[-1].alive == tuple(refs) and not reports[-1].getting


def test_output_that_is_kept_costs_a_look_at_its_own_member_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7,000 members that a life before had left kept a node silent until it was given up, again
    and again."""
    refs = [MemberRef("j1", 1, number) for number in range(100)]
    looks: list[MemberRef] = []

    async def main() -> None:
        for ref in refs:
            (tmp_path / MEMBERS / str(ref)).mkdir(parents=True)
        agent, _ = _agent(tmp_path, monkeypatch)
        agent.members.clear_up()
        real = agent._shipping.complete

        def complete(ref: MemberRef) -> bool:
            looks.append(ref)
            return real(ref)

        monkeypatch.setattr(agent._shipping, "complete", complete)
        for ref in refs:
            agent._received(Kept(ref, 0))
        agent.members.beats.close()

    asyncio.run(main())
    assert not list((tmp_path / MEMBERS).iterdir())
    assert len(looks) <= 3 * len(refs)


def test_members_that_end_one_by_one_cost_a_look_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [MemberRef("j1", 1, number) for number in range(100)]
    looks: list[int] = []
    monkeypatch.setattr(Output, "bound", lambda _, ahead: looks.append(ahead))

    async def main() -> None:
        agent, _ = _agent(tmp_path, monkeypatch)
        monkeypatch.setattr(agent.members.processes, "start", lambda *_: None)
        agent._obey(Envelope(1, 1, _launches(refs)))
        for ref in refs:
            (tmp_path / MEMBERS / str(ref) / "output").write_text("bye")
            ended = Ended(ref, 0, Ceiling(), Used())
            monkeypatch.setattr(agent.members.processes, "reap", lambda ended=ended: [ended])
            agent.members.reap()
            agent._received(Kept(ref, 3))
        written = asyncio.Event()
        agent.members._exits.keep(MemberExit(LATER, 0), written.set)  # after the others
        await written.wait()
        assert sorted(exit_.ref for exit_ in agent._book.report().exits) == refs
        agent.members.beats.close()

    asyncio.run(main())
    assert len(looks) <= 3 * len(refs)


def test_a_frame_that_cannot_be_read_is_passed_over() -> None:
    with rig() as node:
        node.send(msgspec.Raw(b"\xc1 this is no message"))  # type: ignore[arg-type]
        wrong = Commands(Envelope(1, 1, ()))
        node.send(msgspec.msgpack.decode(msgspec.msgpack.encode(wrong)) | {"envelope": 7})
        node.launch(LATER, "echo", "fine")
        assert node.exit(LATER).code == 0


def test_a_node_that_cannot_write_its_sign_of_contact_obeys_all_the_same() -> None:
    with rig() as node:
        blocked = node.directory / "contact"
        blocked.unlink(missing_ok=True)
        blocked.mkdir()  # nothing can be renamed to a directory: even root's writes fail
        node.reconnect()
        node.launch(LATER, "sleep", "600")
        node.until(lambda: node.report is not None and node.report.alive == (LATER,))
        node.order(
            Stop(node="n1", incarnation=node.ask().incarnation, ref=LATER, grace_ms=100, why="")
        )
        assert node.exit(LATER).stopped
        os.rmdir(blocked)


def test_what_the_operator_has_in_the_shell_does_not_reach_a_job() -> None:
    secrets = {"SHOAL_JOIN_TOKEN": "canary-7", "AWS_SECRET_ACCESS_KEY": "canary-7"}
    with rig(**secrets, NCCL_SOCKET_IFNAME="eth7", LC_NUMERIC="C") as node:
        node.launch(GOOD, "env", env={"MINE": "1", "AWS_PROFILE": "mine"})
        assert node.exit(GOOD).code == 0
        seen = dict(line.split("=", 1) for line in node.text(GOOD).splitlines() if "=" in line)
        assert "canary-7" not in node.text(GOOD)
        assert (seen["MINE"], seen["AWS_PROFILE"], seen["PATH"]) == (
            "1",
            "mine",
            os.environ["PATH"],
        )
        assert (seen["NCCL_SOCKET_IFNAME"], seen["LC_NUMERIC"]) == ("eth7", "C")


def test_a_member_only_takes_the_steps_that_its_state_machine_allows() -> None:
    member = Member(GOOD)
    for state in (State.RUNNING, State.DUMPING, State.STOPPING):
        member.become(state)
    with pytest.raises(AssertionError, match="cannot go from stopping to running"):
        member.become(State.RUNNING)
    exit_ = member.end(3, "it failed", Beat(ref="", step=7), Fault.NONE, stopped=True)
    assert (member.state, exit_.code, exit_.step, exit_.stopped) == (State.ENDED, 3, 7, True)
    with pytest.raises(AssertionError, match="cannot go from ended to ended"):
        member.end(0, "", None, Fault.NONE, stopped=False)


def test_every_state_can_be_reached_and_left() -> None:
    """A leftover is the end; a launched member, or a leftover of an earlier life, the beginning."""
    assert {came for came, _ in EDGES} == set(State) - {State.LEFTOVER}
    assert {goes for _, goes in EDGES} == set(State) - {State.LAUNCHED}


def test_a_late_acknowledgement_does_not_take_a_running_member_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        agent, _ = _agent(tmp_path, monkeypatch)
        monkeypatch.setattr(agent.members.processes, "start", lambda *_: None)
        agent._obey(Envelope(1, 1, _launches([GOOD])))
        agent._obey(Envelope(1, 2, (Acknowledge(node="n1", incarnation=1, ref=GOOD),)))
        assert (tmp_path / MEMBERS / str(GOOD) / "output").exists()
        agent.members.beats.close()

    asyncio.run(main())
