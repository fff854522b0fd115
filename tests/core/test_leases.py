"""Leases: a job is alive until a moment, unless somebody renews that in time."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.answers.why import explain
from shoal.core.features.lease import DRIFT, LEASE_MS_MAX, MARGIN_MS
from shoal.core.nodebook import LOOK_MS, STOPPED_BEFORE_START_CODE
from shoal.core.state.ending import CANCELLED_CODE
from shoal.core.state.events.queue import JobLeased
from shoal.model.commands import Launch, Renew, Stop
from shoal.model.job import Job, MemberRef, Outcome, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.report import Accepted, Answer, Leased, NodeReport, Refused, RenewLease, Submit
from shoal.model.sweep import IndexRange, Sweep
from tests.core.build import Cluster, job_spec, kinds

LEASE_MS = 50_000  # less than the time after which a silent node is given up
SKEW_MS = 987_654_321  # what nodes' clocks are ahead: no moment is ever compared with another's


class Leasing(Cluster):
    """Nodes have clocks of their own, which run as fast as the cluster's."""

    def join(self, name: str, **fields: object) -> None:
        super().join(name, **fields)
        self.books[name].leases.clock = lambda: self.now_ms + SKEW_MS
        self.hear(name)

    def lease(self, for_ms: int = LEASE_MS, **fields: object) -> str:
        """Submit a job with a lease, and see it alive if there is room."""
        answer = self.ask(Submit(job_spec(**fields), until_ms=self.now_ms + for_ms))
        assert isinstance(answer, Accepted), answer
        self.deliver()
        self.hear(*self.books)
        return answer.id

    def renew(self, job_id: str, for_ms: int = LEASE_MS) -> Answer:
        return self.ask(RenewLease(job_id, self.now_ms + for_ms, "ann"))

    def lapse(self, name: str = "a") -> list[tuple[MemberRef, int]]:
        """Whom the node stops by itself now, and their grace times."""
        return [(stop.ref, stop.grace_ms) for stop in self.books[name].end_leases()]

    def why(self, job: Job) -> str:
        return explain(self.state, job, self.policy, self.now_ms)


@pytest.fixture
def cluster() -> Leasing:
    made = Leasing()
    made.join("a", gpus=2)
    return made


def margin_ms(for_ms: int) -> int:
    return MARGIN_MS + for_ms // DRIFT


# -- what may be asked for -------------------------------------------------------------------


def test_a_lease_that_is_over_or_too_long_is_refused(cluster: Leasing) -> None:
    for ahead_ms in (0, -5):
        answer = cluster.ask(Submit(job_spec(), until_ms=cluster.now_ms + ahead_ms))
        assert isinstance(answer, Refused)
        assert (answer.field, answer.message.partition(":")[0]) == ("until_ms", "the lease is over")
    answer = cluster.ask(Submit(job_spec(), until_ms=cluster.now_ms + LEASE_MS_MAX + 1))
    assert isinstance(answer, Refused)
    assert "is more than 7d ahead" in answer.message
    assert not cluster.state.jobs


def test_the_same_key_again_is_the_same_job_even_if_the_lease_is_over(cluster: Leasing) -> None:
    submit = Submit(job_spec(), "once", until_ms=cluster.now_ms + LEASE_MS)
    first = cluster.ask(submit)
    assert isinstance(first, Accepted)
    cluster.wait(2 * LEASE_MS)
    again = cluster.ask(submit)
    assert again == Accepted(first.id, "this submission was already accepted")


def test_an_array_has_no_lease(cluster: Leasing) -> None:
    spec = msgspec.structs.replace(job_spec(), sweep=Sweep(ranges=(IndexRange(0, 3, 1),)))
    answer = cluster.ask(Submit(spec, until_ms=cluster.now_ms + LEASE_MS))
    assert isinstance(answer, Refused)
    assert answer.message == "is for single jobs; submit each element of the array"


def test_no_lease_begins_while_a_node_runs_an_agent_that_ends_none(cluster: Leasing) -> None:
    cluster.join("old")
    report = cluster.books["old"].report()
    cluster.hear_reports(with_no_leases(report))
    answer = cluster.ask(Submit(job_spec(), until_ms=cluster.now_ms + LEASE_MS))
    assert isinstance(answer, Refused)
    assert answer.message.startswith("old runs an older Shoal that ends no leases")


def with_no_leases(report: NodeReport) -> NodeReport:
    return msgspec.structs.replace(report, leases=None)


def test_a_lease_only_becomes_longer(cluster: Leasing) -> None:
    job_id = cluster.lease()
    until_ms = cluster.job(job_id).until_ms
    late = cluster.ask(RenewLease(job_id, until_ms - 1))
    assert isinstance(late, Accepted)
    assert late.note.startswith("its lease lasts until")
    assert not cluster.last.events
    assert cluster.renew(job_id, 2 * LEASE_MS) == Accepted(job_id)
    assert cluster.job(job_id).until_ms == cluster.now_ms + 2 * LEASE_MS
    (event,) = cluster.last.events
    assert isinstance(event, JobLeased)
    assert event.sentence().endswith("by ann")
    too_long = cluster.renew(job_id, LEASE_MS_MAX + 1)
    assert isinstance(too_long, Refused)


def test_a_job_without_a_lease_gets_none_and_costs_nothing(cluster: Leasing) -> None:
    job_id = cluster.run()
    answer = cluster.renew(job_id)
    assert isinstance(answer, Refused)
    assert "has no lease" in answer.message
    assert cluster.state.leases == []
    assert not cluster.books["a"].leases
    launches = [one for one in cluster.log if isinstance(one, JobLeased)]
    assert launches == []
    assert "lease" not in cluster.why(cluster.job(job_id))


def test_a_job_that_is_gone_or_ending_is_not_renewed(cluster: Leasing) -> None:
    assert isinstance(gone := cluster.renew("j99"), Refused)
    assert gone.missing
    job_id = cluster.lease()
    cluster.cancel(job_id)
    over = cluster.renew(job_id, 2 * LEASE_MS)
    assert isinstance(over, Refused)
    assert over.message == f"the lease is over: {job_id} is ending"


# -- the end, as the controller sees it ------------------------------------------------------


def test_a_job_that_runs_is_stopped_when_its_lease_is_over(cluster: Leasing) -> None:
    job_id = cluster.lease(restart="on-failure", retries=3)
    job = cluster.job(job_id)
    assert cluster.last.wake_ms is not None
    assert cluster.last.wake_ms <= job.until_ms
    cluster.wait(LEASE_MS)
    cluster.step()
    assert (job.phase, job.stop_cause) == (Phase.STOPPING, StopCause.LEASE)
    assert job.why.startswith("its lease ended at 1970-01-01 00:00:51 UTC, and nobody")
    cluster.deliver()
    cluster.end(job_id, code=143)
    assert (job.outcome, job.code) == (Outcome.CANCELLED, CANCELLED_CODE)
    assert cluster.state.leases == []


def test_a_job_that_waits_ends_at_once(cluster: Leasing) -> None:
    cluster.run(gpus=2)
    job_id = cluster.lease(gpus=2)
    assert cluster.why(cluster.job(job_id)).endswith(
        "; its lease ends in 50s, unless it is renewed"
    )
    cluster.wait(LEASE_MS)
    cluster.step()
    assert cluster.finished[job_id].outcome is Outcome.CANCELLED
    assert "nobody has renewed it" in cluster.finished[job_id].why


def test_a_job_that_is_renewed_goes_on(cluster: Leasing) -> None:
    job_id = cluster.lease()
    for _ in range(5):
        cluster.wait(LEASE_MS - 20_000)
        assert cluster.renew(job_id) == Accepted(job_id)
        cluster.deliver()
        cluster.hear("a")
        assert not cluster.lapse()
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert len(cluster.state.leases) == 1


def test_a_job_that_is_stopped_to_run_again_ends_if_its_lease_does(cluster: Leasing) -> None:
    job_id = cluster.lease()
    cluster.intend("a", NodeIntent.DRAINING)
    job = cluster.job(job_id)
    assert job.stop_cause is StopCause.DRAIN
    cluster.wait(LEASE_MS)
    cluster.step()
    assert cluster.job(job_id).stop_cause is StopCause.LEASE
    cluster.deliver()
    cluster.end(job_id, code=143)
    assert job.outcome is Outcome.CANCELLED


def test_work_that_was_done_before_the_end_counts(cluster: Leasing) -> None:
    job_id = cluster.lease()
    cluster.books["a"].ends(MemberRef(job_id, 1, 0))
    cluster.wait(LEASE_MS)
    assert not cluster.lapse(), "its process has ended; only its output is on the way"
    cluster.step()
    cluster.deliver()
    cluster.end(job_id)
    assert cluster.finished[job_id].outcome is Outcome.SUCCEEDED


def test_a_controller_that_starts_again_knows_the_lease(cluster: Leasing) -> None:
    job_id = cluster.lease()
    cluster.take_over()
    cluster.wait(LEASE_MS)
    cluster.step()
    assert cluster.job(job_id).stop_cause is StopCause.LEASE


# -- the end, as a node sees it --------------------------------------------------------------


def test_a_node_ends_a_member_in_time_though_no_head_answers(cluster: Leasing) -> None:
    job_id = cluster.lease(stop_grace_ms=10_000)
    ref = MemberRef(job_id, 1, 0)
    cluster.wait(LEASE_MS - 10_000 - LOOK_MS - margin_ms(LEASE_MS) - 1)
    assert not cluster.lapse()
    cluster.wait(1)
    assert cluster.lapse() == [(ref, 10_000 + LOOK_MS)]
    cluster.wait(10_000 + LOOK_MS - 1)
    assert not cluster.lapse(), "it has been asked, and has a little time"
    cluster.wait(1)
    assert cluster.lapse() == [(ref, 0)]
    assert cluster.lapse() == [(ref, 0)], "as long as it lives"
    assert cluster.now_ms <= cluster.job(job_id).until_ms - MARGIN_MS


def test_what_a_node_has_ended_is_the_end_of_the_lease_even_if_it_is_heard_before(
    cluster: Leasing,
) -> None:
    job_id = cluster.lease()
    cluster.wait(LEASE_MS - 10_000 - margin_ms(LEASE_MS))
    assert cluster.lapse()
    cluster.end(job_id, code=143)
    job = cluster.finished[job_id]
    assert job.outcome is Outcome.CANCELLED
    assert "nobody has renewed it" in job.why
    assert cluster.now_ms < job.until_ms


def test_a_gang_ends_on_all_nodes_when_one_has_ended_its_members(cluster: Leasing) -> None:
    cluster.join("b", gpus=2)
    job_id = cluster.lease(gpus=2, members=2)
    cluster.wait(LEASE_MS - 10_000 - margin_ms(LEASE_MS))
    assert cluster.lapse("a")
    cluster.end(job_id, code=143)
    assert cluster.job(job_id).stop_cause is StopCause.LEASE
    (stop,) = cluster.deliver("b")
    assert isinstance(stop, Stop)


def test_a_node_that_did_not_hear_of_a_renewal_only_loses_its_member(cluster: Leasing) -> None:
    job_id = cluster.lease()
    cluster.wait(LEASE_MS // 2)
    cluster.renew(job_id)  # and the command to the node is lost
    cluster.wait(LEASE_MS // 2 - 10_000)
    assert cluster.lapse()
    cluster.end(job_id, code=143)
    assert cluster.job(job_id).losses == 1
    assert cluster.job(job_id).attempt == 2
    assert any("renewed too late" in one.sentence() for one in cluster.last.events)


def test_a_renewal_that_was_lost_is_sent_again_with_the_next_report(cluster: Leasing) -> None:
    job_id = cluster.lease()
    ref, until_ms = MemberRef(job_id, 1, 0), cluster.job(job_id).until_ms
    assert cluster.books["a"].report().leases == (Leased(ref, until_ms),)
    cluster.wait(1_000)
    cluster.renew(job_id)
    assert [type(one) for one in cluster.last.commands] == [Renew]
    cluster.hear("a")  # it has not got it
    assert [type(one) for one in cluster.last.commands] == [Renew]
    cluster.deliver()
    cluster.hear("a")
    assert not cluster.last.commands
    assert cluster.books["a"].report().leases == (Leased(ref, until_ms + 1_000),)


def test_a_command_that_comes_late_makes_no_lease_longer(cluster: Leasing) -> None:
    """However long it is on its way, the node counts from its own report."""
    job_id = cluster.lease(stop_grace_ms=0)
    cluster.renew(job_id, 2 * LEASE_MS)
    until_ms = cluster.job(job_id).until_ms
    cluster.wait(LEASE_MS - margin_ms(LEASE_MS) - 1)  # the envelope is on its way all this time
    cluster.deliver()
    cluster.now_ms = until_ms - MARGIN_MS
    assert cluster.lapse() == [(MemberRef(job_id, 1, 0), 0)]


def test_a_member_whose_lease_is_over_before_its_command_comes_never_starts(
    cluster: Leasing,
) -> None:
    answer = cluster.ask(Submit(job_spec(), until_ms=cluster.now_ms + LEASE_MS))
    assert isinstance(answer, Accepted)
    cluster.wait(LEASE_MS)
    assert not cluster.deliver()
    cluster.hear("a")
    assert cluster.job(answer.id).stop_cause is StopCause.LEASE
    assert not cluster.deliver()
    cluster.hear("a")
    assert cluster.finished[answer.id].outcome is Outcome.CANCELLED
    (exit_,) = cluster.books["a"].exits.values()
    assert exit_.code == STOPPED_BEFORE_START_CODE


def test_nothing_starts_before_it_is_known_how_long_it_may_live(cluster: Leasing) -> None:
    """A controller that has just started has no report to count from."""
    cluster.run(gpus=2)
    job_id = cluster.lease(gpus=2)
    cluster.take_over()
    cluster.cancel("j1")
    cluster.books["a"].exited(MemberRef("j1", 1, 0), 143)
    cluster.hear("a")
    (launch,) = [one for one in cluster.last.commands if isinstance(one, Launch)]
    assert launch.ref.job == job_id
    cluster.take_over()
    cluster.step()
    assert not cluster.last.commands
    cluster.hear("a")
    (launch,) = [one for one in cluster.last.commands if isinstance(one, Launch)]
    assert cluster.deliver() == [launch]


def test_a_command_about_a_report_that_the_node_has_forgotten_comes_again(
    cluster: Leasing,
) -> None:
    answer = cluster.ask(Submit(job_spec(), until_ms=cluster.now_ms + LEASE_MS))
    assert isinstance(answer, Accepted)
    for _ in range(200):
        cluster.books["a"].report()
    assert not cluster.deliver()
    cluster.hear("a")
    (launch,) = cluster.deliver()
    assert isinstance(launch, Launch)
    assert kinds(cluster.last.events) == []


def test_a_member_that_is_being_stopped_is_killed_when_its_lease_ends(cluster: Leasing) -> None:
    """Its grace time is an hour, and the lease a minute."""
    job_id = cluster.lease(for_ms=2 * 3_600_000, stop_grace_ms=3_600_000)
    cluster.wait(1_000)
    cluster.cancel(job_id)
    cluster.deliver()
    cluster.wait(3_600_000)
    assert not cluster.lapse()
    cluster.wait(3_591_000)
    assert cluster.lapse() == [(MemberRef(job_id, 1, 0), 0)]
