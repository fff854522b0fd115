"""What happened to a job, as one page of text."""

from __future__ import annotations

import datetime
import textwrap

from shoal.cli.screen.words import bound_lines, state_text
from shoal.model.durations import duration_text
from shoal.model.explanation import (
    FAILURES,
    AttemptRecord,
    Cause,
    Explanation,
    FirstFailure,
    Learned,
)
from shoal.model.job import Note
from shoal.model.ledger import CostView
from shoal.model.neighbor import PRICE_UNIT
from shoal.model.phrases import began_text, exit_text, printable, shortened
from shoal.model.resources import plural

WIDTH = 88
INDENT = 4
ATTEMPTS_FIRST, ATTEMPTS_LAST = 3, 5  # shown of a job with many attempts
LEARNED_MAX = 8
NODES_NAMED_MAX = 6
GPU_HOUR_US = 3_600_000_000

# Advice for causes that have a usual remedy.
ADVICE = {
    Cause.OUT_OF_MEMORY: "try a smaller batch, GPUs with more memory, or a larger --memory",
    Cause.TIME_LIMIT: "try a larger --time-limit, or save checkpoints to continue from",
    Cause.HANG: "its log has the stacks of the members that hung: shoal logs",
}


def page(
    explanation: Explanation, zone: datetime.tzinfo | None = None, cost: CostView | None = None
) -> list[str]:
    """Lines of at most WIDTH characters, except the job's own output."""
    lines = [*_head(explanation, zone), ""]
    said: list[str] = []
    for attempt in _chosen(explanation.attempts):
        if attempt is None:
            lines += [
                f"({len(explanation.attempts) - ATTEMPTS_FIRST - ATTEMPTS_LAST} more like these)",
                "",
            ]
        else:
            lines += [*_attempt(explanation, attempt, said, zone), ""]
            said = attempt.first.lines if attempt.first is not None else []
    if explanation.learned:
        lines += ["What was learned about its nodes", *_learned(explanation.learned, zone), ""]
    lines += ["What it cost", *_cost(cost), *_money(cost)]
    return lines


def _head(explanation: Explanation, zone: datetime.tzinfo | None) -> list[str]:
    label = f"{explanation.id} ({explanation.name})" if explanation.name else explanation.id
    why = f": {explanation.why}" if explanation.why else ""
    lines = _wrapped(f"{label} {state_text(explanation.state)}{why}", 0)
    shape = plural(explanation.members, "member")
    when = _moment(explanation.submitted_ms, zone)
    lines += _wrapped(
        f"submitted {when} for {explanation.tenant}, {shape}: {explanation.command}", 0
    )
    first = explanation.attempts[0].placed_ms if explanation.attempts else None
    end_ms = explanation.finished_ms if explanation.finished_ms is not None else explanation.now_ms
    waited = duration_text((first if first is not None else end_ms) - explanation.submitted_ms)
    whole = duration_text(end_ms - explanation.submitted_ms)
    tries = plural(len(explanation.attempts), "attempt")
    lines.append(f"waited {waited} for its first start; {whole} since submission, {tries}")
    lines += annotation_lines(explanation.labels, explanation.notes)
    if not explanation.complete:
        lines.append("its first events are no longer kept, so the beginning is missing")
    return lines


def _chosen(attempts: list[AttemptRecord]) -> list[AttemptRecord | None]:
    if len(attempts) <= ATTEMPTS_FIRST + ATTEMPTS_LAST + 1:
        return list(attempts)
    return [*attempts[:ATTEMPTS_FIRST], None, *attempts[-ATTEMPTS_LAST:]]


def _attempt(
    explanation: Explanation, one: AttemptRecord, said: list[str], zone: datetime.tzinfo | None
) -> list[str]:
    """`said`: the last lines of the previous attempt, which are not repeated."""
    nodes = f"at {one.cluster}" if one.cluster else f"on {', '.join(one.nodes[:NODES_NAMED_MAX])}"
    if len(one.nodes) > NODES_NAMED_MAX:
        nodes += f" and {len(one.nodes) - NODES_NAMED_MAX} more"
    ended_ms = one.ended_ms if one.ended_ms is not None else explanation.now_ms
    if one.running_ms is None:
        ran = f"never ran, {duration_text(ended_ms - one.placed_ms)}"
    else:
        slept_ms = one.slept_ms + (ended_ms - one.dozed_ms if one.dozed_ms is not None else 0)
        ran = f"ran {duration_text(ended_ms - one.running_ms - slept_ms)}"
        if one.startup_by:
            ran += f" ({began_text(one.startup_ms, one.startup_by)})"
        if one.naps:
            ran += f", slept {duration_text(slept_ms)} ({plural(one.naps, 'nap')})"
    cause = one.cause.value if one.sure else f"{one.cause.value} (probably)"
    head = f"Attempt {one.attempt}, {_moment(one.placed_ms, zone)}, {nodes}: {ran}, {cause}"
    lines = [*_wrapped(head, 0), *_cold(one)]
    if one.why and one.cause is not Cause.SUCCEEDED:
        lines += _wrapped(one.why, INDENT)
    if one.owed_gpu_ms:
        owed = one.owed_money / PRICE_UNIT
        money = f", {owed:,.2f} of its currency" if owed else ""
        used = f"{_gpu_time(one.owed_gpu_ms * 1000)}{money}"
        lines += _wrapped(f"owed to {one.cluster}: {used}", INDENT)
    if one.evidence:
        lines += _wrapped(f"because {one.evidence}", INDENT)
    if one.first is not None and one.cause in FAILURES:
        lines += _first(explanation, one, one.first, said)
    lines += _steps(one)
    for text in bound_lines(one.bound):
        lines += _wrapped(text, INDENT)
    if one.cause in ADVICE and one.attempt == explanation.attempts[-1].attempt:
        lines += _wrapped(ADVICE[one.cause], INDENT)
    return lines


def _cold(one: AttemptRecord) -> list[str]:
    """Where the seconds of a replica's start went. Of a start that is not over, as far as known."""
    cold, ran_ms = one.cold, one.running_ms
    if cold is None:
        return []
    got = cold.got_ms or {}
    prepared_ms = _between(one.placed_ms, ran_ms)
    others_ms = prepared_ms - sum(got.values()) if prepared_ms is not None else None
    rows = [
        ("waiting for room", cold.waited_ms),
        *([("image and volumes", None)] if cold.got_ms is None else got.items()),
        ("starting its process" if got else "preparing and starting its process", others_ms),
        ("until it listened on its port", _between(ran_ms, cold.listened_ms)),
        ("until its probe was answered", _between(cold.listened_ms or ran_ms, cold.ready_ms)),
        ("until the gateway served it", _between(cold.ready_ms, cold.served_ms)),
        ("until the first token of its first answer", cold.first_token_ms),
    ]
    known = [(what, ms) for what, ms in rows if ms is not None or cold.ready_ms is not None]
    texts = [(duration_text(ms) if ms is not None else "not measured", what) for what, ms in known]
    lines = [" " * INDENT + f"{text:>12}  {what}" for text, what in texts]
    return [" " * INDENT + "its start:", *lines] if lines else []


def _between(from_ms: int | None, to_ms: int | None) -> int | None:
    return to_ms - from_ms if from_ms is not None and to_ms is not None else None


def _first(
    explanation: Explanation, one: AttemptRecord, first: FirstFailure, said: list[str]
) -> list[str]:
    how = exit_text(first.code) if first.code is not None else "no exit code"
    at = f" in step {first.step}" if first.step is not None else ""
    lines = []
    if one.members > 1 or first.code is not None:
        lines = _wrapped(f"member {first.member} on {first.node} failed first: {how}{at}", INDENT)
    if first.lines and first.lines == said:
        lines.append(" " * INDENT + "its last lines were the same as in the previous attempt")
    elif first.lines:
        lines.append(" " * INDENT + "its last lines:")
        lines += [" " * INDENT + f"| {printable(shortened(line, 200))}" for line in first.lines]
        member = f" --member {first.member}" if explanation.members > 1 else ""
        lines.append(
            " " * INDENT + f"full log: shoal logs {explanation.id} --attempt {one.attempt}{member}"
        )
    return lines


def _steps(one: AttemptRecord) -> list[str]:
    if one.to_step is None and one.saved_step is None:
        return []
    text = f"it ran from step {one.from_step} to {one.to_step or one.saved_step}"
    if one.saved_step is not None:
        text += f", saved up to {one.saved_step}"
    elif one.cause is not Cause.SUCCEEDED:
        text += ", saved nothing"
    again = (one.to_step or 0) - (one.saved_step if one.saved_step is not None else one.from_step)
    if one.cause in FAILURES and again > 0:  # a job that is asked to stop may still save
        text += f": {plural(again, 'step')} of work lost"
    return _wrapped(text, INDENT)


def _learned(learned: list[Learned], zone: datetime.tzinfo | None) -> list[str]:
    ours = [one for one in learned if one.about_this_job]
    lines: list[str] = []
    for one in (ours or learned)[-LEARNED_MAX:]:
        because = " because of this job" if one.about_this_job else ""
        text = f"{_moment(one.at_ms, zone)}  {one.node} became {one.standing}{because}: {one.why}"
        lines += _wrapped(text, INDENT)
    return lines


def _cost(cost: CostView | None) -> list[str]:
    """The ledger's sums, with the account names of `shoal report`."""
    if cost is None:
        return [" " * INDENT + "unknown: this cluster keeps no ledger"]
    if not cost.gpu_us:
        return [" " * INDENT + "no GPU time here"]
    lines = [f"{_gpu_time(cost.gpu_us)} in total"]
    if len(cost.accounts) > 1 or any(one.group != "used" for one in cost.accounts):
        for one in sorted(cost.accounts, key=lambda one: -one.gpu_us):
            share = 100 * one.gpu_us / cost.gpu_us
            lines.append(f"  {_gpu_time(one.gpu_us)} ({share:.0f} %) {one.title.lower()}")
    if cost.slept_ms:
        lent = f"slept {duration_text(cost.slept_ms)}, and lent out {_gpu_time(cost.lent_gpu_us)}"
        lines.append(f"{lent} by that, which are not part of the total")
    return [" " * INDENT + line for line in lines]


def _money(cost: CostView | None) -> list[str]:
    """From the price list, if there is one."""
    if cost is None:
        return []
    parts = []
    if cost.cost is not None and cost.currency:
        parts.append(f"{cost.cost:,.2f} {cost.currency}")
    if cost.energy_wh:
        parts.append(f"{cost.energy_wh / 1000:.3g} kWh")
    if cost.co2_g:
        parts.append(f"{cost.co2_g / 1000:.3g} kg of CO2")
    return [" " * INDENT + ", ".join(parts)] if parts else []


def _gpu_time(gpu_us: int) -> str:
    if gpu_us < GPU_HOUR_US // 10:
        return f"{gpu_us / 1_000_000:.0f} GPU-seconds"
    return f"{gpu_us / GPU_HOUR_US:.2f} GPU-hours"


def _moment(at_ms: int, zone: datetime.tzinfo | None) -> str:
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, tz=datetime.UTC).astimezone(zone)
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


# A job's labels and its newest note, each on one line.


NOTE_WIDTH = 86


def annotation_lines(labels: dict[str, str], notes: list[Note]) -> list[str]:
    lines = []
    if labels:
        words = (f"{key}={value}" if value else key for key, value in labels.items())
        lines.append(shortened(f"labels: {', '.join(words)}", NOTE_WIDTH))
    if notes:
        newest = notes[-1]
        text = f"note by {newest.who}: " if newest.who else "note: "
        more = f" ({plural(len(notes) - 1, 'older note')})" if len(notes) > 1 else ""
        said = printable(text + " ".join(newest.text.split()))
        lines.append(shortened(said, NOTE_WIDTH - len(more)) + more)
    return lines
