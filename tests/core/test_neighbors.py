"""Jobs that go to other clusters and come back: owned by exactly one side at any time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.control.store.marks import Numbers
from shoal.core.features.neighbors import wanted_offers
from shoal.core.features.notices import notices_of
from shoal.core.state.events.log import Recorded
from shoal.core.state.events.neighbors import JobHanded, JobRunsAway, JobSettled
from shoal.core.state.facts import Snapshot
from shoal.core.state.load import restore
from shoal.core.step import Step
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.commands import Launch
from shoal.model.identity import Identity, Role, User
from shoal.model.job import Job, JobSpec, Outcome, Phase
from shoal.model.kept import Copied
from shoal.model.neighbor import (
    OFFERED_MAX,
    Ending,
    HandedJob,
    Neighbor,
    NeighborReport,
    Offer,
    key_of,
    spec_there,
    wish_of,
)
from shoal.model.policy import Policy, Tenant
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    CancelWorkflow,
    DeclareGone,
    Refused,
    RemoveTenant,
    RemoveUser,
    Requeue,
    SetPolicy,
    SetService,
    SetUser,
    Submit,
    SubmitWorkflow,
)
from shoal.model.workflow import WorkflowJob
from tests.core.build import POLICY, Cluster, job_spec
from tests.core.serving import service_spec
from tests.core.training import Training

HOUR_MS = 3_600_000
# Their clock is wrong by days, on purpose.
THEIRS_MS = 300_000_000


class Home(Cluster):
    """With neighbors in the test's hands."""

    def word(self, name: str, **fields: Any) -> NeighborReport:
        return NeighborReport(name=name, clock_ms=THEIRS_MS + self.now_ms, **fields)

    def offered(self, job: str, *names: str, start_ms: int | None = 0, **offer: Any) -> Step:
        offers = (Offer(job=job, start_ms=start_ms, **offer),)
        return self.step(neighbors=[self.word(name, offers=offers) for name in names or ("b",)])

    def told(self, job: str, name: str = "b", **fields: Any) -> Step:
        attempt = fields.pop("attempt", 0) or self.job(job).attempt
        handed = HandedJob(job=job, attempt=attempt, **fields)
        return self.step(neighbors=[self.word(name, jobs=(handed,))])

    def ended(self, job: str, outcome: str = "succeeded", name: str = "b", **fields: Any) -> Step:
        attempt = fields.pop("attempt", 0)
        ended = Ending(outcome=Outcome(outcome), **fields)
        return self.told(job, name, attempt=attempt, ended=ended)

    def send(self, **fields: Any) -> str:  # type: ignore[override]
        """A job that is at b."""
        price = fields.pop("price", None)
        job = self.submit(**{"cluster": "b", **fields})
        self.offered(job, price=price)
        assert self.job(job).phase is Phase.AWAY
        return job

    def why(self, job: str) -> str:
        from shoal.core.answers.why import explain
        from shoal.model.reason import render

        return render(explain(self.state, self.job(job), self.policy, self.now_ms))

    def reload(self) -> None:
        snapshot = msgspec.json.decode(msgspec.json.encode(self.state.snapshot()), type=Snapshot)
        self.state = restore(snapshot, self.state.functions)


@pytest.fixture
def home() -> Home:
    made = Home()
    made.join("n1", gpus=1)
    return made


def full(home: Home) -> None:
    home.run(gpus=1)


def launched(cluster: Cluster) -> Launch:
    (launch,) = [one for one in cluster.last.commands if isinstance(one, Launch)]
    return launch


def away(job: Job) -> Any:
    assert job.away is not None
    return job.away


def test_a_job_for_any_cluster_starts_here_if_it_fits(home: Home) -> None:
    job = home.submit(gpus=1, cluster="any")
    assert home.job(job).phase is Phase.STARTING


class Trains(Home, Training):
    pass


def test_a_job_whose_saved_work_is_at_the_head_leaves_at_once() -> None:
    """It goes on there where it was here."""
    home = Trains(nodes="a", gpus=1)
    job = home.submit(gpus=1, cluster="any", checkpoint_ms=1_000)
    launch = launched(home)
    assert launch.travels and launch.copies and not launch.continues
    home.deliver()
    home.hear("a")
    home.walk(job, 60, saved_step=50)
    home.state.heard.copied[job] = Copied(job, 1, 49, 0)
    home.learn_gone("a")
    home.offered(job)
    assert home.job(job).phase is Phase.WAITING, "its newest step is not at the head"
    home.state.heard.copied[job] = Copied(job, 1, 50, 0)
    home.offered(job)
    assert home.job(job).phase is Phase.AWAY


def test_the_host_fetches_what_came_with_the_job_and_copies_what_it_saves() -> None:
    host = Trains(nodes="a", gpus=1)
    host.submit(gpus=1, labels={"home": "0123abcd.j1.2"})
    launch = launched(host)
    assert launch.travels and launch.continues and launch.copies


def test_a_job_with_saved_work_that_is_not_at_the_head_waits_for_as_long_as_that_took() -> None:
    """It would start over there."""
    home = Trains(nodes="a", gpus=1)
    job = home.run(gpus=1, cluster="any", checkpoint_ms=1_000)
    home.walk(job, 60, saved_step=50)
    home.learn_gone("a")
    saved_ms = home.job(job).attained_ms
    assert home.job(job).phase is Phase.WAITING and saved_ms > 0
    home.wait(saved_ms - 1)
    assert not wanted_offers(home.state, home.policy, home.now_ms)
    home.offered(job)
    assert home.job(job).phase is Phase.WAITING
    assert "no neighbor is asked: it has saved" in home.why(job)
    home.wait(1)
    home.offered(job)
    assert home.job(job).phase is Phase.AWAY


def test_a_job_that_waits_goes_where_it_would_start_first(home: Home) -> None:
    full(home)
    job = home.submit(gpus=1, cluster="any")
    assert [one.id for one in wanted_offers(home.state, home.policy, home.now_ms)] == [job]
    slow, fast = (Offer(job=job, start_ms=ms) for ms in (20_000, 3_000))
    home.step(neighbors=[home.word("b", offers=(slow,)), home.word("c", offers=(fast,))])
    assert (away(home.job(job)).neighbor, home.job(job).attempt) == ("c", 1)
    assert home.job(job).why == "c would start it in 3s"
    assert not wanted_offers(home.state, home.policy, home.now_ms)


def test_of_equal_starts_the_cheaper_wins(home: Home) -> None:
    full(home)
    job = home.submit(gpus=1, cluster="any")
    prices = {"b": 3_000_000, "c": 1_000_000}
    offers = {name: (Offer(job=job, start_ms=0, price=price),) for name, price in prices.items()}
    home.step(neighbors=[home.word(name, offers=offer) for name, offer in offers.items()])
    assert away(home.job(job)).neighbor == "c"


def test_an_offer_that_is_no_longer_needed_changes_nothing(home: Home) -> None:
    job = home.submit(gpus=1, cluster="any")
    home.offered(job)
    assert home.job(job).phase is Phase.STARTING
    home.offered("j77")


def test_a_job_that_may_run_here_does_not_go_where_it_would_wait_long(home: Home) -> None:
    full(home)
    job = home.submit(gpus=1, cluster="any")
    home.offered(job, start_ms=HOUR_MS)
    assert home.job(job).phase is Phase.WAITING
    assert "b: would start it in 60m" in home.why(job)


def test_a_job_that_names_a_neighbor_never_starts_here(home: Home) -> None:
    job = home.submit(gpus=1, cluster="b,c")
    assert home.job(job).phase is Phase.WAITING
    assert home.why(job) == "no neighbor is known; add one with: shoal neighbor add"
    home.offered(job, "d")
    assert home.job(job).phase is Phase.WAITING
    home.offered(job, "b", start_ms=HOUR_MS)  # it can only wait there
    assert home.job(job).phase is Phase.AWAY


def test_it_may_ask_for_more_than_there_is_here(home: Home) -> None:
    assert home.send(gpus=64)


def test_the_policy_sends_jobs_that_have_waited_long_enough() -> None:
    home = Home(Policy(neighbors=(Neighbor(name="b", after_ms=60_000),)))
    home.join("n1", gpus=1)
    full(home)
    job = home.submit(gpus=1)
    home.offered(job)
    assert home.job(job).phase is Phase.WAITING
    home.wait(60_000)
    home.hear("n1")
    assert [one.id for one in wanted_offers(home.state, home.policy, home.now_ms)] == [job]
    home.offered(job, "c")
    assert home.job(job).phase is Phase.WAITING, "c was not named"
    home.offered(job, "b")
    assert home.job(job).phase is Phase.AWAY


@pytest.mark.parametrize(
    ("fields", "share", "refused"),
    [
        (
            {"tenant": "eve"},
            {"tenants": ("lab",)},
            "the policy shares no neighbor with this tenant",
        ),
        ({"gpus": 3}, {"gpus_max": 2}, "the policy has at most 2 GPUs of ours there"),
        ({"labels": {"stays": "eu"}}, {}, "the job stays in eu"),
        ({"cluster": "region=eu"}, {"labels": {"region": "us"}}, "it is not region=eu"),
        ({"cluster": "price<2"}, {}, "its price is 2.5 per GPU-hour"),
        ({"cluster": "any"}, {"price_max": 1_000_000}, "its price is 2.5 per GPU-hour"),
    ],
)
def test_what_may_not_leave_stays(
    fields: dict[str, Any], share: dict[str, Any], refused: str
) -> None:
    home = Home(Policy(neighbors=(Neighbor(name="b", **share),)))
    home.join("n1", gpus=1)
    full(home)
    job = home.submit(**{"gpus": 1, "cluster": "any", **fields})
    home.offered(job, price=2_500_000)
    assert home.job(job).phase is Phase.WAITING
    assert refused in home.why(job)


def test_data_that_stays_in_a_region_may_go_to_a_neighbor_there() -> None:
    home = Home(Policy(neighbors=(Neighbor(name="b", labels={"region": "eu"}),)))
    home.join("n1")
    assert home.send(labels={"stays": "eu"})


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (
            {"cluster": "price<cheap"},
            "cluster",
            "'price<cheap' is neither a neighbor nor a condition",
        ),
        ({"cluster": "b,region=eu"}, "cluster", "not both"),
        ({"cluster": "b", "workdir": "/home/me"}, "cluster", "send it with --pack"),
        ({"cluster": "b", "volumes": ("/data:d",)}, "cluster", "give its URL instead"),
        ({"if_cut_ms": 60_000}, "if_cut", "is for jobs that name another cluster"),
        ({"cluster": "b", "if_cut_ms": 1}, "if_cut", "is at least 60 s"),
        ({"cluster": "b", "if_cut_ms": 99_000, "restart": "never"}, "if_cut", "must not run twice"),
    ],
)
def test_a_bad_wish_is_refused(
    home: Home, fields: dict[str, Any], field: str, message: str
) -> None:
    answer = home.ask(Submit(job_spec(**fields)))
    assert isinstance(answer, Refused)
    assert answer.field == field
    assert message in answer.message


def test_it_is_stored_before_anything_is_sent_and_survives_a_crash(home: Home) -> None:
    job = home.send()
    home.take_over()
    home.reload()
    assert away(home.job(job)).neighbor == "b"
    assert key_of("cafe", job, home.job(job).attempt) == f"cafe/{job}/1"


def test_it_ends_as_it_ended_there(home: Home) -> None:
    job = home.send(gpus=1)
    home.told(job, id="j9", phase="waiting")
    home.told(job, id="j9", phase="running")
    assert (away(home.job(job)).id, away(home.job(job)).running_ms) == ("j9", home.now_ms)
    done = home.ended(job, "failed", code=3, why="member 0 ended with code 3", started=True)
    assert [type(event).__name__ for event in done.events] == ["JobSettled", "JobFinished"]
    assert (home.job(job).outcome, home.job(job).code) == (Outcome.FAILED, 3)
    assert "at b: member 0 ended" in home.job(job).why
    home.ended(job, "succeeded")  # said again: it has no effect
    assert home.job(job).outcome is Outcome.FAILED


def test_only_the_neighbor_that_has_it_is_believed(home: Home) -> None:
    job = home.send()
    home.ended(job, name="c")
    home.told(job, attempt=7, ended=Ending(outcome=Outcome.SUCCEEDED))
    home.told("j99", attempt=1, ended=Ending(outcome=Outcome.SUCCEEDED))
    assert home.job(job).phase is Phase.AWAY


def test_cancelling_waits_for_the_hosts_word(home: Home) -> None:
    job = home.send()
    assert home.cancel(job) == Accepted(job)
    assert away(home.job(job)).withdrawn == "cancelled by a user"
    assert home.cancel(job) == Accepted(job, "already being cancelled")
    assert home.job(job).phase is Phase.AWAY
    home.ended(job, "cancelled")
    assert home.job(job).outcome is Outcome.CANCELLED


def test_a_job_that_had_ended_well_when_it_was_cancelled_has_ended_well(home: Home) -> None:
    job = home.send()
    home.cancel(job)
    home.ended(job, "succeeded", started=True)
    assert home.job(job).outcome is Outcome.SUCCEEDED


def test_a_refusal_is_certain_only_when_the_key_is_taken(home: Home) -> None:
    job = home.send()
    home.told(job, refused="quota")
    assert away(home.job(job)).withdrawn == "b does not take it: quota"
    assert home.job(job).phase is Phase.AWAY
    home.ended(job, "cancelled", why="cancelled before it came")
    assert home.job(job).phase is Phase.WAITING
    home.offered(job)
    assert home.job(job).phase is Phase.WAITING, "it has just come back"
    home.wait(30_000)
    home.offered(job)
    assert (home.job(job).phase, home.job(job).attempt) == (Phase.AWAY, 2)


def test_what_the_host_cancels_comes_back_unless_it_must_not_run_twice(home: Home) -> None:
    job, never = home.send(), home.send(restart="never")
    home.ended(job, "cancelled", why="drained", started=True, gpu_ms=5)
    assert (home.job(job).phase, home.job(job).returns) == (Phase.WAITING, 1)
    home.ended(never, "cancelled", why="drained", started=True)
    assert home.job(never).outcome is Outcome.CANCELLED


def test_a_job_that_does_not_begin_there_is_taken_back(home: Home) -> None:
    job = home.send()
    home.told(job, id="j9", phase="waiting")
    home.wait(600_000)
    home.told(job, id="j9", phase="waiting")
    assert "has not begun there" in away(home.job(job)).withdrawn


def test_a_job_whose_beginning_a_cut_has_hidden_is_not_taken_back(home: Home) -> None:
    """It may have worked for hours there."""
    job = home.send()
    home.told(job, id="j9", phase="waiting")
    home.wait(10 * HOUR_MS)
    home.step()
    assert not away(home.job(job)).withdrawn
    home.told(job, id="j9", phase="running")
    home.told(job, id="j9", phase="waiting")  # its host has drained a node, say
    assert not away(home.job(job)).withdrawn


def test_a_cut_leaves_a_job_alone(home: Home) -> None:
    job = home.send()
    home.told(job, id="j9", phase="running")
    home.wait(30 * 24 * HOUR_MS)
    home.step(neighbors=[NeighborReport(name="b", problem="cannot be reached")])
    assert home.job(job).phase is Phase.AWAY


def test_a_lease_is_renewed_by_stamps_of_the_hosts_clock_and_is_over_at_last(home: Home) -> None:
    job = home.send(if_cut_ms=HOUR_MS)
    given = away(home.job(job))
    assert given.until_there_ms == THEIRS_MS + home.now_ms + HOUR_MS // 2
    assert given.until_here_ms == home.now_ms + HOUR_MS
    home.wait(HOUR_MS // 8)
    home.told(job)
    assert away(home.job(job)) == given, "most of it is left"
    home.wait(HOUR_MS // 4)
    home.told(job, id="j9", phase="running")
    later = away(home.job(job))
    assert later.until_there_ms == THEIRS_MS + home.now_ms + HOUR_MS // 2
    home.wait(HOUR_MS - 1)
    home.step()
    assert home.job(job).phase is Phase.AWAY
    home.wait(1)
    home.step()
    assert home.job(job).phase is Phase.WAITING
    assert "b has not been heard of for 1h, and has stopped it" in home.why(job)


def test_a_neighbor_that_is_declared_gone_has_nothing_any_more(home: Home) -> None:
    job, done, never = home.send(), home.send(), home.send(restart="never")
    home.cancel(done)
    home.told(never, id="j9", phase="running")
    answer = home.ask(DeclareGone("b", "ann"))
    assert answer == Accepted("", "3 of our jobs were there")
    assert home.job(job).phase is Phase.WAITING
    assert home.job(done).outcome is Outcome.CANCELLED
    assert "must not run twice" in home.job(never).why


def test_a_withdrawal_that_comes_first_takes_the_key(home: Home) -> None:
    """On the host: the submission that is late finds a job that has ended."""
    spec = job_spec()
    first = home.ask(Submit(spec, "cafe/j1/1", cancelled=True, who="b"))
    assert isinstance(first, Accepted)
    assert home.job(first.id).outcome is Outcome.CANCELLED
    late: Future[Answer] = Future()
    home.controller.ask(Submit(spec, "cafe/j1/1"), late)
    home.step()
    assert late.result() == Accepted(first.id, "this submission was already accepted")
    answer = home.ask(Submit(spec, cancelled=True))
    assert isinstance(answer, Refused)


def test_a_withdrawal_that_comes_second_cancels(home: Home) -> None:
    job = home.ask(Submit(job_spec(), "cafe/j1/1"))
    assert isinstance(job, Accepted)
    home.ask(Submit(job_spec(), "cafe/j1/1", cancelled=True, who="b"))
    assert home.job(job.id).phase is Phase.STOPPING


def test_the_spec_that_travels_means_nothing_of_home() -> None:
    spec = job_spec(
        cluster="b", tenant="lab", user="ann", priority=9, labels={"a": "b"}, if_cut_ms=60_000
    )
    there = spec_there(spec, "home")
    assert (there.tenant, there.user, there.cluster, there.if_cut_ms) == ("home", "", "here", 0)
    assert (there.priority, there.labels) == (0, {"a": "b"})
    assert isinstance(msgspec.convert(msgspec.to_builtins(there), JobSpec), JobSpec)


def test_wishes() -> None:
    assert not wish_of("any").only
    assert wish_of("b,c").names == ("b", "c")
    assert wish_of("price<1.5,region=eu").price_max == 1_500_000
    assert not wish_of("").asks


def test_usual_policies_know_no_neighbors() -> None:
    assert POLICY.neighbors == ()


# -- what an attacker, an admin or bad luck does ---------------------------------------------------


def test_a_job_that_came_from_a_neighbor_goes_no_further(home: Home) -> None:
    """Else it could come back to where it came from, and nobody would know who has it."""
    home.policy = Policy(neighbors=(Neighbor(name="b", after_ms=1),))
    full(home)
    there = spec_there(job_spec(cluster="b", gpus=1), "from-c")
    answer = home.ask(Submit(there, "c/j1/1"))
    assert isinstance(answer, Accepted)
    home.wait(60_000)
    home.offered(answer.id)
    assert home.job(answer.id).phase is Phase.WAITING
    assert not wanted_offers(home.state, home.policy, home.now_ms)
    impossible = home.ask(Submit(spec_there(job_spec(gpus=9), "from-c")))
    assert isinstance(impossible, Refused), "it runs here, or nowhere"


def test_a_job_whose_lease_is_renewed_here_stays(home: Home) -> None:
    home.policy = Policy(neighbors=(Neighbor(name="b", after_ms=1),))
    full(home)
    answer = home.ask(Submit(job_spec(gpus=1), until_ms=home.now_ms + HOUR_MS))
    assert isinstance(answer, Accepted)
    home.wait(60_000)
    home.offered(answer.id)
    assert home.job(answer.id).phase is Phase.WAITING
    assert isinstance(home.ask(Submit(job_spec(cluster="b"), until_ms=home.now_ms + 9)), Refused)


def test_a_withdrawal_stores_nothing_that_nobody_has_looked_at(home: Home) -> None:
    spec = job_spec(service="chat", after=("j77",), env={"SHOAL_JOB": "x"}, name="train")
    answer = home.ask(Submit(spec, "cafe/j1/1", cancelled=True, who="b"))
    assert isinstance(answer, Accepted)
    stored = home.job(answer.id)
    assert (stored.spec.name, stored.spec.service, stored.spec.env) == ("train", "", {})


def test_nobody_withdraws_the_job_of_another_tenant_by_its_key(home: Home) -> None:
    home.ask(AddTenant("red"))
    home.ask(AddTenant("blue"))
    job = home.ask(Submit(job_spec(tenant="red"), "key"))
    answer = home.ask(Submit(job_spec(tenant="blue"), "key", "blue", cancelled=True))
    assert isinstance(job, Accepted)
    assert isinstance(answer, Refused)
    assert home.job(job.id).phase is Phase.STARTING


def test_requeue_takes_a_job_back(home: Home) -> None:
    job = home.send()
    answer = home.ask(Requeue(job, "ann"))
    assert isinstance(answer, Accepted)
    assert answer.note == "it waits here as soon as b has ended it"
    assert away(home.job(job)).withdrawn == "requeued by ann"
    assert home.ask(Requeue(job)) == Accepted(job, "it is already away")
    home.ended(job, "cancelled", started=True)
    assert home.job(job).phase is Phase.WAITING


def test_cancelling_a_workflow_cancels_its_job_that_is_away_once(home: Home) -> None:
    spec = job_spec(cluster="b")
    first = home.ask(
        SubmitWorkflow(
            (WorkflowJob("one", spec), WorkflowJob("two", job_spec(cluster="b"), after=("one",)))
        )
    )
    assert isinstance(first, Accepted)
    home.offered(first.id)
    assert home.job(first.id).phase is Phase.AWAY
    waits = home.job("j2")
    assert waits.awaits == (first.id,)
    home.offered("j2")
    assert waits.phase is Phase.WAITING, "it waits for the other, wherever that is"
    for count in (1, 0):
        home.ask(CancelWorkflow(first.id))
        kinds = [type(event).__name__ for event in home.last.events]
        assert kinds.count("JobWithdrawn") == count
    home.ended(first.id, "cancelled")
    assert home.job(first.id).outcome is Outcome.CANCELLED


def test_jobs_of_a_workflow_go_on_when_the_one_that_was_away_has_ended(home: Home) -> None:
    job = home.send()
    after = home.submit(after=(job,))
    home.ended(job, "succeeded", started=True)
    assert home.job(after).phase is Phase.STARTING


def test_an_away_job_of_a_tenant_on_hold_comes_back_if_the_policy_stops_such_jobs() -> None:
    tenants = (Tenant(name="default", budget_gpu_hours=1),)
    home = Home(Policy(tenants=tenants, budget_stops=True))
    home.join("n1", gpus=1)
    job, never = home.send(gpus=1), home.send(gpus=1, restart="never")
    spent = Spending(tenant="default", period=BudgetPeriod.MONTH, gpu_us=10**13)
    home.step(spendings=(spent,))
    assert "budget of" in away(home.job(job)).withdrawn
    assert not away(home.job(never)).withdrawn
    home.ended(job, "cancelled", started=True)
    assert home.job(job).phase is Phase.WAITING
    home.wait(60_000)
    home.offered(job)
    assert home.job(job).phase is Phase.WAITING, "its tenant is on hold"
    home.reload()


def test_no_tenant_or_user_is_removed_under_its_away_jobs(home: Home) -> None:
    home.ask(AddTenant("red"))
    home.ask(SetUser(User(name="ann", roles={"red": Role.MEMBER}), add=True))
    share = Neighbor(name="b", tenants=("red",))
    home.ask(SetPolicy(msgspec.structs.replace(home.policy, neighbors=(share,))))
    job = home.send(tenant="red", user="ann")
    assert isinstance(home.ask(RemoveTenant("red")), Refused)
    answer = home.ask(RemoveUser("ann", end=True))
    assert isinstance(answer, Accepted), answer
    assert away(home.job(job)).cancelled


def test_an_away_job_is_not_replaced_by_another(home: Home) -> None:
    job = home.send()
    answer = home.ask(Submit(job_spec(cluster="b"), instead=job))
    assert isinstance(answer, Refused)
    assert "already started" in answer.message


def test_a_neighbor_owes_for_no_more_than_there_was_time_for(home: Home) -> None:
    job = home.submit(gpus=2, cluster="b")
    home.offered(job, price=3_600_000)
    home.wait(10_000)
    home.ended(job, "succeeded", started=True, gpu_ms=10**12, money=10**12)
    (settled,) = [event for event in home.last.events if isinstance(event, JobSettled)]
    assert (settled.gpu_ms, settled.money) == (20_020, 20_021)


def test_a_neighbor_that_keeps_changing_its_mind_fills_no_log(home: Home) -> None:
    job = home.send()
    for number in range(5):
        home.told(job, id=f"j{number}", phase="running")
        home.told(job, refused="no", phase="waiting")
    kinds = [type(event).__name__ for event in home.log]
    assert (kinds.count("JobTaken"), kinds.count("JobWithdrawn")) == (1, 1)


def test_what_is_given_up_is_told_to_end_and_owed_whenever_that_is_heard(home: Home) -> None:
    job = home.send(gpus=1, cluster="b,c")
    home.ask(DeclareGone("b", "ann"))
    assert list(home.state.strays) == [f"{job}/1"]
    home.reload()
    home.wait(60_000)
    home.offered(job, "c")
    assert (away(home.job(job)).neighbor, home.job(job).attempt) == ("c", 2)
    home.ended(job, attempt=1, gpu_ms=70_000, started=True)
    (settled,) = home.last.events
    assert isinstance(settled, JobSettled)
    assert (settled.attempt, settled.gpu_ms) == (1, 60_060)
    assert not home.state.strays
    assert home.job(job).phase is Phase.AWAY
    home.ended(job, attempt=1, gpu_ms=70_000)
    assert not home.last.events


def test_strays_of_jobs_that_have_ended_are_heard_of_too(home: Home) -> None:
    job = home.send(gpus=1)
    home.cancel(job)
    home.ask(DeclareGone("b", "ann"))
    assert home.job(job).outcome is Outcome.CANCELLED
    home.ended(job, "cancelled", "c", attempt=1)
    assert home.state.strays, "c does not have it"
    home.ended(job, "cancelled", attempt=1)
    assert not home.state.strays


def test_a_job_that_must_not_run_twice_ends_with_its_neighbor(home: Home) -> None:
    """Whether it has begun there, only the neighbor knew."""
    job = home.send(restart="never")
    home.ask(DeclareGone("b", "ann"))
    assert home.job(job).outcome is Outcome.CANCELLED


def test_many_jobs_that_nobody_takes_do_not_keep_others_from_being_offered(home: Home) -> None:
    jobs = {home.submit(cluster="b") for _ in range(100)}
    asked: set[str] = set()
    for _ in range(100):
        wanted = wanted_offers(home.state, home.policy, home.now_ms)
        assert len(wanted) == OFFERED_MAX
        asked.update(job.id for job in wanted)
        home.wait(10_000)
    assert asked == jobs


def test_what_is_free_there_is_offered_to_many_and_taken_once(home: Home) -> None:
    full(home)
    jobs = [home.submit(gpus=2, cluster="any") for _ in range(5)]
    offers = tuple(Offer(job=job, start_ms=0) for job in jobs)
    home.step(neighbors=[home.word("b", offers=offers, gpus=8, gpus_free=5)])
    assert [home.job(job).phase for job in jobs] == [Phase.AWAY] * 2 + [Phase.WAITING] * 3
    assert "b: would start it in a moment" in home.why(jobs[2])


def test_a_price_below_nothing_is_met_by_nobody(home: Home) -> None:
    full(home)
    job = home.submit(gpus=1, cluster="price<0")
    home.offered(job, price=0)
    assert home.job(job).phase is Phase.WAITING


def test_those_who_wait_for_its_start_hear_of_a_start_elsewhere(home: Home) -> None:
    job = home.send(notify=("started=https://x.org",))
    home.told(job, id="j9", phase="running")
    (event,) = [event for event in home.last.events if isinstance(event, JobRunsAway)]
    (notice,) = notices_of(Recorded(1, event), (), Identity(), home.job(job), "cafe")
    assert (notice.what.value, notice.text, notice.state) == (
        "started",
        f"{home.job(job).title} is running at b",
        "running",
    )


def test_a_wait_after_it_came_back_is_reported(home: Home) -> None:
    job = home.send(notify=("waiting:1m=https://x.org",))
    home.ended(job, "cancelled")
    home.wait(60_000)
    home.step()
    assert "JobWaited" in [type(event).__name__ for event in home.last.events]


def test_a_restored_home_gives_no_number_of_a_hand_over_out_again(home: Home) -> None:
    job = home.send()
    home.ended(job, "cancelled")
    home.state.restored_job, home.state.restored_attempt = home.state.next_job, 40
    home.wait(60_000)
    home.offered(job)
    assert home.job(job).attempt == 40


def test_numbers_of_hand_overs_are_marked_as_given_out(tmp_path: Path) -> None:
    """Else a home that was restored could name another hand-over by the same key."""
    numbers = Numbers(tmp_path / "marks.json")
    numbers.cover([JobHanded(at_ms=1, job="j1", attempt=9, neighbor="b", why="")])
    assert Numbers(tmp_path / "marks.json").written.attempt >= 9


@pytest.mark.parametrize("order", ["fair", "fifo"])
def test_a_snapshot_and_the_log_lead_to_the_same_state(home: Home, order: str) -> None:
    away_job, back, waits = home.send(), home.send(), home.submit(cluster="b,c")
    home.ended(back, "cancelled")
    home.ask(DeclareGone("c"))
    home.policy = msgspec.structs.replace(home.policy, order=order)
    home.step()
    before = msgspec.json.encode(home.state.snapshot())
    home.reload()
    assert msgspec.json.encode(home.state.snapshot()) == before
    home.take_over()
    assert {away_job, back, waits} <= set(home.state.jobs)
    assert list(home.state.away) == [away_job]


def test_a_job_that_a_cap_kept_back_may_leave_and_stands_again() -> None:
    """It is among those that may leave wherever it stands, and only once."""
    home = Home(Policy(tenants=(Tenant(name="lab", gpus_max=1),)))
    home.join("n1", gpus=2)
    first = home.run(gpus=1, tenant="lab")
    waiting = [home.submit(gpus=1, tenant="lab", cluster="any") for _ in range(3)]
    asked = wanted_offers(home.state, home.policy, home.now_ms)
    assert [one.id for one in asked] == waiting
    home.offered(waiting[1])
    assert home.job(waiting[1]).phase is Phase.AWAY
    home.end(first)
    assert home.job(waiting[0]).phase is Phase.STARTING
    home.cancel(waiting[2])
    assert not home.state.queue.wishing


def test_a_service_has_no_neighbors(home: Home) -> None:
    for words in ("west", "a=b,c", "any"):
        spec = service_spec()
        replica = msgspec.structs.replace(spec.replica, cluster=words)
        answer = home.ask(SetService(msgspec.structs.replace(spec, replica=replica)))
        assert isinstance(answer, Refused)
        assert (answer.field, answer.message) == ("cluster", "is for jobs; a service runs here")


def test_without_a_price_no_money_is_owed_and_never_more_than_was_offered(home: Home) -> None:
    for price, owed in ((None, 0), (2_000_000, 2_000_001)):
        job = home.send(gpus=1, price=price)
        home.wait(HOUR_MS)
        done = home.ended(job, gpu_ms=HOUR_MS, money=10**15, started=True)
        (settled,) = [event for event in done.events if isinstance(event, JobSettled)]
        assert (settled.gpu_ms, settled.money) == (HOUR_MS, owed)


def test_tenants_that_are_kept_apart_go_only_where_the_policy_names_them() -> None:
    home = Home()
    home.join("n1")
    home.ask(AddTenant("lab"))
    job = home.submit(tenant="lab", cluster="b")
    home.offered(job)
    assert "the policy names no tenants for it" in home.why(job)
    share = Neighbor(name="b", tenants=("lab",))
    home.ask(SetPolicy(msgspec.structs.replace(home.policy, neighbors=(share,))))
    home.offered(job)
    assert home.job(job).phase is Phase.AWAY


def test_a_job_whose_package_takes_long_is_not_late_and_one_that_starts_for_hours_is(
    home: Home,
) -> None:
    job = home.send()
    home.wait(2 * HOUR_MS)
    home.told(job)
    assert not away(home.job(job)).withdrawn, "its package is on its way"
    home.told(job, id="j9", phase="waiting")
    home.told(job, id="j9", phase="starting")
    home.wait(HOUR_MS)
    home.told(job, id="j9", phase="starting")
    assert not away(home.job(job)).withdrawn
    home.wait(HOUR_MS)
    home.told(job, id="j9", phase="starting")
    assert "has not begun there" in away(home.job(job)).withdrawn
