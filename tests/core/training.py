"""A cluster whose jobs tell of their steps, one step of the gang at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.core.features.health import check_id
from shoal.core.state.events.log import Event
from shoal.core.step import Step
from shoal.model.commands import Check
from shoal.model.health import CheckResult, Standing
from shoal.model.job import MemberRef
from shoal.model.policy import Policy
from shoal.model.progress import Beat, Progress
from shoal.model.report import CheckNode
from tests.core.build import POLICY, Cluster

STEP_MS = 1_000


def policy(**numbers: Any) -> Policy:
    return msgspec.structs.replace(POLICY, **numbers)


class Training(Cluster):
    def __init__(self, policy: Policy = POLICY, nodes: str = "", **fields: Any) -> None:
        """One node for each letter."""
        super().__init__(policy)
        self.beats: dict[MemberRef, Beat] = {}
        self.stepped_ms: dict[MemberRef, int] = {}
        for name in nodes:
            self.join(name, **fields)

    def walk(
        self, job_id: str, steps: int, slow: Mapping[int, int] | None = None, **said: Any
    ) -> None:
        """So many steps of the whole gang, told after each. `slow`: by how much more a member
        computes; the others wait for it meanwhile. `said` are fields of the beats."""
        for _ in range(steps):
            job = self.job(job_id)
            factors = [(slow or {}).get(number, 1) for number in range(len(job.members))]
            took_ms = STEP_MS * max(factors)
            self.wait(took_ms)
            for number, factor in enumerate(factors):
                ref = MemberRef(job_id, job.attempt, number)
                last = self.beats.get(ref, Beat(ref=str(ref), step=job.saved_step))
                self.beats[ref] = msgspec.structs.replace(
                    last,
                    **{
                        "step": last.step + 1,
                        "steps": last.steps + 1,
                        "compute_us": last.compute_us + STEP_MS * 1000 * factor,
                        "wait_us": last.wait_us + (took_ms - STEP_MS * factor) * 1000,
                        **said,
                    },
                )
                self.stepped_ms[ref] = self.now_ms
            self.tell()

    def stand(self, milliseconds: int, waiting: Sequence[MemberRef] = ()) -> None:
        """Nobody makes a step, all are heard each second; these wait for a peer."""
        for _ in range(milliseconds // 1_000):
            self.wait(1_000)
            for ref in waiting:
                last = self.beats[ref]
                self.beats[ref] = msgspec.structs.replace(last, wait_us=last.wait_us + 1_000_000)
            self.tell()

    def tell(self, *names: str) -> Step:
        """These nodes report, or all, with what their living members say."""
        reports = []
        for name in names or self.books:
            book = self.books[name]
            said = tuple(
                Progress(ref, self.beats[ref], self.now_ms - self.stepped_ms[ref])
                for ref in book.alive
                if ref in self.beats
            )
            reports.append(book.report(said))
        return self.hear_reports(*reports)

    def checks(self) -> list[Check]:
        """Those that the last step asks for."""
        return [command for command in self.last.commands if isinstance(command, Check)]

    def answer(self, name: str, *faults: str, **fields: Any) -> Step:
        """The node measures what it was last told to, and says so."""
        check = self.asked(name)
        self.books[name].measured(CheckResult(id=check.id, faults=faults, **fields))
        return self.tell(name)

    def asked(self, name: str) -> Check:
        """The newest check that the node was told to do, or is to be told."""
        for check in self.checks():
            if check.node == name:
                return check
        record = self.node(name).record
        known = self.state.heard.asked.get(name)
        return Check(node=name, incarnation=1, id=known or check_id(record))

    def restart(self, job_id: str, code: int = 143) -> None:
        """The orders of the last step are obeyed: all that is to stop stops."""
        self.deliver()
        for book in self.books.values():
            for ref in [ref for ref in book.alive if ref.job == job_id and ref in book.stopping]:
                book.exited(ref, code)
        self.tell()
        self.deliver()
        self.tell()

    def standing(self, name: str) -> Standing:
        return self.node(name).record.standing

    def events_of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.log if isinstance(event, kinds)]

    def nodes_of(self, job_id: str) -> list[str]:
        return [member.slice.node for member in self.job(job_id).members]

    def quarantine(self, name: str) -> None:
        """By a check that somebody asked for, and that fails."""
        self.step(requests=(CheckNode(name),))
        self.tell(name)
        self.answer(name, "a fault")
        assert self.standing(name) is Standing.QUARANTINED
