"""The link keeps the contract: real starters and agents dial a real TLS port, through a proxy."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until
from storm.node import Fate

from shoal.control import certificates
from shoal.link.packing import pack
from shoal.machine.files import LINK_PROBLEM, STARTER_LOCK, held
from shoal.model.job import MemberRef
from shoal.model.report import PackagePiece
from tests.engines.contract import ProcessContract, play, play_two
from tests.engines.hand import SLEEPS, Hand, Program, clean
from tests.engines.linked_rig import LinkedRig
from tests.engines.sleep_contract import SleepContract

# Takes longer to save than a node gives its members that only restarts.
SAVES = Program(
    "while :; do sleep 0.05; done",
    Fate(None),
    """trap 'sleep 5.5; touch "$RIG/$SHOAL_REF.saved"; echo saved; exit 7' TERM""",
)


@pytest.fixture(scope="module")
def rig() -> Iterator[LinkedRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-linked-"))
    made = LinkedRig(scratch)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


class TestLinked(ProcessContract, SleepContract):
    def test_a_link_that_is_cut_in_the_middle_of_a_log_loses_nothing_of_it(
        self, rig: LinkedRig
    ) -> None:
        node, script = rig.nodes[0], "seq 1 400000; exit 4"  # 2.7 MB, far less when compressed

        async def scene(hand: Hand) -> None:
            ref, before = hand.new_ref(), rig.proxy.passed
            rig.proxy.cut_after = before + 200_000
            order = hand.launch_order(node, ref, ("sh", "-c", script))
            await hand.insist(node, order, lambda: hand.knows(node, ref))
            assert (await hand.exit(node, ref)).code == 4
            wanted = "".join(f"{number}\n" for number in range(1, 400_001)).encode()
            assert hand.output(ref) == wanted
            assert rig.proxy.cut_after == 0  # it was cut
            assert rig.proxy.passed - before < len(wanted) * 2 // 3  # with what was sent twice

        play(rig, scene)

    def test_a_link_that_is_cut_in_the_middle_of_a_package_fetches_the_rest(
        self, rig: LinkedRig
    ) -> None:
        node, folder = rig.nodes[1], rig.scratch / "cut"
        folder.mkdir()
        (folder / "code").write_text("from afar\n")
        (folder / "ballast").write_bytes(os.urandom(6 << 20))
        package = pack(folder)

        async def scene(hand: Hand) -> None:
            with package.file as file:
                hand.keep(package.sha256, file.read())
            ref, pieces = hand.new_ref(), hand.packages.piece
            order = hand.launch_order(node, ref, ("cat", "code"))
            order = msgspec.structs.replace(order, package=package.sha256, workdir=package.folder)
            asked = []

            def piece(name: str, offset: int) -> PackagePiece:
                asked.append(offset)
                if len(asked) == 4:
                    rig.proxy.cut()
                return pieces(name, offset)

            hand.packages.piece = piece  # type: ignore[method-assign, assignment]
            await hand.insist(node, order, lambda: hand.knows(node, ref))
            assert (await hand.exit(node, ref)).code == 0
            assert hand.output(ref) == b"from afar\n"
            assert len(asked) > 4 and max(asked) > 5 << 20

        play(rig, scene)

    def test_an_agent_outlives_its_starter_and_the_next_one_takes_it_over(
        self, rig: LinkedRig
    ) -> None:
        node, refs, lives = rig.nodes[0], [MemberRef("j", 0, 0)], [0]

        async def before(hand: Hand) -> None:
            refs[0] = await hand.launch(node, SLEEPS)
            lives[0] = hand.report(node).incarnation
            starter = rig._starters.pop(node)
            starter.kill()
            starter.wait()
            rig.start(node)
            until(lambda: held(rig.directory(node) / STARTER_LOCK), "no starter")

        async def after(hand: Hand) -> None:
            assert hand.alive(node, refs[0]) and hand.report(node).incarnation == lives[0]
            rig.kill(node)  # it is not the starter's child, which notices anyway
            await hand.until(lambda: hand.report(node).incarnation > lives[0])

        play_two(rig, before, after)

    def test_a_machine_that_is_told_to_end_ends_its_members_well_and_reports_its_end(
        self, rig: LinkedRig
    ) -> None:
        node = rig.nodes[1]

        async def scene(hand: Hand) -> None:
            ref = await hand.launch(node, SAVES)
            life = hand.report(node).incarnation
            starter = rig._starters.pop(node)
            starter.send_signal(signal.SIGTERM)
            await hand.until(lambda: bool(hand.ears.deaths))
            (gone,) = hand.ears.deaths
            assert (gone.node, gone.incarnation) == (node, life)
            assert (rig.scratch / f"{ref}.saved").exists() and not rig.running(ref)
            assert hand.output(ref).endswith(b"saved\n")
            assert hand.report(node).ends_in_ms == 0 and hand.report(node).ends_why
            assert ref not in {one.ref for one in gone.exits}  # its code is no result of its own
            assert starter.wait(WAIT_S) == 0
            rig.start(node)
            await hand.until(lambda: hand.report(node).incarnation > life)

        play(rig, scene)

    def test_an_expired_certificate_gives_one_line_and_its_renewal_ends_the_trouble(
        self, rig: LinkedRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node, refs = rig.nodes[0], [MemberRef("j", 0, 0)]
        problem, log = (rig.directory(node) / name for name in (LINK_PROBLEM, "agent.log"))

        def show_certificate(days: int) -> None:
            monkeypatch.setattr(certificates, "SERVER_DAYS", days)
            (rig.scratch / "tls" / "server.pem").unlink()
            certificates.load(rig.context, certificates.own(rig.scratch / "tls", ("127.0.0.1",)))

        monkeypatch.setattr(certificates, "SKEW", timedelta(days=2))

        async def before(hand: Hand) -> None:
            refs[0] = await hand.launch(node, SLEEPS)
            before = log.stat().st_size
            show_certificate(-1)
            rig.proxy.cut()
            await hand.until(problem.exists)
            assert problem.read_text().count("\n") == 0
            assert "certificate has expired" in problem.read_text()
            said = log.read_bytes()[before:].decode()
            assert "Traceback" not in said and said.count("certificate has expired") == 1

        async def after(hand: Hand) -> None:
            await hand.until(lambda: not problem.exists())
            assert hand.alive(node, refs[0]) and rig.starts(refs[0]) == 1
            await hand.stop(node, refs[0])

        async def renew() -> None:
            show_certificate(30)

        play_two(rig, before, after, renew)
