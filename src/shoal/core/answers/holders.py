"""Which jobs hold the GPUs that a waiting job could use."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.state.state import State
from shoal.model.ids import number_of
from shoal.model.job import Job, Phase
from shoal.model.policy import Others
from shoal.model.resources import plural

NAMED_MAX = 4  # jobs, or runs of jobs with consecutive numbers


def holders_text(
    state: State, job: Job, sees: Callable[[Job], bool], others: Others = Others.NOTHING
) -> str:
    """For instance "32 of 32 GPUs are held by j265-j268". Empty if the job does not wait, needs no
    GPU, or no GPU that it could use is held. Looks at every member: ask for one job, not all.
    Jobs that the reader may not see are only counted, or named by tenant if `others` says so."""
    demand = job.spec.demand
    if job.phase is not Phase.WAITING or not demand.gpus:
        return ""
    rooms = state.rooms
    suited = [n for n in state.order if n.schedulable and demand.suits(rooms[n.index].kind)]
    held: set[tuple[str, int]] = set()
    owners: set[int] = set()
    foreign: dict[str, str] = {}  # job -> tenant
    for node in suited:
        for ref in state.placed[node.id]:
            owner = state.jobs[ref.job]
            gpus = owner.members[ref.member].held.gpus
            held |= {(node.id, gpu) for gpu in gpus}
            if gpus and sees(owner):
                owners.add(number_of(owner.id))
            elif gpus:
                foreign[owner.id] = owner.spec.tenant
    if not held:
        return ""
    total = sum(node.spec.gpus for node in suited)
    names = [_ranges(sorted(owners))] if owners else []
    if foreign and others is Others.TENANTS:
        tenants = sorted(set(foreign.values()))
        more = f" and {len(tenants) - NAMED_MAX} more" if len(tenants) > NAMED_MAX else ""
        names.append(f"jobs of {', '.join(tenants[:NAMED_MAX])}{more}")
    elif foreign:
        names.append("jobs of other tenants")
    return f"{len(held)} of {plural(total, 'GPU')} are held by {' and '.join(names)}"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = [f"j{run[0]}-j{run[-1]}" if len(run) > 1 else f"j{run[0]}" for run in runs]
    more = sum(len(run) for run in runs[NAMED_MAX:])
    return ", ".join(names[:NAMED_MAX]) + (f" and {plural(more, 'other job')}" if more else "")
