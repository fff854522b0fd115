"""Finding finished jobs and moments in the store, without decoding what cannot be meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from shoal.control.store.rows import JobRow, encode, job_row
from shoal.model.annotations import job_after
from shoal.model.events import Event, JobLabelled, JobNoted
from shoal.model.finding import ENDED, JobFilter
from shoal.model.job import Job
from shoal.model.labels import term_of

ROWS_AT_ONCE = 500
NO_ELEMENT = "id NOT LIKE '%.%'"
OF_ARRAY = "id >= ? AND id < ?"  # between "j7." and "j7/": text is compared by its bytes

ReadJobs = Callable[[str, tuple[object, ...]], list[tuple[int, int, Job | None]]]


def find_jobs(
    read: ReadJobs,
    contains: str,
    limit: int,
    after: int,
    before: tuple[int, int] | None,
    wanted: JobFilter,
) -> list[Job]:
    """The last to end first; only those that ended after the event `after`, and before the job that
    has this end and this number. Elements are left out, unless `wanted.array` is named. `contains`:
    how the database says it."""
    parts = _parts(wanted)
    found: list[Job] = []
    place = before or (2**63 - 1, 2**63 - 1)
    while len(found) < limit:
        where = [
            "ended > ?",
            "(ended, number) < (?, ?)",
            OF_ARRAY if wanted.array else NO_ELEMENT,
        ]
        where += [contains.format(column="body") for _ in parts]
        many = ROWS_AT_ONCE if wanted.given else limit - len(found)
        query = f"WHERE {' AND '.join(where)} ORDER BY ended DESC, number DESC LIMIT ?"
        named = (f"{wanted.array}.", f"{wanted.array}/") if wanted.array else ()
        rows = read(query, (after, *place, *named, *parts, many))
        for number, ended, job in rows:
            place = (ended, number)
            if job is None:
                continue
            if job.finished_ms is not None and job.finished_ms < wanted.since_ms:
                return found  # and so did all that ended before it
            if wanted.matches(job):
                found.append(job)
                if len(found) == limit:
                    return found
        if len(rows) < many:
            return found
    return found


def _parts(wanted: JobFilter) -> list[bytes]:
    """Bytes that the record of such a job contains; others may contain them, too."""
    parts = []
    if wanted.tenant:
        parts.append(b'"tenant":%s' % encode(wanted.tenant))
    if wanted.user:
        parts.append(b'"user":%s' % encode(wanted.user))
    if wanted.node:
        parts.append(b'"node":%s' % encode(wanted.node))
    outcomes = [state for state in wanted.states if state in ENDED]
    if len(wanted.states) == 1 and outcomes:
        parts.append(b'"outcome":%s' % encode(outcomes[0]))
    for condition in wanted.labels:
        term = term_of(condition)
        if term.holds:
            value = encode(term.values[0]) if len(term.values) == 1 else b""
            parts.append(b"%s:%s" % (encode(term.key), value))
    if wanted.name:
        literal = max(re.split(r"\*|\?|\[[^\]]*\]?", wanted.name), key=len)
        parts += [encode(literal)[1:-1]] if literal else []
    return parts


def seq_at(at_ms: int, last: int, time_of: Callable[[int], int | None]) -> int:
    """The last event before this time: their times never decrease. `time_of` gives the time of the
    first event from that number on; None: there is none."""
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        time_ms = time_of(middle)
        if time_ms is not None and time_ms < at_ms:
            low = middle
        else:
            high = middle - 1
    return low


def annotated(
    events: Sequence[Event], now: set[str], read: Callable[[str], Job | None]
) -> list[JobRow]:
    """The records of jobs that ended earlier, not `now`, and are labelled or noted now."""
    found: dict[str, Job] = {}
    for event in events:
        if isinstance(event, JobLabelled | JobNoted) and event.job not in now:
            job = found.get(event.job) or read(event.job)
            if job is not None:
                found[event.job] = job_after(job, event)
    return [job_row(job) for job in found.values()]
