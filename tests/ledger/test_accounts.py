"""Where each second goes, case by case: the table of docs/ledger.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from shoal.core.state.events.budgets import BudgetFreed, BudgetHeld
from shoal.core.state.events.cluster import ControllerStarted, PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import (
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.queue import (
    JobClaimed,
    JobReleased,
    JobReserved,
    JobSubmitted,
    JobUnclaimed,
)
from shoal.core.state.events.runs import (
    JobBegan,
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.services import ReplicaReady
from shoal.ledger import members
from shoal.ledger.accounts import HOUR_MS, Account
from shoal.ledger.book import UNSEEN_MS_MAX, Book
from shoal.model.health import Record, Standing
from shoal.model.job import JobSpec, MemberRef, Outcome, StopCause
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy, Tenant
from shoal.model.progress import Beat, Progress
from shoal.model.report import Idle, NodeReport, Report
from shoal.model.resources import Slice
from shoal.model.service import ReplicaLoad, ServiceLoad
from tests.ledger.totals import Totals

S = 1000


class Explanation:
    """A node with two GPUs, told second by second."""

    def __init__(self, gpus: int = 2, begin_ms: int = 0) -> None:
        self.book, self.totals, self.now_ms = Book(), Totals(), begin_ms
        spec = NodeSpec(id="n1", gpus=gpus, cpu_milli=8000, memory_mb=1000)
        self.tell(
            NodeJoined(at_ms=begin_ms, node="n1", spec=spec, incarnation=1),
            NodeReady(at_ms=begin_ms, node="n1"),
        )

    def tell(self, *events: Event) -> None:
        for event in events:
            self.book.take(event)

    def after(self, seconds: float) -> int:
        self.now_ms += int(seconds * S)
        return self.now_ms

    def submit(self, job: str = "j1", **fields: Any) -> None:
        spec = JobSpec(command=("true",), **{"gpus": 2, **fields})
        self.tell(JobSubmitted(at_ms=self.now_ms, job=job, spec=spec))

    def place(self, job: str = "j1", attempt: int = 1, gpus: tuple[int, ...] = (0, 1)) -> None:
        slices = (Slice("n1", gpus),)
        self.tell(
            JobPlaced(at_ms=self.now_ms, job=job, attempt=attempt, slices=slices, master="", why="")
        )

    def runs(self, job: str = "j1", attempt: int = 1) -> None:
        self.tell(JobRunning(at_ms=self.now_ms, job=job, attempt=attempt))

    def beat(self, attempt: int = 1, **fields: Any) -> None:
        self.book.advance(self.now_ms)
        beat = Beat(ref="", **fields)
        self.book.hear([Progress(MemberRef("j1", attempt, 0), beat, 0)])

    def exit(self, code: int = 0, attempt: int = 1) -> None:
        self.tell(
            MemberExited(
                at_ms=self.now_ms, job="j1", attempt=attempt, member=0, node="n1", code=code
            )
        )

    def stop(self, cause: StopCause) -> None:
        self.tell(JobStopping(at_ms=self.now_ms, job="j1", attempt=1, cause=cause, why=""))

    def requeue(self, cause: StopCause, not_before_ms: int = 0) -> None:
        self.tell(
            JobRequeued(
                at_ms=self.now_ms,
                job="j1",
                attempt=1,
                cause=cause,
                not_before_ms=not_before_ms,
                why="",
            )
        )

    def finish(self, outcome: Outcome = Outcome.SUCCEEDED) -> None:
        self.tell(
            JobFinished(at_ms=self.now_ms, job="j1", attempt=1, outcome=outcome, code=0, why="")
        )

    def seconds(self) -> dict[str, float]:
        """GPU-seconds by account; they are all that there were."""
        self.book.advance(self.now_ms)
        self.book.settle()
        self.totals.put(self.book.drain())
        amounts = dict(self.totals.amounts)
        for place, amount in self.book.open().items():
            amounts[place] = amounts.get(place, 0) + amount
        assert sum(amounts.values()) == sum(self.totals.capacity.values())
        told: dict[str, float] = {}
        for place, amount in amounts.items():
            told[place.account.value] = told.get(place.account.value, 0) + amount / 1e6
        return {account: amount for account, amount in told.items() if amount}


def started(**fields: Any) -> Explanation:
    """A job that was placed for 4 s before it ran."""
    story = Explanation()
    story.submit(**fields)
    story.place()
    story.after(4)
    story.runs()
    return story


def test_a_silent_job_starts_up_and_then_does_what_it_was_asked_to() -> None:
    story = started()
    story.after(10)
    assert story.seconds() == {"startup": 8, "useful": 20}
    story.exit()
    story.finish()
    story.after(5)
    assert story.seconds() == {"startup": 8, "useful": 20, "free": 10}


def test_beats_tell_steps_from_waiting_saving_and_starting() -> None:
    story = started()
    story.after(20)  # imports and the first step
    story.beat(step=1, steps=1, compute_us=2_000_000)
    assert story.seconds() == {"startup": 8 + 36, "useful": 4}
    story.after(10)
    story.beat(
        step=5, steps=5, compute_us=6_000_000, wait_us=0, data_us=1_000_000, save_us=5_000_000
    )
    assert story.seconds() == {"startup": 44, "useful": 12, "idle": 2, "checkpoint": 10}


def test_only_waiting_beyond_that_of_the_least_waiting_member_is_for_stragglers() -> None:
    story = Explanation()
    story.submit(gpus=1, members=2)
    slices = (Slice("n1", (0,)), Slice("n1", (1,)))
    story.tell(JobPlaced(at_ms=0, job="j1", attempt=1, slices=slices, master="", why=""))
    story.runs()
    story.now_ms = 10_000
    story.book.advance(10_000)
    fast = Beat(ref="", step=10, steps=10, compute_us=2_000_000, wait_us=8_000_000)
    slow = Beat(ref="", step=10, steps=10, compute_us=9_000_000, wait_us=1_000_000)
    story.book.hear([Progress(MemberRef("j1", 1, 1), slow, 0)])
    story.book.hear([Progress(MemberRef("j1", 1, 0), fast, 0)])
    assert story.seconds() == {"useful": 10 + 3, "straggler": 7}


def test_the_first_member_to_speak_is_not_the_measure_of_waiting_for_long() -> None:
    story = Explanation()
    story.submit(gpus=1, members=2)
    slices = (Slice("n1", (0,)), Slice("n1", (1,)))
    story.tell(JobPlaced(at_ms=0, job="j1", attempt=1, slices=slices, master="", why=""))
    story.runs()
    for second in range(1, 5):  # less than the members are compared anew
        story.now_ms = second * S
        story.book.advance(story.now_ms)
        for member, wait in ((0, 800_000), (1, 0)):
            beat = Beat(
                ref="",
                step=second,
                steps=second,
                compute_us=second * (1_000_000 - wait),
                wait_us=second * wait,
            )
            story.book.hear([Progress(MemberRef("j1", 1, member), beat, 0)])
    told = story.seconds()
    assert told["straggler"] == pytest.approx(3 * 0.8)  # all but the first beat


def test_who_told_of_steps_and_falls_silent_is_idle() -> None:
    story = started()
    story.after(2)
    story.beat(step=1, steps=1, compute_us=2_000_000)
    story.after(600)
    story.exit()
    assert story.seconds() == {"startup": 8, "useful": 4 + 6, "idle": 2 * 597}


@pytest.mark.parametrize("cause", [StopCause.FAILURE, StopCause.NODE_LOSS, StopCause.HANG])
def test_a_failure_takes_what_was_not_saved(cause: StopCause) -> None:
    story = started()
    story.after(2)
    story.beat(step=2, steps=2, compute_us=2_000_000)
    story.tell(JobCheckpointed(at_ms=story.now_ms, job="j1", attempt=1, step=2))
    story.after(5)
    story.beat(step=7, steps=7, compute_us=7_000_000)
    story.exit(code=1)
    story.requeue(cause)
    assert story.seconds() == {"startup": 8, "useful": 4, "recompute": 10}


def test_a_silent_job_that_says_how_often_it_saves_loses_what_came_after_its_last_save() -> None:
    story = started(checkpoint_ms=3 * S)
    story.after(10)
    story.exit(code=1)
    story.requeue(StopCause.FAILURE)
    assert story.seconds() == {"startup": 8, "useful": 18, "recompute": 2}


def test_work_of_many_hours_is_taken_back_from_every_one_of_them() -> None:
    story = started()
    for _ in range(5):
        story.after(3600)
        story.seconds()  # what was booked and written long ago is taken back, too
    story.exit(code=1)
    story.requeue(StopCause.FAILURE)
    assert story.seconds() == {"startup": 8, "recompute": 5 * 7200}


def test_what_an_earlier_attempt_saved_in_the_same_hour_stays_useful() -> None:
    story = started()
    story.after(10)
    story.tell(JobCheckpointed(at_ms=story.now_ms, job="j1", attempt=1, step=2))
    story.exit(code=1)
    story.requeue(StopCause.FAILURE)
    assert story.seconds() == {"startup": 8, "useful": 20}
    story.place(attempt=2)
    story.runs(attempt=2)
    story.after(7)
    story.exit(code=1, attempt=2)
    story.requeue(StopCause.FAILURE)
    assert story.seconds() == {"startup": 8, "useful": 20, "recompute": 14}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"preemptible": True}, {"startup": 8, "preempted": 20 + 4}),
        (
            {"preemptible": True, "checkpoint_ms": 60_000},
            {"startup": 8, "useful": 20, "preempted": 4},
        ),
    ],
)
def test_preemption_takes_the_work_of_who_does_not_save(
    fields: dict[str, object], expected: dict[str, float]
) -> None:
    story = started(**fields)
    story.after(10)
    story.stop(StopCause.PREEMPT)
    story.after(2)
    story.exit(code=143)
    story.requeue(StopCause.PREEMPT)
    assert story.seconds() == expected


def test_free_is_unusable_while_something_waits_that_suits_it() -> None:
    story = Explanation()
    story.after(5)
    story.submit("j2", gpus=2, members=4)
    story.after(3)
    assert story.seconds() == {"free": 10, "fragmented": 6}
    story.submit("j3", gpu_models=("other",))
    story.tell(
        JobFinished(
            at_ms=story.now_ms, job="j2", attempt=0, outcome=Outcome.CANCELLED, code=0, why=""
        )
    )
    story.after(1)
    assert story.seconds() == {"free": 12, "fragmented": 6}


def test_a_job_in_its_backoff_does_not_wait_yet() -> None:
    story = started()
    story.exit(code=1)
    story.requeue(StopCause.FAILURE, not_before_ms=story.now_ms + 6000)
    story.after(10)
    assert story.seconds() == {"startup": 8, "free": 12, "fragmented": 8}


def test_room_that_is_claimed_or_set_aside_is_reserved() -> None:
    story = Explanation()
    story.submit()
    story.tell(JobClaimed(at_ms=0, job="j1", slices=(Slice("n1", (0,)),), why=""))
    story.after(5)
    assert story.seconds() == {"reserved": 5, "free": 5}
    story.tell(JobUnclaimed(at_ms=story.now_ms, job="j1", why=""))
    story.tell(JobReserved(at_ms=story.now_ms, job="j1", start_ms=None, nodes=("n1",), why=""))
    story.after(5)
    assert story.seconds() == {"reserved": 15, "free": 5}


def test_nodes_that_are_closed_silent_or_lost() -> None:
    story = started(gpus=1)
    story.tell(NodeIntended(at_ms=story.now_ms, node="n1", intent=NodeIntent.CORDONED))
    story.after(3)
    story.tell(
        NodeJudged(at_ms=story.now_ms, node="n1", record=Record(standing=Standing.QUARANTINED))
    )
    story.after(2)
    assert story.seconds() == {"startup": 4 * 2, "useful": 5 * 2}
    story = Explanation()
    story.tell(NodeIntended(at_ms=0, node="n1", intent=NodeIntent.CORDONED))
    story.after(3)
    story.tell(NodeJudged(at_ms=3000, node="n1", record=Record(standing=Standing.QUARANTINED)))
    story.after(2)
    story.tell(NodeSilent(at_ms=5000, node="n1"))
    story.after(4)
    assert story.seconds() == {"closed": 6, "quarantined": 4, "lost": 8}


def test_members_of_a_node_that_is_given_up_did_nothing_since_it_fell_silent() -> None:
    story = started()
    story.after(10)
    story.tell(NodeSilent(at_ms=story.now_ms, node="n1"))
    story.after(60)
    story.tell(NodeLost(at_ms=story.now_ms, node="n1", incarnation=1, dead=False))
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 20, "lost": 120}


def test_a_replica_starts_is_warm_and_is_busy_while_it_has_requests() -> None:
    story = started(service="chat")
    story.after(3)
    story.tell(ReplicaReady(at_ms=story.now_ms, service="chat", job="j1"))
    story.after(5)
    story.book.advance(story.now_ms)
    busy = ServiceLoad(service="chat", replicas={"j1": ReplicaLoad(up=True, in_flight=2)})
    story.book.hear([], [busy])
    story.after(2)
    story.book.advance(story.now_ms)
    idle = ServiceLoad(service="chat", replicas={"j1": ReplicaLoad(up=True, in_flight=0)})
    story.book.hear([], [idle])
    story.after(1)
    assert story.seconds() == {"startup": 14, "warm": 12, "serving": 4}


def test_shares_of_a_gpu_are_counted_in_thousandths() -> None:
    story = Explanation()
    story.submit(gpus=1, gpu_milli=333)
    slices = (Slice("n1", (0,), gpu_milli=333),)
    story.tell(JobPlaced(at_ms=0, job="j1", attempt=1, slices=slices, master="", why=""))
    story.runs()
    story.after(1)
    assert story.seconds() == {"useful": 0.333, "free": 1.667}


def test_a_silent_job_whose_node_says_that_it_uses_nothing_is_idle_since_then() -> None:
    story = started()
    story.after(100)
    story.book.advance(story.now_ms)
    members.hear_idle(story.book.postings, "n1", [Idle(MemberRef("j1", 1, 0), 70 * S)])
    story.after(10)
    assert story.seconds() == {"startup": 8, "useful": 60, "idle": 160}
    members.hear_idle(story.book.postings, "n1", [])
    story.after(5)
    assert story.seconds() == {"startup": 8, "useful": 70, "idle": 160}


@pytest.mark.parametrize("idle", [False, True])
def test_the_time_before_its_gpus_were_first_used_is_start_up(idle: bool) -> None:
    """36 s of imports were useful, and 70 s of them idle."""
    startup = 70 if idle else 36
    story = started()
    ref, spec = MemberRef("j1", 1, 0), NodeSpec(id="n1", gpus=2, cpu_milli=8000, memory_mb=1000)
    report = NodeReport(spec=spec, incarnation=1, sequence=1, alive=(ref,))
    story.after(startup)
    if idle:
        heard = msgspec.structs.replace(report, idle=(Idle(ref, startup * S),))
        story.book.stepped(Report(nodes=(heard,)), [], story.now_ms)
        assert story.seconds() == {"startup": 8, "idle": 2 * startup}
    story.after(2)  # until the controller knows
    began = JobBegan(
        at_ms=story.now_ms, job="j1", attempt=1, members=(0,), startup_ms=startup * S, by="gpu"
    )
    story.book.stepped(Report(nodes=(report,)), [began], story.now_ms)
    story.after(10)
    assert story.seconds() == {"startup": 8 + 2 * startup, "useful": 24}
    story.beat(step=1, steps=1, compute_us=2_000_000)


def test_a_tenant_that_is_held_does_not_wait_for_gpus() -> None:
    story = Explanation()
    story.submit(gpus=2, members=4, tenant="red")
    story.after(3)
    policy = Policy(tenants=(Tenant(name="all"), Tenant(name="red", parent="all")))
    story.tell(PolicyChanged(at_ms=story.now_ms, policy=policy))
    story.tell(BudgetHeld(at_ms=story.now_ms, tenant="all"))
    story.after(5)
    story.tell(BudgetFreed(at_ms=story.now_ms, tenant="all"))
    story.after(1)
    assert story.seconds() == {"fragmented": 8, "free": 10}


# -- clocks that jump -----------------------------------------------------------------------


def restart(story: Explanation, epoch: int = 2) -> None:
    story.tell(ControllerStarted(at_ms=story.now_ms, epoch=epoch))


def hear(story: Explanation, *alive: MemberRef) -> None:
    spec = NodeSpec(id="n1", gpus=2, cpu_milli=8000, memory_mb=1000)
    report = NodeReport(spec=spec, incarnation=1, sequence=1, alive=alive)
    story.book.stepped(Report(nodes=(report,)), [], story.now_ms)


def test_time_in_which_the_whole_cluster_was_off_is_not_charged_to_its_jobs() -> None:
    """23 h 41 min without power were useful, and then done again."""
    story = started()
    story.after(10)
    story.book.advance(story.now_ms)
    off_s = 23 * 3600 + 41 * 60
    story.after(off_s)
    restart(story)
    story.after(1)
    story.tell(NodeLost(at_ms=story.now_ms, node="n1", incarnation=1, dead=True))
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 20, "lost": 2 * (off_s + 1)}


def test_a_member_that_vanished_while_no_controller_ran_is_not_charged_for_that_time() -> None:
    story = started()
    story.after(10)
    story.book.advance(story.now_ms)
    story.after(7200)
    restart(story)
    hear(story)
    lost = MemberLost(at_ms=story.now_ms, job="j1", attempt=1, member=0, node="n1", why="")
    story.tell(lost)
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 20, "lost": 14_400}


def test_a_job_that_lived_on_without_a_controller_has_worked() -> None:
    story = started()
    story.after(10)
    story.book.advance(story.now_ms)
    story.after(7200)
    restart(story)
    hear(story, MemberRef("j1", 1, 0))
    assert story.seconds() == {"startup": 8, "useful": 14_420}
    story.after(3600)
    story.tell(NodeLost(at_ms=story.now_ms, node="n1", incarnation=1, dead=True))
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 21_620}


def test_a_node_that_no_new_controller_ever_hears_is_lost_since_the_last_one() -> None:
    story = started()
    story.after(10)
    story.book.advance(story.now_ms)
    story.after(7200)
    restart(story)
    story.after(10)
    story.tell(NodeSilent(at_ms=story.now_ms, node="n1"))
    story.after(7200)
    story.tell(NodeLost(at_ms=story.now_ms, node="n1", incarnation=1, dead=False))
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 20, "lost": 28_820}


def test_a_book_that_is_written_again_from_the_log_believes_that_a_job_lived_on() -> None:
    """Without reports, a loss long after a controller's start says nothing about its absence."""
    story = started()
    story.after(10)
    restart(story)
    story.after(7200)
    story.tell(NodeLost(at_ms=story.now_ms, node="n1", incarnation=1, dead=True))
    story.requeue(StopCause.NODE_LOSS)
    assert story.seconds() == {"startup": 8, "recompute": 14_420}


def gaps(story: Explanation) -> Iterable[tuple[int, bool]]:
    return [(gap.ms, gap.booked) for gap in story.book.cluster.gaps]


def test_a_clock_that_goes_back_counts_nothing_twice() -> None:
    story = Explanation(begin_ms=HOUR_MS)
    story.after(100)
    assert story.seconds() == {"free": 200}
    story.now_ms -= 60 * S
    assert story.seconds() == {"free": 200}
    story.after(70)
    assert story.seconds() == {"free": 220}
    assert gaps(story) == [(-60_000, False)]


def test_a_night_without_a_controller_is_booked_and_told() -> None:
    story = started()
    story.after(12 * 3600)
    assert story.seconds() == {"startup": 8, "useful": 24 * 3600}
    assert gaps(story) == [(12 * HOUR_MS, True)]


def test_a_clock_that_jumps_by_years_adds_nothing() -> None:
    story = started()
    story.after(10)
    story.seconds()
    story.now_ms += UNSEEN_MS_MAX + 1
    assert story.seconds() == {"startup": 8, "useful": 20}
    story.after(5)
    assert story.seconds() == {"startup": 8, "useful": 30}
    assert gaps(story) == [(UNSEEN_MS_MAX + 1, False)]


def test_every_account_has_a_title() -> None:
    from shoal.ledger.accounts import ABOUT

    assert set(ABOUT) == set(Account)


def test_an_array_that_waited_for_a_job_is_released_and_the_book_goes_on() -> None:
    """It is not a job of the book: its elements are, when they begin."""
    book = Book()
    book.take(JobReleased(at_ms=5, job="j13", by="j12", why="j12 succeeded"))
    assert book.cluster.jobs == {}
