"""What happened to a job, as one page of text."""

from __future__ import annotations

import datetime
import textwrap

from shoal.cli.show import printable
from shoal.cli.units import duration_text, shortened
from shoal.cli.words import exit_text, state_text
from shoal.model.ledger import CostView
from shoal.model.resources import plural
from shoal.model.story import FAILURES, AttemptStory, Cause, FirstFailure, Learned, Story

WIDTH = 88
INDENT = 4
ATTEMPTS_FIRST, ATTEMPTS_LAST = 3, 5  # of a long story, its beginning and its end
LEARNED_MAX = 8
NODES_NAMED_MAX = 6
GPU_HOUR_US = 3_600_000_000

# What would help, where that is known in general.
ADVICE = {
    Cause.OUT_OF_MEMORY: "a smaller batch, or GPUs or a --memory that are larger, would help",
    Cause.TIME_LIMIT: "a larger --time-limit, or checkpoints to go on from, would help",
    Cause.HANG: "its log has the stacks of those who stood still: shoal logs",
}


def page(
    story: Story, zone: datetime.tzinfo | None = None, cost: CostView | None = None
) -> list[str]:
    """Lines of at most WIDTH characters, but for what the job itself printed."""
    lines = [*_head(story, zone), ""]
    said: list[str] = []
    for attempt in _chosen(story.attempts):
        if attempt is None:
            lines += [
                f"({len(story.attempts) - ATTEMPTS_FIRST - ATTEMPTS_LAST} more like these)",
                "",
            ]
        else:
            lines += [*_attempt(story, attempt, said, zone), ""]
            said = attempt.first.lines if attempt.first is not None else []
    if story.learned:
        lines += ["What was learned of its nodes", *_learned(story.learned, zone), ""]
    lines += ["What it cost", *_cost(cost), *_money(cost)]
    return lines


def _head(story: Story, zone: datetime.tzinfo | None) -> list[str]:
    label = f"{story.id} ({story.name})" if story.name else story.id
    why = f": {story.why}" if story.why else ""
    lines = _wrapped(f"{label} {state_text(story.state)}{why}", 0)
    shape = plural(story.members, "member")
    when = _moment(story.submitted_ms, zone)
    lines += _wrapped(f"submitted {when} for {story.tenant}, {shape}: {story.command}", 0)
    first = story.attempts[0].placed_ms if story.attempts else None
    end_ms = story.finished_ms if story.finished_ms is not None else story.now_ms
    waited = duration_text((first if first is not None else end_ms) - story.submitted_ms)
    whole = duration_text(end_ms - story.submitted_ms)
    tries = plural(len(story.attempts), "attempt")
    lines.append(f"waited {waited} for its first start; {whole} from submission on, {tries}")
    if not story.complete:
        lines.append("its first events are no longer kept, so this begins in the middle")
    return lines


def _chosen(attempts: list[AttemptStory]) -> list[AttemptStory | None]:
    if len(attempts) <= ATTEMPTS_FIRST + ATTEMPTS_LAST + 1:
        return list(attempts)
    return [*attempts[:ATTEMPTS_FIRST], None, *attempts[-ATTEMPTS_LAST:]]


def _attempt(
    story: Story, one: AttemptStory, said: list[str], zone: datetime.tzinfo | None
) -> list[str]:
    """`said`: the last lines of the attempt before, which need not be told again."""
    nodes = ", ".join(one.nodes[:NODES_NAMED_MAX])
    if len(one.nodes) > NODES_NAMED_MAX:
        nodes += f" and {len(one.nodes) - NODES_NAMED_MAX} more"
    ended_ms = one.ended_ms if one.ended_ms is not None else story.now_ms
    if one.running_ms is None:
        ran = f"never got to run, {duration_text(ended_ms - one.placed_ms)}"
    else:
        ran = f"ran {duration_text(ended_ms - one.running_ms)}"
    cause = one.cause.value if one.sure else f"{one.cause.value} (probably)"
    head = f"Attempt {one.attempt}, {_moment(one.placed_ms, zone)}, on {nodes}: {ran}, {cause}"
    lines = _wrapped(head, 0)
    if one.why and one.cause is not Cause.SUCCEEDED:
        lines += _wrapped(one.why, INDENT)
    if one.evidence:
        lines += _wrapped(f"because {one.evidence}", INDENT)
    if one.first is not None and one.cause in FAILURES:
        lines += _first(story, one, one.first, said)
    lines += _steps(one)
    if one.cause in ADVICE and one.attempt == story.attempts[-1].attempt:
        lines += _wrapped(ADVICE[one.cause], INDENT)
    return lines


def _first(story: Story, one: AttemptStory, first: FirstFailure, said: list[str]) -> list[str]:
    how = exit_text(first.code) if first.code is not None else "no exit code"
    at = f" in step {first.step}" if first.step is not None else ""
    lines = []
    if one.members > 1 or first.code is not None:
        lines = _wrapped(f"member {first.member} on {first.node} was first: {how}{at}", INDENT)
    if first.lines and first.lines == said:
        lines.append(" " * INDENT + "its last lines were the same as before")
    elif first.lines:
        lines.append(" " * INDENT + "the last that it wrote:")
        lines += [" " * INDENT + f"| {printable(shortened(line, 200))}" for line in first.lines]
        member = f" --member {first.member}" if story.members > 1 else ""
        lines.append(
            " " * INDENT + f"all of it: shoal logs {story.id} --attempt {one.attempt}{member}"
        )
    return lines


def _steps(one: AttemptStory) -> list[str]:
    if one.to_step is None and one.saved_step is None:
        return []
    text = f"it went from step {one.from_step} to {one.to_step or one.saved_step}"
    if one.saved_step is not None:
        text += f", saved up to {one.saved_step}"
    elif one.cause is not Cause.SUCCEEDED:
        text += ", and saved nothing"
    again = (one.to_step or 0) - (one.saved_step if one.saved_step is not None else one.from_step)
    if one.cause in FAILURES and again > 0:  # who is asked to stop may save on its way out
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
    """The ledger's own sums, in the words of `shoal report`."""
    if cost is None:
        return [" " * INDENT + "not known: no ledger is kept here"]
    if not cost.gpu_us:
        return [" " * INDENT + "no GPU time"]
    lines = [f"{_gpu_time(cost.gpu_us)} in all"]
    if len(cost.accounts) > 1 or any(one.group != "used" for one in cost.accounts):
        for one in sorted(cost.accounts, key=lambda one: -one.gpu_us):
            share = 100 * one.gpu_us / cost.gpu_us
            lines.append(f"  {_gpu_time(one.gpu_us)} ({share:.0f} %) {one.title}")
    return [" " * INDENT + line for line in lines]


def _money(cost: CostView | None) -> list[str]:
    """By the ledger's price list, if there is one."""
    if cost is None:
        return []
    parts = []
    if cost.cost is not None:
        parts.append(f"{cost.cost:,.2f} {cost.currency}".strip())
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
