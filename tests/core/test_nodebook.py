"""The node's side of the protocol: orders that are old, repeated, or for another life."""

from __future__ import annotations

from shoal.core.nodebook import STOPPED_BEFORE_START_CODE, NodeBook
from shoal.model.commands import Acknowledge, Command, Envelope, Launch, Stop
from shoal.model.job import MemberRef
from tests.core.build import node_spec

REF = MemberRef("j1", 1, 0)
OTHER = MemberRef("j2", 1, 0)


def book() -> NodeBook:
    return NodeBook(node_spec("a", gpus=4), incarnation=3)


def launch(ref: MemberRef = REF, *, gpus: tuple[int, ...] = (), incarnation: int = 3) -> Launch:
    return Launch(
        node="a",
        incarnation=incarnation,
        ref=ref,
        argv=("work",),
        env={},
        workdir="",
        stop_grace_ms=0,
        gpus=gpus,
    )


def stop(ref: MemberRef = REF) -> Stop:
    return Stop(node="a", incarnation=3, ref=ref, grace_ms=1_000)


def acknowledge(ref: MemberRef = REF) -> Acknowledge:
    return Acknowledge(node="a", incarnation=3, ref=ref)


def envelope(number: int, *commands: Command, epoch: int = 1) -> Envelope:
    return Envelope(epoch, number, commands)


def test_a_member_is_started_once_however_often_it_is_ordered() -> None:
    kept = book()
    assert kept.take(envelope(1, launch())) == [launch()]
    assert kept.take(envelope(2, launch(), launch())) == []
    kept.exited(REF, 0)
    assert kept.take(envelope(3, launch())) == []


def test_a_late_order_does_not_start_again_what_was_ended_and_forgotten() -> None:
    kept = book()
    late = envelope(1, launch())
    kept.take(envelope(2, launch()))
    kept.exited(REF, 0)
    kept.take(envelope(3, acknowledge()))
    assert kept.exits == {}
    assert kept.take(late) == []


def test_an_earlier_controller_is_not_obeyed_whatever_its_number() -> None:
    kept = book()
    kept.take(envelope(1, epoch=2))
    assert kept.take(envelope(99, launch(), epoch=1)) == []
    assert kept.take(envelope(2, launch(), epoch=2)) == [launch()]


def test_orders_for_another_life_of_the_node_have_no_effect() -> None:
    kept = book()
    assert kept.take(envelope(1, launch(incarnation=2), launch(incarnation=4))) == []
    assert kept.report().alive == ()


def test_what_is_stopped_before_it_started_has_ended_and_will_not_start() -> None:
    kept = book()
    assert kept.take(envelope(1, stop())) == []
    (exit_,) = kept.report().exits
    assert (exit_.ref, exit_.code, exit_.stopped) == (REF, STOPPED_BEFORE_START_CODE, True)
    assert kept.take(envelope(2, launch())) == []


def test_a_member_is_told_to_stop_once_and_the_report_says_so() -> None:
    """Else report and order would answer each other until the grace time is over."""
    kept = book()
    kept.take(envelope(1, launch()))
    assert kept.take(envelope(2, stop())) == [stop()]
    assert kept.take(envelope(3, stop())) == []
    assert kept.report().stopping == (REF,)
    kept.exited(REF, 143)
    assert kept.report().stopping == ()
    assert kept.report().exits[0].stopped


def test_an_exit_of_its_own_is_not_taken_for_one_by_order() -> None:
    kept = book()
    kept.take(envelope(1, launch()))
    kept.exited(REF, 1, "out of memory")
    (exit_,) = kept.report().exits
    assert (exit_.code, exit_.why, exit_.stopped) == (1, "out of memory", False)


def test_nothing_is_started_on_a_gpu_that_a_living_member_uses() -> None:
    """Found by simulation: a node given up and heard again by an old report seemed to be empty."""
    kept = book()
    kept.take(envelope(1, launch(gpus=(0, 1))))
    wanted = launch(OTHER, gpus=(1, 2))
    assert kept.take(envelope(2, wanted)) == []
    assert kept.report().alive == (REF,)
    kept.exited(REF, 0)
    assert kept.take(envelope(3, wanted)) == [wanted]


def test_an_exit_is_reported_until_it_is_acknowledged() -> None:
    kept = book()
    kept.take(envelope(1, launch()))
    kept.exited(REF, 7)
    assert [exit_.ref for exit_ in kept.report().exits] == [REF]
    assert [exit_.ref for exit_ in kept.report().exits] == [REF]
    kept.take(envelope(2, acknowledge()))
    assert kept.report().exits == ()


def test_every_report_has_a_higher_number() -> None:
    kept = book()
    assert [kept.report().sequence for _ in range(3)] == [1, 2, 3]


def test_a_member_that_is_getting_ready_is_here_but_not_alive() -> None:
    kept = book()
    assert kept.take(envelope(1, launch(REF, gpus=(0,)))) == [launch(REF, gpus=(0,))]
    kept.gets(REF, "fetches its code")
    report = kept.report()
    assert (report.alive, [one.ref for one in report.getting]) == ((), [REF])
    assert kept.take(envelope(2, launch(REF, gpus=(0,)))) == [], "it was ordered already"
    assert kept.take(envelope(3, launch(OTHER, gpus=(0,)))) == [], "it holds its GPU"
    kept.begins(REF)
    assert (kept.report().alive, kept.report().getting) == ((REF,), ())


def test_a_member_that_is_getting_ready_can_be_stopped() -> None:
    kept = book()
    kept.take(envelope(1, launch(REF)))
    kept.gets(REF, "fetches its code")
    assert kept.take(envelope(2, stop(REF))) == [stop(REF)]
    assert [one.ref for one in kept.report().getting] == [REF]
    kept.exited(REF, 143, "stopped before it started")
    assert (kept.report().getting, kept.report().exits[0].stopped) == ((), True)
    kept.gets(REF, "late news of it")
    assert kept.report().getting == ()
