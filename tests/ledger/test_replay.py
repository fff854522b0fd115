"""The same book over replays: what a policy would have come to is told in the same accounts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from shoal.core.policies import SHIPPED
from shoal.core.state.events.log import Event
from shoal.ledger.accounts import Account
from shoal.model.job import Job
from shoal.sim.replay.clusters import Conditions, Failures, alike
from shoal.sim.replay.replay import Replay
from shoal.sim.replay.traces import Arrival, Gangs, Trace, in_order
from tests.ledger.worlds import Books, by_node, capacity


def made_up(seed: int, jobs: int = 150) -> Trace:
    rng = random.Random(seed)
    gangs = Gangs(8)
    arrivals = [
        Arrival(
            rng.randrange(6 * 3_600_000),
            rng.randrange(60_000, 7_200_000),
            gangs.spec(rng.choice((1, 1, 2, 4, 8, 16))),
            row=row,
        )
        for row in range(jobs)
    ]
    return in_order("made up", arrivals)


class Followed(Replay):
    """Keeps a second book beside the replay's own."""

    books: Books | None = None

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        if self.books is not None:
            self.books.stepped(events)
        return super().commit(events, finished)


@pytest.mark.parametrize(
    "policy",
    ["fair", *(pytest.param(name, marks=pytest.mark.soak) for name in ("fifo", "tiresias"))],
)
def test_a_replay_with_failures_adds_up(policy: str) -> None:
    books = Books()
    conditions = Conditions(
        failures=Failures(per_1000_node_days=3_000, repair_ms=600_000), checkpoint_ms=900_000
    )
    nodes = alike(6, gpus=8)
    followed = Followed(made_up(1), nodes, SHIPPED[policy], conditions, policy, 3)
    followed.books = books
    outcome = followed.run()
    end_ms = books.events[-1].at_ms
    amounts = books.close(end_ms)
    assert by_node(amounts) == capacity(books.events, end_ms)
    totals: Counter[Account] = Counter()
    for place, amount in amounts.items():
        totals[place.account] += amount
    assert min(totals.values()) > 0
    assert totals[Account.RECOMPUTE]
    # The replay knows how much work was really done: nothing useful is missing, and since work is
    # only known to be saved when it is, no more is called useful than was done and started again.
    work = sum(a.work_ms * a.spec.gpus * a.spec.members for a in made_up(1).arrivals) * 1000
    assert 0.9 * work < totals[Account.USEFUL] < 1.3 * work
    assert outcome.events == len(books.events) + 1  # the start of the controller
    assert outcome.ledger is not None
    assert {one.account: one.gpu_us for one in outcome.ledger.accounts} == totals
