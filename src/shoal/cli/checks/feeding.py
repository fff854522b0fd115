"""Whether a storage feeds a job: its data, and its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

import msgspec

from shoal.forms.failure import USAGE, Failure
from shoal.forms.units import BadAmount, duration_ms
from shoal.model.durations import duration_text
from shoal.model.fabric import amount_text, rate_text
from shoal.model.resources import plural
from shoal.model.storage import Rates, StorageView

WAIT_PERCENT_MAX = 5  # of a job's time may go into waiting for saves
WEAK_PART = 2  # a node with less than half of the median alone is weak
NODES_MIN = 3  # that a median is taken of
NAMED_MAX = 5
_AMOUNT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([kmgtp])i?b(/s)?", re.IGNORECASE)
_MB = {"k": 0.001, "m": 1.0, "g": 1_000.0, "t": 1e6, "p": 1e9}


class Needs(msgspec.Struct, kw_only=True):
    """What a job wants of its storage; 0: not known."""

    read_mbs: float = 0
    checkpoint_mb: float = 0
    every_ms: int = 0
    notes: list[str] = []


class Finding(msgspec.Struct, frozen=True):
    text: str
    ok: bool


def rate(flag: str, text: str) -> float:
    """In MB/s, from 2GB/s."""
    found = _AMOUNT.fullmatch(text.strip())
    if text and (found is None or not found[3] or not float(found[1])):
        raise Failure(f"{flag}: {text[:40]!r} is not a rate; write e.g. 500MB/s or 2GB/s", USAGE)
    return float(found[1]) * _MB[found[2].lower()] if found else 0


def size(flag: str, text: str) -> float:
    """In MB, from 500GB."""
    found = _AMOUNT.fullmatch(text.strip())
    if text and (found is None or found[3] or not float(found[1])):
        raise Failure(f"{flag}: {text[:40]!r} is not a size; write e.g. 500GB or 1.5TB", USAGE)
    return float(found[1]) * _MB[found[2].lower()] if found else 0


def interval(flag: str, text: str) -> int:
    try:
        found = duration_ms(text.replace("min", "m")) if text else 0
    except BadAmount as error:
        raise Failure(f"{flag}: {error}", USAGE) from None
    if text and not found:
        raise Failure(f"{flag}: must be more than 0", USAGE)
    return found


def findings(view: StorageView, needs: Needs) -> list[Finding]:
    """What does not work first, then what follows for a job."""
    by_problem: dict[str, list[str]] = {}
    for one in view.together or view.alone:
        if one.problem:
            by_problem.setdefault(one.problem, []).append(one.node)
    found = [
        Finding(f"{listed(nodes)}: {problem}", ok=False) for problem, nodes in by_problem.items()
    ]
    good = [one for one in view.together if not one.problem]
    if not good:
        return found
    found += _weak(view.alone, "alone") + _weak(good, "beside the others")
    write = sum(one.write_mbs for one in good)
    read = sum(one.read_mbs for one in good)
    who = f"together {len(good)} nodes" if len(good) > 1 else good[0].node
    verb = "" if len(good) > 1 else "s"
    if needs.read_mbs:
        found.append(_reading(f"{who} read{verb}", read, needs))
    if needs.checkpoint_mb:
        found.append(_saving(f"{who} write{verb}", write, needs))
    return found


def listed(nodes: Sequence[str]) -> str:
    """One sentence for all nodes that share it."""
    more = len(nodes) - NAMED_MAX
    names = ", ".join(nodes[:NAMED_MAX])
    return f"{names} and {more} more" if more > 0 else names


def _weak(rates: Sequence[Rates], how: str) -> list[Finding]:
    found = []
    good = [one for one in rates if not one.problem]
    if len(good) < NODES_MIN:
        return []
    for verb, field in (("writes", "write_mbs"), ("reads", "read_mbs")):
        usual = median(getattr(one, field) for one in good)
        found += [
            Finding(
                f"{one.node}: {verb} {rate_text(getattr(one, field))} {how}, where "
                f"{rate_text(usual)} is usual",
                ok=False,
            )
            for one in good
            if getattr(one, field) * WEAK_PART < usual
        ]
    return found


def _reading(who: str, read_mbs: int, needs: Needs) -> Finding:
    text = f"{who} {rate_text(read_mbs)}; the job needs {rate_text(needs.read_mbs)}"
    if read_mbs >= needs.read_mbs:
        return Finding(f"{text}: that is enough", ok=True)
    return Finding(f"{text}: it would run at {_percent(read_mbs / needs.read_mbs)}", ok=False)


def _saving(who: str, write_mbs: int, needs: Needs) -> Finding:
    """A job that waits for its saves loses the time of a save after each interval."""
    text, mb = f"{who} {rate_text(write_mbs)}", needs.checkpoint_mb
    if not write_mbs:
        return Finding(f"{text}: a checkpoint of {amount_text(mb)} would never end", ok=False)
    took_s = mb / write_mbs
    text += f": a checkpoint of {amount_text(mb)} takes {duration_text(round(took_s * 1000))}"
    if not needs.every_ms:
        return Finding(text, ok=True)
    every_s = needs.every_ms / 1000
    share = took_s / (took_s + every_s)
    text += (
        f"; with one every {duration_text(needs.every_ms)}, a job that waits for its saves "
        f"would wait {_percent(share)} of the time"
    )
    if share * 100 <= WAIT_PERCENT_MAX:
        return Finding(text, ok=True)
    part = WAIT_PERCENT_MAX / (100 - WAIT_PERCENT_MAX)
    text += f"; for {WAIT_PERCENT_MAX} %, {rate_text(mb / (every_s * part))} are needed"
    if took_s > every_s:
        text += f"; to save in the background, {rate_text(mb / every_s)}"
    return Finding(text, ok=False)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.01 else "less than 1 %"


def summary(view: StorageView) -> str:
    good = [one for one in view.together if not one.problem]
    if len(good) < 2:
        return ""
    return (
        f"together {plural(len(good), 'node')} write {rate_text(sum(o.write_mbs for o in good))}, "
        f"read {rate_text(sum(o.read_mbs for o in good))}, and handle "
        f"{sum(o.small_per_s for o in good)} small files a second"
    )
