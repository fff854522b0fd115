"""The columns of a list of jobs, each declared once: `shoal ps`, its CSV, the API and the page read
this table."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shoal.model.durations import duration_text
from shoal.model.ids import in_order
from shoal.model.job import Job, Phase
from shoal.model.resources import WHOLE_GPU_MILLI, memory_text, plural

if TYPE_CHECKING:
    from shoal.model.array import ArrayCounts
    from shoal.model.views import JobBase, JobRow, ProgressView

NOT_YET = 2**53 - 1  # as a time or an event: later than all that were

Value = str | int | None  # None: there is none, and it comes last
Rank = Callable[[Job, int, int], str | int]


class Kind(enum.StrEnum):
    """How a value is drawn, unless the terminal or the page draws this column in its own way."""

    TEXT = "text"
    NUMBER = "number"
    MOMENT = "moment"  # in milliseconds, as the next one
    DURATION = "duration"


WIDTHS = {
    Kind.TEXT: "minmax(70px, .7fr)",
    Kind.NUMBER: "72px",
    Kind.MOMENT: "92px",
    Kind.DURATION: "76px",
}


class Column(msgspec.Struct, frozen=True):
    """`name`: as people and programs name it; `also`: another name that some of them use. What it
    shows is a field of the row, or `value` of it and the time now. If `of` says it of the job, rows
    carry it in `cells`. `key`: what `shoal ps` sorts by, if that is not the value. `rank`: what the
    API sorts by, of the job, the time now and the number of the event that ended it; `sort`: the
    column that the page sorts by instead. `heading` and `width` are the page's."""

    name: str
    about: str
    kind: Kind = Kind.TEXT
    field: str = ""
    value: Callable[[JobRow, int], Value] | None = None
    of: Callable[[Job], str | int | None] | None = None
    key: Callable[[JobRow], Value] | None = None
    rank: Rank | None = None
    sort: str = ""
    heading: str = ""
    width: str = ""
    also: str = ""

    @property
    def sorts(self) -> bool:
        """Whether the API sorts by it."""
        return self.rank is not None or self.of is not None

    def of_row(self, row: JobRow, now_ms: int) -> Value:
        if self.value is not None:
            return self.value(row, now_ms)
        if self.of is not None:
            return row.cells.get(self.name) if row.cells else None
        shown: Value = getattr(row, self.field or self.name)
        return shown

    def order_of(self, row: JobRow, now_ms: int) -> Value:
        value = self.key(row) if self.key is not None else self.of_row(row, now_ms)
        return None if value == "" else value

    def rank_of(self, job: Job, at_ms: int, end: int) -> str | int:
        if self.rank is not None:
            return self.rank(job, at_ms, end)
        assert self.of is not None, "the caller has looked whether it sorts"
        value = self.of(job)
        return str(value or "").lower() if self.kind is Kind.TEXT else int(value or 0)


def shape_text(row: JobBase) -> str:
    """Members x GPUs per member: '4x8', '2x0.5', '1x20G', '3/2..8x1' (elastic, 3 members now)."""
    members = str(row.members)
    if row.members_max > row.members:
        members = f"{row.size}/" if row.size else ""
        members += f"{row.members}..{row.members_max}"
    gpus = str(row.gpus)
    if row.gpus and row.gpu_milli != WHOLE_GPU_MILLI:
        share = f"{row.gpu_milli / WHOLE_GPU_MILLI:g}" if row.gpu_milli else ""
        gpus = share or memory_text(row.gpu_memory_mb)
    return f"{members}x{gpus}"


def nodes_text(nodes: list[str]) -> str:
    """Up to four names, else three and the number of the others; always one word."""
    return ",".join(nodes) if len(nodes) <= 4 else f"{','.join(nodes[:3])}+{len(nodes) - 3}"


def elapsed_ms(row: JobRow, now_ms: int) -> int:
    """How long the job ran, has been running, or has been waiting."""
    ran = row.running_ms is not None and row.state != "waiting"
    begin = row.running_ms if ran and row.running_ms is not None else row.submitted_ms
    end = row.nap.since_ms if row.nap is not None else now_ms  # sleep is not run time
    return max((row.finished_ms or end) - begin, 0)


def progress_text(progress: ProgressView) -> str:
    """'step 120/600, loss 1.9, 4m 0s left; member 2 is slow', as far as known."""
    of = f"/{progress.steps_total}" if progress.steps_total else ""
    words = [f"step {progress.step}{of}"]
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.3g}")
    if progress.left_ms is not None:
        words.append(f"{duration_text(progress.left_ms)} left")
    slow = progress.slow
    if not slow:
        return ", ".join(words)
    who = f"member {slow[0]} is" if len(slow) == 1 else f"{plural(len(slow), 'member')} are"
    return f"{', '.join(words)}; {who} slow"


def elements_text(counts: ArrayCounts) -> str:
    """For a list: '40/100 done, 8 running, 2 failed'."""
    parts = [f"{counts.ended}/{counts.elements} done"]
    missed = counts.failed + counts.timed_out
    for number, state in (
        (counts.running, "running"),
        (counts.waiting, "waiting"),
        (missed, "failed"),
        (counts.cancelled, "cancelled"),
    ):
        if number:
            parts.append(f"{number} {state}")
    return ", ".join(parts)


def place_of(job_id: str) -> int:
    """Elements follow their array: j7, j7.0, j7.1, j8."""
    number, index = in_order(job_id)
    return number * 10**9 + index + 1


def _gpu_milli(row: JobRow) -> int:
    return (row.size or row.members) * row.gpus * (row.gpu_milli or WHOLE_GPU_MILLI)


def _percent(milli: int | None) -> str | None:
    return None if milli is None else f"{round(milli / 10)}%"


def _how_far(row: JobRow, _: int) -> str:
    if row.array is not None:
        return elements_text(row.array)
    return progress_text(row.progress) if row.progress else ""


def _share(row: JobRow) -> int | None:
    """In billionths; of a job that does not say how many steps there are, next to nothing."""
    if row.array is not None:
        return row.array.ended * 10**9 // max(1, row.array.elements)
    if row.progress is None:
        return None
    return row.progress.step * 10**9 // (row.progress.steps_total or 10**12)


def _labels(row: JobRow, _: int) -> str:
    return ",".join(f"{key}={value}" for key, value in row.labels.items())


def _ran_ms(job: Job, at_ms: int, _: int) -> int:
    ran = job.began_ms is not None and job.phase is not Phase.WAITING
    return (job.finished_ms or at_ms) - (job.began_ms or 0) if ran else 0


def _cluster(job: Job) -> str:
    return job.away.neighbor if job.away is not None else ""


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column(
            "id",
            "its id",
            heading="Job",
            width="minmax(150px, 1.6fr)",
            key=lambda row: place_of(row.id),
            sort="name",
            also="job",
        ),
        Column("name", "its name", rank=lambda job, *_: (job.spec.name or "").lower()),
        Column(
            "state",
            "waiting, running, failed ...",
            width="104px",
            rank=lambda job, *_: job.state,
        ),
        Column(
            "user",
            "who submitted it",
            width="minmax(60px, .6fr)",
            rank=lambda job, *_: job.spec.user.lower(),
        ),
        Column(
            "tenant",
            "its tenant",
            width="minmax(60px, .6fr)",
            rank=lambda job, *_: job.spec.tenant.lower(),
        ),
        Column(
            "shape",
            "members x GPUs of each",
            value=lambda row, _: shape_text(row),
            key=_gpu_milli,
            heading="Size",
            width="84px",
            sort="gpus",
            also="size",
        ),
        Column(
            "gpus",
            "GPUs of all members",
            Kind.NUMBER,
            value=lambda row, _: f"{_gpu_milli(row) / WHOLE_GPU_MILLI:g}",
            key=_gpu_milli,
            rank=lambda job, *_: job.spec.members * job.spec.gpus,
            heading="GPUs",
        ),
        Column(
            "gpu_use",
            "how busy its GPUs are",
            Kind.NUMBER,
            value=lambda row, _: _percent(row.gpu_busy_milli),
            key=lambda row: row.gpu_busy_milli,
            heading="GPU use",
        ),
        Column(
            "gpu_memory",
            "what it has on its GPUs",
            Kind.NUMBER,
            value=lambda row, _: None if row.gpu_used_mb is None else memory_text(row.gpu_used_mb),
            key=lambda row: row.gpu_used_mb,
            heading="GPU memory",
            width="92px",
        ),
        Column(
            "why",
            "why it waits, or is as it is",
            heading="Status",
            width="minmax(140px, 3fr)",
        ),
        Column(
            "progress",
            "steps, loss, time left",
            value=_how_far,
            key=_share,
            width="minmax(140px, 1.5fr)",
        ),
        Column(
            "nodes",
            "where it runs or ran",
            value=lambda row, _: nodes_text(row.nodes),
            width="minmax(70px, .8fr)",
        ),
        Column(
            "cluster",
            "the neighbor that runs or ran it",
            value=lambda row, _: row.away.neighbor if row.away else None,
            rank=lambda job, *_: _cluster(job),
        ),
        Column(
            "time",
            "how long it has run, or waited",
            Kind.DURATION,
            value=elapsed_ms,
            rank=_ran_ms,
            heading="Run time",
        ),
        Column(
            "submitted",
            "when",
            Kind.MOMENT,
            "submitted_ms",
            rank=lambda job, *_: job.number,
        ),
        Column(
            "started",
            "when it last began to run",
            Kind.MOMENT,
            "running_ms",
            rank=lambda job, *_: job.began_ms or NOT_YET,
        ),
        Column("ended", "when", Kind.MOMENT, "finished_ms", rank=lambda _, __, end: end),
        Column(
            "try",
            "attempts",
            Kind.NUMBER,
            "attempt",
            rank=lambda job, *_: job.attempt,
            heading="Attempts",
            width="64px",
            sort="attempts",
            also="attempts",
        ),
        Column("priority", "its priority", Kind.NUMBER, rank=lambda job, *_: job.spec.priority),
        Column("code", "exit code", Kind.NUMBER, heading="Exit code"),
        Column("service", "the service that it is a replica of"),
        Column("labels", "its labels", value=_labels, width="minmax(90px, 1fr)"),
        Column("command", "its command", width="minmax(120px, 2fr)"),
    )
}


def column_of(name: str) -> Column | None:
    """The column that somebody named."""
    named = COLUMNS.get(name)
    return named or next((one for one in COLUMNS.values() if name and name == one.also), None)


def cells_of(job: Job) -> dict[str, str | int | None] | msgspec.UnsetType:
    """The values of columns that no field of a row holds."""
    return {one.name: one.of(job) for one in COLUMNS.values() if one.of} or msgspec.UNSET
