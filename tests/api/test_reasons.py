"""What a tenant reads does not depend on what other tenants, their users and their jobs are called.

The same history happens again, with other names for all that is not the reader's own, and the
reader must not notice. So even a tenant called `gpu` or `waiting` cannot hide in a sentence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.feed_rows import Own, job_line
from shoal.api.principal import THE_OPERATOR, Principal
from shoal.api.reach import Reach, seen_events
from shoal.api.views import job_row, seen_remedies
from shoal.core.answers.advice import advise
from shoal.core.answers.outlook import outlook
from shoal.core.features.notices import notices_of
from shoal.core.state.apply import apply
from shoal.core.state.events.base import JobEvent
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeJudged
from shoal.model.commands import Stop
from shoal.model.health import Record, Standing, Suspicion
from shoal.model.identity import Identity, Role, User
from shoal.model.job import Job
from shoal.model.policy import Policy, Preempt, Tenant
from shoal.model.reason import ANOTHER
from tests.core.build import node_spec
from tests.core.clockwork import Clockwork

OURS = "a-lab"
# Two worlds: the other tenants, their users, and how their jobs are called.
NAMES = (
    (("zoo", "zebra"), "zoe", "zebrajob{}"),
    (("gpu", "waiting"), "job", "j{}"),
    (("j1", "tenant"), "another", "a-lab.{}"),
    (("room", "which"), "for", "and-{}.held"),
)
LOOKS_MS = range(2_000, 60_000, 4_000)


class History:
    """A cluster that runs, and everything that each of two readers could read on the way."""

    def __init__(self, seed: int, tenants: tuple[str, str], user: str, name: str) -> None:
        rng = random.Random(seed)
        policy = Policy(
            order=rng.choice(("fair", "priority")),
            preempt=rng.choice((Preempt.RANK, Preempt.PRIORITY)),
            reservations=rng.choice((0, 2)),
            run_ms_min=0,
            patience_ms=rng.choice((0, 5_000, 3_600_000)),
            tenants=tuple(Tenant(name=one) for one in (OURS, *tenants)),
        )
        nodes = [node_spec(f"m{number}", gpus=4, sleep="freeze") for number in range(3)]
        self.cluster = Clockwork(policy, *nodes, stop_ms=rng.choice((0, 3_000)))
        for number in range(24):
            whose = rng.choice((OURS, OURS, *range(2)))
            own = isinstance(whose, str)
            self.cluster.plan(
                1_000 + rng.randrange(40_000),
                rng.choice((500, 5_000, 20_000)),
                gpus=rng.choice((1, 2, 4)),
                members=rng.choice((1, 1, 2, 3)),
                cpu_milli=0,
                priority=rng.choice((0, 0, 5, 10)),
                tenant=whose if isinstance(whose, str) else tenants[whose],
                user="anna" if own else user,
                name=f"own{number}" if own else name.format(number),
                preemptible=rng.random() < 0.7,
                checkpoint_ms=rng.choice((0, 1_000)),
                estimate_ms=rng.choice((0, 500, 5_000, 20_000)),
                notify=("ended,started=@here",) if own else (),
            )
        self.owners: dict[str, Job] = {}
        self.read = {"ours": list[str](), "operator": list[str]()}
        self._ended = 0
        for at_ms in LOOKS_MS:
            self.cluster.go_on(at_ms)
            self._look("ours", Principal(user="anna", tenant=OURS, role=Role.MEMBER, token="t" * 8))
            self._look("operator", THE_OPERATOR)
            self._ended = len(self.cluster.log)

    def _look(self, reader: str, who: Principal) -> None:
        cluster, state = self.cluster, self.cluster.state
        self.owners |= state.jobs
        self._distrust()
        loop: Any = SimpleNamespace(
            state=state,
            policy=cluster.policy,
            clock=SimpleNamespace(now_ms=lambda: cluster.now_ms),
            store=SimpleNamespace(job=self.owners.get),
            newest={},
        )
        reach = Reach(loop, who)
        self.read[reader] += map(str, self._texts(reach))

    def _distrust(self) -> None:
        """A node is in quarantine, and the reason names somebody else's job and its words."""
        theirs = next((j for j in self.owners.values() if j.spec.tenant != OURS), None)
        node = self.cluster.state.order[0]
        if theirs is not None and node.record.standing is Standing.OK:
            why = f"{theirs.label} of {theirs.spec.user} cannot write"
            now_ms = self.cluster.now_ms
            suspicion = Suspicion(at_ms=now_ms, why=why, job=theirs.id)
            record = Record(
                standing=Standing.QUARANTINED, why=why, suspicions=(suspicion,), retest_ms=10**10
            )
            apply(
                self.cluster.state, NodeJudged(at_ms=now_ms, node=node.id, record=record, why=why)
            )

    def _texts(self, reach: Reach) -> Iterator[object]:
        loop = reach.loop
        state, policy, now_ms = loop.state, loop.policy, loop.clock.now_ms()
        yield from reach.waits()
        for job in reach.jobs():
            yield job_row(reach, job)
            yield reach.text(outlook(state, job, policy, now_ms).why)
            yield reach.holders(job)
            yield seen_remedies(reach, advise(state, job, now_ms))
            if not reach.who.sees_all:
                yield Own(loop, OURS)._jobs([job_line(loop, job)])
        new = self.cluster.log[self._ended :]
        yield from seen_events(reach, [Recorded(seq, event) for seq, event in enumerate(new)])
        yield from self._notices(reach, new)
        for command in self.cluster.last.commands:
            if isinstance(command, Stop) and reach.find(command.ref.job):
                yield command.why

    def _notices(self, reach: Reach, new: list[Event]) -> Iterator[object]:
        people = Identity(users={"anna": User(name="anna", roles={OURS: Role.MEMBER})})
        for seq, event in enumerate(new):
            if isinstance(event, JobEvent) and (job := reach.find(event.job)) is not None:
                yield notices_of(Recorded(seq, event), [], people, job, "cafe")


@pytest.mark.parametrize("seed", range(5))
def test_names_of_others_make_no_difference_to_a_reader(seed: int) -> None:
    first, *others = (History(seed, *names).read for names in NAMES)
    for other in others:
        assert other["ours"] == first["ours"]
        assert other["operator"] != first["operator"], "the names are in nothing"


def test_a_reader_without_a_right_to_names_is_told_of_others_all_the_same() -> None:
    """Otherwise the test above would compare texts that never name anybody."""
    histories = [History(seed, *NAMES[0]) for seed in range(5)]
    assert any(ANOTHER in text for one in histories for text in one.read["ours"])
    assert any("(priority " in text for one in histories for text in one.read["operator"])
    assert any("is quarantined (" in text for one in histories for text in one.read["operator"])


def test_nobody_reads_marks() -> None:
    read = History(3, *NAMES[0]).read
    for text in (*read["ours"], *read["operator"]):
        assert "\\x02" not in text and "\\x03" not in text and "\\x1f" not in text
