"""What Slurm's accounting prints: sacct -a -P -X -o JobID,User,Submit,Start,ElapsedRaw,...

Needed: JobID, Submit, and ElapsedRaw (or Elapsed, or Start and End). GPUs come from AllocTRES or
ReqTRES (gres/gpu=N), CPUs and memory, too; members are the NNodes. Steps (12.batch) are left out,
and so are jobs that never started. Slurm's priorities are of its own making and are not taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from shoal.model.job import TIME_MS_MAX
from shoal.sim.replay.readers.rows import Row, Rows
from shoal.sim.replay.traces import Arrival, Gangs

NEEDED = ("JobID", "Submit")
LENGTH = ("ElapsedRaw", "Elapsed", "End")
UNKNOWN = ("", "Unknown", "None", "N/A")
FAILED_STATES = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}

_CLOCK = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})(?:\.\d+)?")
_AMOUNT = re.compile(r"([0-9.]+)([KMGT]?)")


def fits(columns: frozenset[str]) -> bool:
    return columns.issuperset(NEEDED)


def read(rows: Rows, gangs: Gangs) -> Iterator[Arrival | None]:
    rows.need(*NEEDED)
    if not any(name in rows.index for name in LENGTH):
        rows.need("ElapsedRaw")
    for row in rows:
        if "." not in row.text("JobID"):
            yield _arrival(row, gangs)


def _arrival(row: Row, gangs: Gangs) -> Arrival | None:
    work_ms = elapsed_ms(row)
    if work_ms is None:
        return None
    tres = tres_of(row)
    nodes = max(row.whole("NNodes", 1), 1)
    gpus = gpus_of(row, tres)
    members = nodes if gpus % nodes == 0 else 0
    tenant = row.text("Account") or row.text("User")
    spec = gangs.spec(
        gpus,
        members=members,
        cpu_milli=round(amount_of(row, tres.get("cpu", "1")) * 1000 / max(members, 1)),
        memory_mb=round(amount_of(row, tres.get("mem", "0")) / max(members, 1)),
        time_limit_ms=_limit_ms(row),
        tenant=tenant,
    )
    state = row.text("State").partition(" ")[0]
    return Arrival(
        submit_ms=moment_ms(row, "Submit"),
        work_ms=work_ms,
        spec=spec,
        row=row.number,
        tenant=tenant,
        exit_code=1 if state in FAILED_STATES else 0,
    )


def elapsed_ms(row: Row) -> int | None:
    """How long it ran; None if it never did."""
    if "Start" in row.columns and row.text("Start") in UNKNOWN:
        return None
    if row.text("ElapsedRaw"):
        return row.seconds("ElapsedRaw")
    if row.text("Elapsed"):
        return _clock_ms(row, "Elapsed")
    if row.text("Start") in UNKNOWN or row.text("End") in UNKNOWN:
        return None
    work_ms = moment_ms(row, "End") - moment_ms(row, "Start")
    if work_ms < 0:
        raise row.problem("End: is before Start")
    return work_ms


def moment_ms(row: Row, column: str) -> int:
    text = row.text(column)
    if text.isdigit():  # SLURM_TIME_FORMAT=%s
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise row.problem(
            f"{column}: '{text[:40]}' is not a time like 2025-01-31T12:00:00"
        ) from None
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _clock_ms(row: Row, column: str) -> int:
    """[days-][hours:]minutes:seconds"""
    match = _CLOCK.fullmatch(row.text(column))
    if match is None:
        raise row.problem(f"{column}: '{row.text(column)[:40]}' is not a time like 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000


def _limit_ms(row: Row) -> int:
    """0 is none; limits like UNLIMITED and Partition_Limit are none to us."""
    text = row.text("Timelimit")
    if not text[:1].isdigit():
        return 0
    if text.isdigit():
        return min(int(text) * 60_000, TIME_MS_MAX)
    return min(_clock_ms(row, "Timelimit"), TIME_MS_MAX)


def tres_of(row: Row) -> dict[str, str]:
    text = row.text("AllocTRES") or row.text("ReqTRES")
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def gpus_of(row: Row, tres: dict[str, str]) -> int:
    if "gres/gpu" in tres:
        return _count(row, tres["gres/gpu"])
    return sum(_count(row, n) for name, n in tres.items() if name.startswith("gres/gpu:"))


def _count(row: Row, text: str) -> int:
    if not text.isdigit():
        raise row.problem(f"TRES: gres/gpu={text[:40]} is not a number of GPUs")
    return int(text)


def amount_of(row: Row, text: str) -> float:
    match = _AMOUNT.fullmatch(text.rstrip("nc"))
    try:
        if match is not None:
            return float(match[1]) * MEGABYTES.get(match[2], 1.0)
    except ValueError:
        pass
    raise row.problem(f"TRES: '{text[:40]}' is not an amount like 64G")
