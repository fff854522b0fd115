"""What every engine with real processes promises about members that sleep."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

from shoal.model.commands import Launch, Sleep, Wake
from shoal.model.job import MemberRef
from tests.engines.contract import play, play_two
from tests.engines.hand import ENDS_WELL, SLEEPS, STUBBORN, Hand, Rig

LINES = 120
# Each line is the hash of the one before. A child in a session of its own writes every other one.
CHAIN = """
import hashlib, subprocess, sys, time
last, child = b"begin", None
if len(sys.argv) > 1:
    words = [sys.executable, "-c", sys.argv[1]]
    pipe = subprocess.PIPE
    child = subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True)
for number in range(LINES):
    if child is None:
        last = sys.stdin.buffer.readline().strip()
        if not last:
            break
    last = hashlib.sha256(last).hexdigest().encode()
    print(last.decode(), flush=True)
    if child is not None:
        child.stdin.write(last + b"\\n")
        child.stdin.flush()
        last = child.stdout.readline().strip()
        print(last.decode(), flush=True)
        time.sleep(0.02)
""".replace("LINES", str(LINES))


def undisturbed() -> bytes:
    last, text = b"begin", b""
    for _ in range(2 * LINES):
        last = hashlib.sha256(last).hexdigest().encode()
        text += last + b"\n"
    return text


def sleeps(hand: Hand, node: str, ref: MemberRef) -> bool:
    return any(one.ref == ref for one in hand.report(node).asleep)


def is_awake(hand: Hand, node: str, ref: MemberRef) -> bool:
    report = hand.report(node)
    naps = {*report.dozing, *report.waking, *(one.ref for one in report.asleep)}
    return hand.alive(node, ref) and ref not in naps


async def put_to_sleep(hand: Hand, node: str, ref: MemberRef) -> None:
    order = Sleep(node=node, incarnation=hand.report(node).incarnation, ref=ref)
    await hand.insist(node, order, lambda: sleeps(hand, node, ref))


async def wake(hand: Hand, node: str, ref: MemberRef, gpus: tuple[int, ...]) -> None:
    await hand.insist(node, wake_order(hand, node, ref, gpus), lambda: is_awake(hand, node, ref))


def wake_order(hand: Hand, node: str, ref: MemberRef, gpus: tuple[int, ...]) -> Wake:
    return Wake(node=node, incarnation=hand.report(node).incarnation, ref=ref, gpus=gpus)


class SleepContract:
    """Engines' tests derive from it and give a fixture `rig`."""

    def test_a_member_that_slept_writes_what_it_would_have_written(self, rig: Rig) -> None:
        """It sleeps three times, lends its GPU, is woken on another, and loses its controller while
        it falls asleep and while it wakes."""
        node = rig.nodes[1]
        refs: list[MemberRef] = []

        def grown(hand: Hand, than: int) -> Callable[[], bool]:
            return lambda: len(hand.output(refs[0])) > than

        async def before(hand: Hand) -> None:
            refs.append(hand.new_ref())
            argv = (sys.executable, "-c", CHAIN, CHAIN)
            order = hand.launch_order(node, refs[0], argv, gpus=(1,))
            await hand.insist(node, order, grown(hand, 0))
            await put_to_sleep(hand, node, refs[0])
            other = await hand.launch(node, SLEEPS, gpus=(1,))
            hand.say(node, wake_order(hand, node, refs[0], (1,)))
            await hand.settle(node)
            assert sleeps(hand, node, refs[0]), "its GPU is in use"
            await wake(hand, node, refs[0], (2,))
            beside = hand.new_ref()
            wanted: Launch = hand.launch_order(node, beside, SLEEPS.argv, gpus=(2,))
            hand.say(node, wanted)
            await hand.settle(node)
            assert not hand.knows(node, beside), "a GPU is held by one that is awake"
            await hand.stop(node, other)
            await hand.until(grown(hand, len(hand.output(refs[0]))))
            hand.say(node, Sleep(node=node, incarnation=hand.report(node).incarnation, ref=refs[0]))

        async def after(hand: Hand) -> None:
            await put_to_sleep(hand, node, refs[0])
            hand.say(node, wake_order(hand, node, refs[0], (2,)))

        async def at_last(hand: Hand) -> None:
            def goes_on() -> bool:
                """It may have ended already, since `after` has told it to wake."""
                ended = any(one.ref == refs[0] for one in hand.report(node).exits)
                return ended or is_awake(hand, node, refs[0])

            await hand.insist(node, wake_order(hand, node, refs[0], (2,)), goes_on)
            assert (await hand.exit(node, refs[0])).code == 0
            assert hand.output(refs[0]) == undisturbed()

        play_two(rig, before, after)
        play(rig, at_last)

    def test_sleepers_are_stopped_like_others_and_go_with_their_node(self, rig: Rig) -> None:
        node = rig.nodes[1]

        async def scene(hand: Hand) -> None:
            obeys, stubborn = await hand.launch(node, ENDS_WELL), await hand.launch(node, STUBBORN)
            lost = await hand.launch(node, SLEEPS)
            for ref in (obeys, stubborn, lost):
                await put_to_sleep(hand, node, ref)
            ended = await hand.stop(node, obeys)
            assert (ended.code, ended.stopped) == (7, True)
            ended = await hand.stop(node, stubborn, grace_ms=200)
            assert ended.stopped and not rig.running(stubborn)
            life = hand.report(node).incarnation
            rig.kill(node)
            await hand.until(lambda: not rig.running(lost))
            rig.revive(node)
            await hand.until(lambda: hand.report(node).incarnation > life)
            assert not hand.knows(node, lost)

        play(rig, scene)
