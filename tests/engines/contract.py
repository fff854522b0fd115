"""What every engine promises, through `ports.Engine` and `ports.Inbox` alone.

`Contract` holds for all of them, the simulated world too. `ProcessContract` adds what only real
processes have: output, an environment, a working directory.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import msgspec

from shoal.link.packing import pack
from shoal.model.commands import Check, Launch, Stop
from shoal.model.job import MemberRef
from shoal.model.secret import SecretsOf, SecretValue
from tests.engines.hand import (
    CRASHES,
    ENDS_WELL,
    FAILS,
    SLEEPS,
    STUBBORN,
    SUCCEEDS,
    WAITS,
    Hand,
    Program,
    Rig,
    controller,
)

KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM
CANNOT_START = 127


def play(rig: Rig, scene: Callable[[Hand], Awaitable[None]]) -> None:
    """With one controller, from its start to its end."""

    async def run() -> None:
        async with controller(rig) as hand:
            await scene(hand)

    asyncio.run(run())


def play_two(
    rig: Rig,
    before: Callable[[Hand], Awaitable[None]],
    after: Callable[[Hand], Awaitable[None]],
    between: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """A controller dies in the middle of the scene, and another goes on."""

    async def run() -> None:
        async with controller(rig) as first:
            await before(first)
            await first.die()
        if between is not None:
            await between()
        async with controller(rig) as second:
            await after(second)

    asyncio.run(run())


class Contract:
    """Engines' tests derive from it and give a fixture `rig`."""

    # -- reports ---------------------------------------------------------------------------

    def test_every_node_reports_and_reports_again_when_asked(self, rig: Rig) -> None:
        async def scene(hand: Hand) -> None:
            for node in rig.nodes:
                first = hand.report(node)
                assert first.spec.id == node and first.spec.gpus == 4 and first.incarnation > 0
                assert hand.engine is not None
                await hand.engine.resend()
                await hand.until(lambda: hand.report(node).sequence > first.sequence)  # noqa: B023
                assert hand.report(node).incarnation == first.incarnation

        play(rig, scene)

    # -- launch ----------------------------------------------------------------------------

    def test_a_launch_said_many_times_starts_one_process(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            order = hand.launch_order(node, ref, SLEEPS.argv)
            for _ in range(5):
                hand.say(node, order)
            await hand.insist(node, order, lambda: hand.alive(node, ref))
            await hand.until(lambda: rig.starts(ref) > 0)
            hand.say(node, order, order)
            await hand.settle(node)
            assert hand.alive(node, ref) and rig.starts(ref) == 1
            await hand.stop(node, ref)

        play(rig, scene)

    def test_what_has_ended_is_not_launched_again(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = await hand.launch(node, SUCCEEDS)
            await hand.exit(node, ref)
            hand.say(node, hand.launch_order(node, ref, SUCCEEDS.argv))
            await hand.settle(node)
            assert not hand.alive(node, ref) and rig.starts(ref) == 1

        play(rig, scene)

    def test_orders_for_another_life_or_from_the_past_do_nothing(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            wrong = hand.new_ref()
            order = hand.launch_order(node, wrong, SLEEPS.argv)
            for incarnation in (order.incarnation - 1, order.incarnation + 1):
                hand.say(node, _for_life(order, incarnation))
            right = await hand.launch(node, SLEEPS)
            hand.say(node, order, stamp=(hand.epoch, 1))
            hand.say(node, order, stamp=(hand.epoch - 1, 1_000_000))
            await hand.settle(node)
            assert hand.alive(node, right) and not hand.knows(node, wrong)
            assert rig.starts(wrong) == 0
            await hand.stop(node, right)

        play(rig, scene)

    def test_a_gpu_in_use_is_not_given_away(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            holder = await hand.launch(node, SLEEPS, gpus=(1, 2))
            beside = await hand.launch(node, SLEEPS, gpus=(0, 3))
            waiting = hand.new_ref()
            order = hand.launch_order(node, waiting, SLEEPS.argv, gpus=(2,))
            hand.say(node, order)
            await hand.settle(node)
            assert not hand.knows(node, waiting)
            await hand.stop(node, holder)
            await hand.insist(node, order, lambda: hand.alive(node, waiting))
            assert hand.alive(node, beside)
            for ref in (waiting, beside):
                await hand.stop(node, ref)

        play(rig, scene)

    # -- stop ------------------------------------------------------------------------------

    def test_a_stop_lets_a_member_end_in_its_own_way(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = await hand.launch(node, ENDS_WELL)
            ended = await hand.stop(node, ref)
            assert (ended.code, ended.stopped) == (7, True)
            assert not rig.running(ref)

        play(rig, scene)

    def test_who_does_not_care_is_killed_after_the_grace_time(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = await hand.launch(node, STUBBORN)
            ended = await hand.stop(node, ref, grace_ms=200)
            assert (ended.code, ended.stopped) == (KILLED, True)
            assert not rig.running(ref)

        play(rig, scene)

    def test_a_node_keeps_the_grace_time_without_a_controller(self, rig: Rig) -> None:
        node = rig.nodes[0]
        refs: list[MemberRef] = []

        async def before(hand: Hand) -> None:
            refs.append(await hand.launch(node, STUBBORN))
            order = Stop(
                node=node,
                incarnation=hand.report(node).incarnation,
                ref=refs[0],
                grace_ms=1_000,
            )
            await hand.insist(node, order, lambda: refs[0] in hand.report(node).stopping)

        async def after(hand: Hand) -> None:
            ended = await hand.exit(node, refs[0])
            assert (ended.code, ended.stopped) == (KILLED, True)

        play_two(rig, before, after)

    def test_one_that_never_started_counts_as_stopped_and_never_starts(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            ended = await hand.stop(node, ref)
            assert (ended.code, ended.stopped) == (TERMINATED, True)
            hand.say(node, hand.launch_order(node, ref, SLEEPS.argv))
            await hand.settle(node)
            assert not hand.alive(node, ref) and rig.starts(ref) == 0

        play(rig, scene)

    # -- exits -----------------------------------------------------------------------------

    def test_exits_are_told_until_they_are_acknowledged(self, rig: Rig) -> None:
        node = rig.nodes[0]
        codes = {SUCCEEDS: 0, FAILS: 3, CRASHES: 128 + signal.SIGSEGV}
        refs: dict[Program, MemberRef] = {}

        async def before(hand: Hand) -> None:
            for program, code in codes.items():
                refs[program] = await hand.launch(node, program)
                ended = await hand.exit(node, refs[program])
                assert (ended.code, ended.stopped) == (code, False)
            await hand.settle(node)
            assert all(hand.has_ended(node, ref) for ref in refs.values())

        async def after(hand: Hand) -> None:
            for program, code in codes.items():
                assert (await hand.exit(node, refs[program])).code == code
            await hand.acknowledge(node, refs[FAILS])
            await hand.settle(node)
            assert not hand.knows(node, refs[FAILS])
            assert hand.has_ended(node, refs[SUCCEEDS]) and hand.has_ended(node, refs[CRASHES])

        play_two(rig, before, after)

    # -- the controller dies ---------------------------------------------------------------

    def test_members_outlive_the_controller_and_are_adopted(self, rig: Rig) -> None:
        lives: dict[str, int] = {}
        refs: dict[str, MemberRef] = {}

        async def before(hand: Hand) -> None:
            for node in rig.nodes:
                refs[node] = await hand.launch(node, SLEEPS)
                lives[node] = hand.report(node).incarnation

        async def after(hand: Hand) -> None:
            for node, ref in refs.items():
                assert hand.report(node).incarnation == lives[node]
                assert hand.alive(node, ref)
                hand.say(node, hand.launch_order(node, ref, SLEEPS.argv))
                await hand.settle(node)
                assert rig.starts(ref) == 1 and rig.running(ref)
                assert (await hand.stop(node, ref)).code == TERMINATED

        play_two(rig, before, after)

    def test_an_exit_that_nobody_saw_is_told_to_the_next_controller(self, rig: Rig) -> None:
        node = rig.nodes[0]
        refs: list[MemberRef] = []

        async def before(hand: Hand) -> None:
            refs.append(await hand.launch(node, WAITS))

        async def between() -> None:
            rig.release(refs[0])
            for _ in range(4_500):
                if not rig.running(refs[0]):
                    return
                await rig.pause()
            raise AssertionError("it waits for a controller, and should not")

        async def after(hand: Hand) -> None:
            ended = await hand.exit(node, refs[0])
            assert (ended.code, ended.stopped) == (5, False)

        play_two(rig, before, after, between)

    # -- nodes die -------------------------------------------------------------------------

    def test_a_dead_node_comes_back_empty_and_as_another(self, rig: Rig) -> None:
        dying, other = rig.nodes[:2]

        async def scene(hand: Hand) -> None:
            lost = await hand.launch(dying, SLEEPS, gpus=(0,))
            kept = await hand.launch(other, SLEEPS)
            old_order = hand.launch_order(dying, hand.new_ref(), SLEEPS.argv)
            life = hand.report(dying).incarnation
            rig.kill(dying)
            await hand.until(lambda: not rig.running(lost))
            if rig.certain:
                await hand.until(lambda: bool(hand.ears.deaths))
                assert hand.engine is not None
                await hand.engine.resend()
                assert {(gone.node, gone.incarnation) for gone in hand.ears.deaths} == {
                    (dying, life)
                }
                assert hand.ears.deaths[0].why
            rig.revive(dying)
            await hand.until(lambda: hand.report(dying).incarnation > life)
            assert not hand.knows(dying, lost)
            hand.say(dying, old_order)
            again = await hand.launch(dying, SLEEPS, gpus=(0,))
            assert hand.alive(dying, again) and rig.starts(old_order.ref) == 0
            assert hand.alive(other, kept) and rig.starts(kept) == 1
            assert all(gone.node == dying for gone in hand.ears.deaths)
            await hand.stop(dying, again)
            await hand.stop(other, kept)

        play(rig, scene)

    def test_a_node_that_died_unseen_is_another_for_the_next_controller(self, rig: Rig) -> None:
        node = rig.nodes[1]
        lives: list[int] = []
        refs: list[MemberRef] = []

        async def before(hand: Hand) -> None:
            refs.append(await hand.launch(node, SLEEPS))
            lives.append(hand.report(node).incarnation)

        async def between() -> None:
            rig.kill(node)
            rig.revive(node)

        async def after(hand: Hand) -> None:
            await hand.until(lambda: hand.report(node).incarnation > lives[0])
            assert not hand.knows(node, refs[0]) and not rig.running(refs[0])

        play_two(rig, before, after, between)

    # -- checks ----------------------------------------------------------------------------

    def test_a_check_is_done_once_and_its_result_told_again_and_again(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            order = Check(node=node, incarnation=hand.report(node).incarnation, id="c1")
            await hand.insist(
                node, order, lambda: any(one.id == "c1" for one in hand.report(node).checks)
            )
            hand.say(node, order)
            report = await hand.settle(node)
            assert [one.id for one in report.checks] == ["c1"]

        play(rig, scene)


class ProcessContract(Contract):
    """Of engines whose members are processes of an operating system."""

    def test_all_output_is_there_before_the_exit_is_told(self, rig: Rig) -> None:
        node = rig.nodes[0]
        script = "seq 1 100000; echo to stderr >&2; exit 4"

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            order = hand.launch_order(node, ref, ("sh", "-c", script))
            await hand.insist(node, order, lambda: hand.knows(node, ref))
            assert (await hand.exit(node, ref)).code == 4
            wanted = "".join(f"{number}\n" for number in range(1, 100_001)) + "to stderr\n"
            assert hand.output(ref) == wanted.encode()

        play(rig, scene)

    def test_output_of_before_and_after_a_controllers_death_is_one_text(self, rig: Rig) -> None:
        node = rig.nodes[0]
        script = 'echo first; until [ -e "$RIG/$SHOAL_REF.go" ]; do sleep 0.05; done; echo second'
        refs: list[MemberRef] = []

        async def before(hand: Hand) -> None:
            refs.append(hand.new_ref())
            order = hand.launch_order(node, refs[0], ("sh", "-c", script))
            await hand.insist(node, order, lambda: hand.output(refs[0]) == b"first\n")

        async def between() -> None:
            rig.release(refs[0])

        async def after(hand: Hand) -> None:
            assert (await hand.exit(node, refs[0])).code == 0
            assert hand.output(refs[0]) == b"first\nsecond\n"

        play_two(rig, before, after, between)

    def test_output_that_a_dying_node_could_not_send_is_sent_by_its_next_life(
        self, rig: Rig
    ) -> None:
        node = rig.nodes[1]
        script = 'echo said; until [ -e "$RIG/$SHOAL_REF.go" ]; do sleep 0.05; done'
        script += '; echo "with nobody there"; touch "$RIG/$SHOAL_REF.done"; exec sleep 600'
        refs: list[MemberRef] = []

        async def before(hand: Hand) -> None:
            refs.append(hand.new_ref())
            order = hand.launch_order(node, refs[0], ("sh", "-c", script))
            await hand.insist(node, order, lambda: hand.output(refs[0]) == b"said\n")

        async def between() -> None:
            rig.release(refs[0])
            for _ in range(4_500):
                if (rig.scratch / f"{refs[0]}.done").exists():
                    break
                await rig.pause()
            rig.kill(node)
            rig.revive(node)

        async def after(hand: Hand) -> None:
            await hand.until(lambda: hand.output(refs[0]) == b"said\nwith nobody there\n")

        play_two(rig, before, after, between)

    def test_a_member_finds_its_environment_its_gpus_and_its_directory(self, rig: Rig) -> None:
        node = rig.nodes[0]
        workdir = rig.scratch / "a place with a space"
        workdir.mkdir(exist_ok=True)
        # As the core says it: engines pass it on, and put nothing of theirs in its place.
        env = {"CUDA_VISIBLE_DEVICES": "1,3", "SHOAL_GPUS": "1,3", "WORD": "two words = $1"}
        script = 'printf "%s|" "$CUDA_VISIBLE_DEVICES" "$SHOAL_GPUS" "$WORD" "$SHOAL_REF" "$1"; pwd'

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            argv = ("sh", "-c", script, "sh", "an argument")
            order = hand.launch_order(node, ref, argv, env=env, workdir=str(workdir), gpus=(1, 3))
            await hand.insist(node, order, lambda: hand.knows(node, ref))
            assert (await hand.exit(node, ref)).code == 0
            wanted = f"1,3|1,3|two words = $1|{ref}|an argument|{workdir}\n"
            assert hand.output(ref).decode() == wanted

        play(rig, scene)

    def test_code_travels_to_the_node_though_the_controller_dies_meanwhile(self, rig: Rig) -> None:
        node, refs = rig.nodes[1], [MemberRef("j", 0, 0)]
        folder = rig.scratch / "project" / "sub"
        folder.mkdir(parents=True)
        (folder / "code").write_text("from afar\n")
        (folder / "ballast").write_bytes(bytes(8 << 20))
        package = pack(folder)

        async def before(hand: Hand) -> None:
            with package.file as file:
                hand.keep(package.sha256, file.read())
            refs[0] = hand.new_ref()
            order = hand.launch_order(node, refs[0], ("cat", "code"))
            order = msgspec.structs.replace(order, package=package.sha256, workdir=package.folder)
            await hand.insist(node, order, lambda: hand.knows(node, refs[0]))

        async def after(hand: Hand) -> None:
            assert (await hand.exit(node, refs[0])).code == 0
            assert hand.output(refs[0]) == b"from afar\n"

        play_two(rig, before, after)

    def test_secrets_reach_the_node_though_the_controller_dies_before_it_answers(
        self, rig: Rig
    ) -> None:
        node, refs = rig.nodes[1], [MemberRef("j", 0, 0)]

        async def before(hand: Hand) -> None:
            refs[0] = hand.new_ref()
            order = hand.launch_order(node, refs[0], ("sh", "-c", "wc -c < $SHOAL_SECRETS/token"))
            order = msgspec.structs.replace(order, secrets=("token",))
            await hand.insist(node, order, lambda: bool(hand.ears.wanted))

        async def after(hand: Hand) -> None:
            value = SecretValue("token", b"canary" * 1000)
            hand.ears.secrets[refs[0]] = SecretsOf(refs[0], (value,))
            assert (await hand.exit(node, refs[0])).code == 0
            assert hand.output(refs[0]).split() == [b"6000"]
            life = hand.ears.newest[node].incarnation
            assert set(hand.ears.wanted) == {(node, life, refs[0])}

        play_two(rig, before, after)

    def test_without_gpus_a_member_sees_none(self, rig: Rig) -> None:
        node = rig.nodes[0]

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            argv = ("sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"')
            order = hand.launch_order(node, ref, argv, env={"CUDA_VISIBLE_DEVICES": ""})
            await hand.insist(node, order, lambda: hand.knows(node, ref))
            assert (await hand.exit(node, ref)).code == 0
            assert hand.output(ref) == b"[]\n"

        play(rig, scene)

    def test_what_cannot_be_started_says_why_in_one_line(self, rig: Rig) -> None:
        node = rig.nodes[0]
        script = rig.scratch / "not-a-program"
        script.write_text("#!/bin/sh\n")

        async def scene(hand: Hand) -> None:
            wrong = [
                (("no-such-program",), "", "no-such-program"),
                (("/no/such/program",), "", "/no/such/program"),
                ((str(script),), "", "chmod +x"),
                (("true",), "/no/such/place", "/no/such/place"),
            ]
            for argv, workdir, named in wrong:
                ref = hand.new_ref()
                order = hand.launch_order(node, ref, argv, workdir=workdir)
                await hand.insist(node, order, lambda ref=ref: hand.knows(node, ref))  # type: ignore[misc]
                ended = await hand.exit(node, ref)
                assert ended.code == CANNOT_START
                assert named in ended.why and "\n" not in ended.why

        play(rig, scene)

    def test_a_stop_reaches_what_a_member_has_started(self, rig: Rig) -> None:
        node = rig.nodes[0]
        script = "setsid sh -c 'echo $$ >>\"$RIG/$SHOAL_REF\"; exec sleep 600' & wait"

        async def scene(hand: Hand) -> None:
            ref = hand.new_ref()
            order = hand.launch_order(node, ref, ("sh", "-c", script))
            await hand.insist(node, order, lambda: rig.starts(ref) == 1)
            await hand.stop(node, ref)
            await hand.until(lambda: not rig.running(ref))

        play(rig, scene)


def _for_life(order: Launch, incarnation: int) -> Launch:
    return msgspec.structs.replace(order, incarnation=incarnation)
