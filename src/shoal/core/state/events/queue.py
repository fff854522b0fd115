"""What happens to jobs while they wait, and to what people write on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

import msgspec

from shoal.core.books.vacancy import task_of
from shoal.core.state.apply_array import parts_of, release_array
from shoal.core.state.apply_queue import (
    add_job,
    claim,
    forget_reservation,
    join_queue,
    lease,
    leave_queue,
    release_after,
    unclaim,
    weigh,
)
from shoal.core.state.events.base import JobEvent
from shoal.core.state.records import Reservation
from shoal.core.state.state import State
from shoal.model.array import ELEMENT_NUMBERS
from shoal.model.durations import duration_text, moment_text
from shoal.model.hidden import without_keys
from shoal.model.ids import number_of
from shoal.model.job import NOTES_MAX, Job, JobSpec, Note, Phase
from shoal.model.phrases import because, by, command_text, names_text, nodes_text, shape_text
from shoal.model.resources import Slice


class JobSubmitted(JobEvent, frozen=True, kw_only=True):
    quiet: ClassVar[bool] = True

    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # jobs that it waits for; others of `spec.after` had ended

    def services(self, state: State) -> Iterable[str]:  # noqa: ARG002
        return (self.spec.service,) if self.spec.service else ()

    def apply(self, state: State) -> None:
        number = number_of(self.job)
        state.next_job = max(state.next_job, number + 1)
        state.submitted += 1
        if self.spec.gpus:
            state.foresight.saw(task_of(self.spec))
        add_job(state, self._new_job(state, number))

    def _new_job(self, state: State, number: int) -> Job:
        """An element stands in the queue where its array was submitted. One that has run before
        goes on counting its attempts, because the name of a member is used only once."""
        job = Job(
            id=self.job,
            number=number * ELEMENT_NUMBERS,
            spec=self.spec,
            key=self.key,
            submitted_ms=self.at_ms,
            awaits=self.awaits,
            not_before_ms=self.spec.begin_ms if self.spec.begin_ms > self.at_ms else 0,
        )
        if self.spec.array:
            array = state.arrays[self.spec.array]
            sweep, elements = parts_of(array)
            position = sweep.position_of(self.spec.index)
            assert position is not None, self.job
            job.number = array.number + 1 + position
            if position in elements.ran:
                job.attempt = elements.base
            elements.pending.discard(position)
        return job

    def phrase(self) -> str:
        spec = self.spec
        name = f" as '{spec.name}'" if spec.name else ""
        return f"was submitted{name}: {shape_text(spec)}: {command_text(spec.command)}"

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=without_keys(self.spec))


class JobLeased(JobEvent, frozen=True, kw_only=True):
    """The job may be alive until then, unless somebody renews that."""

    until_ms: int
    who: str = ""

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.until_ms = self.until_ms
        lease(state, job)

    def phrase(self) -> str:
        return f"has a lease until {moment_text(self.until_ms)}{by(self.who)}"


class JobReleased(JobEvent, frozen=True, kw_only=True):
    """The job `by` has ended as this job needs it. With the last such end, it joins the queue."""

    by: str
    why: str

    def apply(self, state: State) -> None:
        array = state.arrays.get(self.job)
        if array is not None:
            array.why = self.why
            release_array(state, array, self.by, self.at_ms)
            return
        job = state.jobs[self.job]
        job.why = self.why
        release_after(state, job, self.by, self.at_ms)
        job.requeued_ms = self.at_ms  # its wait for room begins with the last of them

    def phrase(self) -> str:
        return f"no longer waits for {self.by}: {self.why}"


class JobReserved(JobEvent, frozen=True, kw_only=True):
    """The job is blocked at the front of the queue; room for `members` of it is set aside on each
    of these nodes from about `start_ms` on. None: the end of the jobs running there is not known.
    Without `members` (before 0.7.0), the whole nodes are set aside."""

    quiet: ClassVar[bool] = True

    start_ms: int | None
    nodes: tuple[str, ...]
    why: str
    members: tuple[int, ...] = ()

    def apply(self, state: State) -> None:
        counts = self.members or (0,) * len(self.nodes)
        named = sorted(zip((state.nodes[node].index for node in self.nodes), counts, strict=True))
        nodes, members = tuple(index for index, _ in named), tuple(count for _, count in named)
        before = state.reservations.get(self.job)
        promised_ms = self.at_ms if self.start_ms is None else self.start_ms
        if before is not None:
            promised_ms = before.promised_ms
        state.reservations[self.job] = Reservation(
            self.start_ms, nodes, self.at_ms, promised_ms, members if self.members else ()
        )
        state.agenda.other_gaps()

    def phrase(self) -> str:
        """Without the expected start: that changes, and `shoal why` shows it."""
        if not self.nodes:
            return "is first in the queue"
        return f"has room reserved on {names_text(self.nodes)} for when the jobs there end"


class JobUnreserved(JobEvent, frozen=True, kw_only=True):
    """It may not start now, so nothing is set aside for it."""

    why: str

    def apply(self, state: State) -> None:
        forget_reservation(state, state.jobs[self.job])

    def phrase(self) -> str:
        return f"no longer has room reserved{because(self.why)}"


class JobClaimed(JobEvent, frozen=True, kw_only=True):
    """Room is being made for the job: it starts on these slices when the jobs that hold them,
    which are being stopped, have ended."""

    slices: tuple[Slice, ...]
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.why = self.why if job.phase is Phase.WAITING else job.why
        claim(state, job, self.slices)

    def phrase(self) -> str:
        return f"is having room made on {nodes_text(self.slices)}{because(self.why)}"


class JobUnclaimed(JobEvent, frozen=True, kw_only=True):
    why: str

    def apply(self, state: State) -> None:
        unclaim(state, state.jobs[self.job])

    def phrase(self) -> str:
        return f"no longer has room being made{because(self.why)}"


class JobPromoted(JobEvent, frozen=True, kw_only=True):
    """The job has waited too long: it comes first within its priority until it has ended."""

    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        waits = job.phase is Phase.WAITING and job.id not in state.claims
        if waits:
            leave_queue(state, job)
        job.elder = True
        state.elder = job.id
        least = (state.policy.run_ms_min, state.policy.turn_ms_min)
        state.agenda.stoppable.joins(job, *least)  # it is more entitled now
        if waits:
            join_queue(state, job)

    def phrase(self) -> str:
        return f"moved to the front of its priority{because(self.why)}"


class JobLabelled(JobEvent, frozen=True, kw_only=True):
    """These are all labels that the job has now. The job may have ended long ago."""

    labels: dict[str, str]
    why: str = ""

    def apply(self, state: State) -> None:
        job = state.live(self.job)
        if job is not None:
            job.spec = self._labeled(job.spec)
            weigh(state, job)

    def changed(self, record: Job) -> Job:
        """The store's record of a job that has ended."""
        return msgspec.structs.replace(record, spec=self._labeled(record.spec))

    def _labeled(self, spec: JobSpec) -> JobSpec:
        return msgspec.structs.replace(spec, labels=self.labels)

    def phrase(self) -> str:
        return f"was labeled {self.why}"


class JobNoted(JobEvent, frozen=True, kw_only=True):
    """Somebody wrote a note about the job; an empty one removes all notes."""

    text: str
    who: str = ""

    def apply(self, state: State) -> None:
        job = state.live(self.job)
        if job is not None:
            job.notes = self._noted(job.notes)
            weigh(state, job)

    def changed(self, record: Job) -> Job:
        """The store's record of a job that has ended."""
        return msgspec.structs.replace(record, notes=self._noted(record.notes))

    def _noted(self, notes: tuple[Note, ...]) -> tuple[Note, ...]:
        """The oldest notes make room for new ones; the log still has them."""
        return (*notes, Note(self.at_ms, self.who, self.text))[-NOTES_MAX:] if self.text else ()

    def phrase(self) -> str:
        author = by(self.who)
        return f"has a note{author}: {self.text}" if self.text else f"lost its notes{author}"


class JobWaited(JobEvent, frozen=True, kw_only=True):
    """The job has been waiting for this long, and somebody wants to know."""

    since_ms: int
    waited_ms: int

    def apply(self, state: State) -> None:
        state.jobs[self.job].waited_ms = self.waited_ms

    def phrase(self) -> str:
        return f"has been waiting for {duration_text(self.waited_ms)}"
