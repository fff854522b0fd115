"""Orders of several jobs come together, and one that is bad harms no other."""

from __future__ import annotations

import os

import msgspec

from shoal.model.commands import Envelope, Launch, Stop
from shoal.model.job import MemberRef
from shoal.wire import Orders
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


def test_a_frame_that_cannot_be_read_is_passed_over() -> None:
    with rig() as node:
        node.send(msgspec.Raw(b"\xc1 this is no message"))  # type: ignore[arg-type]
        wrong = Orders(Envelope(1, 1, ()))
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
    secrets = {"SHOAL_JOIN_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    with rig(**secrets, NCCL_SOCKET_IFNAME="eth7", LC_NUMERIC="C") as node:
        node.launch(GOOD, "env", env={"MINE": "1", "AWS_PROFILE": "mine"})
        assert node.exit(GOOD).code == 0
        seen = dict(line.split("=", 1) for line in node.text(GOOD).splitlines() if "=" in line)
        assert "secret" not in node.text(GOOD)
        assert (seen["MINE"], seen["AWS_PROFILE"], seen["PATH"]) == (
            "1",
            "mine",
            os.environ["PATH"],
        )
        assert (seen["NCCL_SOCKET_IFNAME"], seen["LC_NUMERIC"]) == ("eth7", "C")
