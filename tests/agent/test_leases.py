"""A member ends with its lease, though no controller is there to say so."""

from __future__ import annotations

from pathlib import Path

from shoal.agent.processes import KILLED_CODE
from shoal.model.commands import Lease, Renew
from shoal.model.job import MemberRef
from shoal.model.report import Leased
from tests.agent.rig import Rig, rig

REF, OTHER = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
DEAF = "trap '' TERM; touch up; while :; do sleep 0.05; done"
UNTIL_MS = 1_800_000_000_000  # the node never compares it with a clock of its own


def lease(node: Rig, for_ms: int, until_ms: int = UNTIL_MS) -> Lease:
    return Lease(until_ms, node.ask().sequence, for_ms)


def launch(node: Rig, for_ms: int, script: str) -> None:
    """Again if the command took so long that the lease was over, as a controller does."""

    def known() -> bool:
        report = node.ask()
        return REF in report.alive or any(one.ref == REF for one in report.exits)

    while not known():
        node.launch(REF, "sh", "-c", script, lease=lease(node, for_ms))
    node.until(lambda: (folder(node) / "up").exists())


def folder(node: Rig) -> Path:
    return node.directory / "members" / str(REF)


def test_a_member_that_ignores_its_end_is_killed_while_no_controller_is_there() -> None:
    with rig() as node:
        launch(node, 4_000, DEAF)
        node.hang_up()
        node.wait(lambda: f"{REF} ended with code" in node.log())
        node.reconnect()
        exit_ = node.exit(REF)
        assert (exit_.code, exit_.stopped, exit_.lease_ms) == (KILLED_CODE, True, UNTIL_MS)
        assert node.ask().leases == ()


def test_a_member_that_is_being_stopped_is_killed_when_its_lease_ends() -> None:
    with rig() as node:
        launch(node, 4_000, DEAF)
        node.stop(REF, grace_ms=3_600_000)
        assert node.exit(REF).code == KILLED_CODE


def test_a_member_that_is_renewed_lives_on() -> None:
    with rig() as node:
        launch(node, 30_000, "touch up; while ! test -e go; do sleep 0.05; done")
        report = node.ask()
        assert report.leases == (Leased(REF, UNTIL_MS),)
        longer = lease(node, 3_600_000, UNTIL_MS + 1)
        node.order(Renew(node="n1", incarnation=report.incarnation, ref=REF, lease=longer))
        assert node.ask().leases == (Leased(REF, UNTIL_MS + 1),)
        (folder(node) / "go").touch()
        exit_ = node.exit(REF)
        assert (exit_.code, exit_.stopped, exit_.lease_ms) == (0, False, 0)
