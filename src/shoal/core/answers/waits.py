"""What the waiting jobs wait for, in counts: a queue of thousands in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.core.answers.why import Reason, Waits, reason_of
from shoal.core.state.gpu_caps import capped_by
from shoal.core.state.state import State
from shoal.model.policy import Policy
from shoal.model.reason import tenant_part
from shoal.model.resources import plural

# Jobs of one lane wait for the same reason. At most this many lanes are read, the longest first.
LANES_LOOKED = 24
LINES_MAX = 6


class Group:
    """Jobs that wait for the same. `like`: some are only like one whose reason it is, and were not
    looked at themselves. `lines`: their numbers, to be read before the next step. `kind` is a
    name of `Waits`, empty for other reasons; `detail`: for whom or for what."""

    def __init__(self, what: str, kind: str, detail: str) -> None:
        self.what, self.like, self.count = what, False, 0
        self.kind, self.detail = kind, detail
        self.lines: list[Iterable[int]] = []


Why = tuple[str, str, str]  # what they wait for in words, its kind, and the detail
OTHERS = "for other reasons: shoal why JOB"


def groups_of(state: State, policy: Policy, now_ms: int, tenant: str = "") -> list[Group]:
    """All waiting jobs by what they wait for, most jobs first; `tenant`: its own only."""
    queue, of_number = state.queue, state.job_numbered
    found: dict[str, Group] = {}

    def add(why: Why, numbers: Iterable[int], count: int, like: bool = False) -> None:
        if count:
            group = found.setdefault(why[0], Group(*why))
            group.like, group.count = group.like or like, group.count + count
            group.lines.append(numbers)

    def told(kind: Waits, numbers: Sequence[int]) -> None:
        add((kind.value, kind.name.lower(), ""), numbers, len(numbers))

    def own(numbers: Iterable[int]) -> list[int]:
        return [one for one in numbers if tenant in ("", of_number(one).spec.tenant)]

    budgets: dict[str, list[int]] = {}
    for number in own(queue.held):
        payer = state.accounts.held_by(of_number(number).spec.tenant)
        budgets.setdefault(payer, []).append(number)
    for payer, numbers in budgets.items():
        name = tenant_part(payer)
        add((f"for the budget of {name}", Waits.BUDGET.name.lower(), name), numbers, len(numbers))
    for lane, line in queue.capped.items():
        if tenant in ("", lane.tenant):
            name = tenant_part(capped_by(state, lane.tenant, lane.gang.gpu_milli))
            why = (f"{Waits.CAP.value} {name}", Waits.CAP.name.lower(), name)
            add(why, [number for _, number in line], len(line))
    delayed = own(number for _, number in sorted(queue.delayed))
    told(Waits.RETRY, [number for number in delayed if of_number(number).attempt])
    told(Waits.BEGIN, [number for number in delayed if not of_number(number).attempt])
    told(Waits.AFTER, own(queue.parked))
    told(Waits.NEIGHBOR, own(queue.outbound))
    claims = dict.fromkeys(state.jobs[job_id].number for job_id in state.claims)
    told(Waits.CLAIM, own(sorted(claims)))
    claimed = Counter(queue.lane[number] for number in claims if number in queue.lane)
    lanes = [(lane, line) for lane, line in queue.lanes.items() if tenant in ("", lane.tenant)]
    lanes.sort(key=lambda one: len(one[1]), reverse=True)
    for at, (lane, line) in enumerate(lanes):
        why, count = (OTHERS, "", ""), len(line) - claimed[lane]
        if at < LANES_LOOKED:
            why = _what(reason_of(state, of_number(line[0][1]), policy, now_ms))
        add(why, _unclaimed(line, claims), count, like=count > 1 or at >= LANES_LOOKED)
    return sorted(found.values(), key=lambda group: (group.what == OTHERS, -group.count))


def waits_of(state: State, policy: Policy, now_ms: int, tenant: str = "") -> list[str]:
    """'412 jobs wait for j43, which is ahead of them', most jobs first; `tenant`: its own only."""
    lines = [
        f"{plural(group.count, 'job')} {'waits' if group.count == 1 else 'wait'} {group.what}"
        for group in groups_of(state, policy, now_ms, tenant)
    ]
    rest = len(lines) - LINES_MAX
    return lines if rest <= 0 else [*lines[:LINES_MAX], f"and {plural(rest, 'reason')} more"]


def _unclaimed(line: list[tuple[int, int]], claims: dict[int, None]) -> Iterable[int]:
    return (number for _, number in line if number not in claims)


def _what(reason: Reason | None) -> Why:
    if reason is None:
        return "for the next scheduling cycle", "next", ""
    kind = reason.kind.name.lower()
    if reason.kind is Waits.TURN:
        return f"for {reason.whom}, which is ahead of them", kind, reason.whom
    if reason.kind in (Waits.ROOM, Waits.CLOSED):
        need = reason.text.partition(";")[0].partition(": the emptiest")[0]
        each = "" if need.startswith("no node") else "each "
        return f"{reason.kind.value}: {each}{need}", kind, need
    return reason.kind.value, kind, ""
