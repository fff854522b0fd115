"""Whether a job can sleep, what that costs, and where it can be woken."""

from __future__ import annotations

from shoal.core.scheduling.sleepers import budget_of, cap_of
from shoal.core.state.events.sleep import JobDozing, JobWaking
from shoal.core.state.gpu_caps import cap_text
from shoal.core.state.room import Room
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, MemberRef, Phase, SleepCause
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import Sleeping
from shoal.model.reason import tenant_part
from shoal.model.resources import WHOLE_GPU_MILLI, Slice, plural

# What one H200 was seen to do (docs/measurements.md), until a node shows its own rates.
SLEEP_MB_S, WAKE_MB_S = 2_000, 5_000
LOCK_MS = 300  # to stop the GPUs' work, or to freeze processes
TURN_MB = 40_000  # what a job is taken to have on a GPU if nobody has seen it


def why_not(state: State, job: Job, *, asked: bool = False) -> str:
    """Why it cannot be put to sleep, in one clause; empty if it can. `asked`: by its user, so that
    the policy's wish does not count."""
    if job.phase is not Phase.RUNNING:
        return f"it is {job.phase.value}, and only a running job can be put to sleep"
    if state.policy.sleep is Sleeping.NEVER and not asked:
        return "the policy says sleep: never"
    if job.spec.no_sleep:
        return "it was submitted with --no-sleep"
    if job.refused:
        return f"it could not be put to sleep before: {job.refused}"
    if job.id in state.claims or any(member.over for member in job.members):
        return "it is about to end or to change its size"
    for node_id, charged in _charges(state, job).items():
        if reason := _node_cannot(state, state.nodes[node_id], charged):
            return reason
    return ""


def _charges(state: State, job: Job) -> dict[str, list[int]]:
    """By node: what each member there would need of its memory."""
    charges: dict[str, list[int]] = {}
    for number, member in enumerate(job.members):
        charges.setdefault(member.slice.node, []).append(host_mb(state, job, number))
    return charges


class Beds:
    """Where others could still sleep, as one victim after the other is chosen. The memory that is
    free has to be up to date."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._taken: dict[str, list[int]] = {}

    def take(self, job: Job) -> bool:
        """Can this one sleep, too?"""
        state, charges = self._state, _charges(self._state, job)
        for node_id, charged in charges.items():
            if _node_cannot(state, state.nodes[node_id], charged, self._taken.get(node_id, [])):
                return False
        for node_id, charged in charges.items():
            self._taken.setdefault(node_id, []).extend(charged)
        return True


def _node_cannot(
    state: State, node: Node, charged: list[int], chosen: list[int] | None = None
) -> str:
    """`chosen`: what others that are to sleep need there; it is not free any more."""
    chosen = chosen or []
    policy, room = state.policy, state.rooms[node.index]
    if not node.spec.sleep:
        return f"{node.id} cannot put jobs to sleep: {node.spec.sleep_why or 'its agent is older'}"
    if node.health is not NodeHealth.READY:
        return f"{node.id} is {node.health.value}"
    if node.intent is NodeIntent.DRAINING:  # a sleeper would keep it from getting empty
        return f"{node.id} is being drained"
    there = [job.members[ref.member] for ref, job in state.placed[node.id].items() if job.napping]
    if len(there) + len(chosen) + len(charged) > policy.sleepers_max:
        return (
            f"{plural(len(there), 'member')} sleep on {node.id}, and the policy allows "
            f"{policy.sleepers_max} (sleepers_max)"
        )
    need_mb, held_mb = sum(charged), sum(member.host_mb for member in there) + sum(chosen)
    most_mb = node.spec.memory_mb * policy.sleep_memory_percent // 100
    if held_mb + need_mb > most_mb:
        return (
            f"it may need {need_mb} MB of {node.id}'s memory to sleep, and of the {most_mb} MB "
            f"that the policy allows (sleep_memory_percent) {max(0, most_mb - held_mb)} MB are left"
        )
    if need_mb > room.memory_mb:
        return (
            f"it may need {need_mb} MB of {node.id}'s memory to sleep, and "
            f"{max(0, room.memory_mb)} MB are free"
        )
    return ""


def host_mb(state: State, job: Job, number: int) -> int:
    """Memory of its node that the member needs to sleep: what it has on GPUs, as last heard or
    seen; otherwise as much as it could have there."""
    slice_ = job.members[number].slice
    node = state.nodes[slice_.node]
    if node.spec.sleep != "cuda" or not slice_.gpus:
        return 0
    ref = MemberRef(job.id, job.attempt, number)
    heard = state.heard.uses.get(node.id, {}).get(ref, 0)
    if heard or job.sleep_mb:
        return max(heard, job.sleep_mb)
    return len(slice_.gpus) * slice_.gpu_milli * node.spec.gpu_memory_mb // WHOLE_GPU_MILLI


def cost_ms(state: State, job: Job) -> int:
    """How long it would hold GPUs without using them: to fall asleep and to wake."""
    return sleep_ms(state, job) + wake_ms(state, job)


def sleep_ms(state: State, job: Job) -> int:
    if job.sleep_cost_ms:
        return job.sleep_cost_ms
    return max(
        LOCK_MS
        + host_mb(state, job, number) * 1000 // (_node(state, job, number).sleep_mb_s or SLEEP_MB_S)
        for number in range(len(job.members))
    )


def wake_ms(state: State, job: Job) -> int:
    if job.wake_cost_ms:
        return job.wake_cost_ms
    return max(
        LOCK_MS
        + host_mb(state, job, number) * 1000 // (_node(state, job, number).wake_mb_s or WAKE_MB_S)
        for number in range(len(job.members))
    )


def _node(state: State, job: Job, number: int) -> Node:
    return state.nodes[job.members[number].slice.node]


def turn_ms(state: State, job: Job) -> int:
    """How long its turn is: so long that falling asleep and waking take the policy's share of the
    time at most."""
    policy = state.policy
    return max(policy.turn_ms_min, cost_ms(state, job) * 100 // max(1, policy.turn_cost_percent))


def bed(state: State, job: Job) -> tuple[Slice, ...] | None:
    """What a sleeper needs to wake, beside the memory that it holds: its own GPUs, or others of its
    nodes where that works. None if there is no room."""
    rooms: dict[str, Room] = {}
    found: list[Slice] = []
    for member in job.members:
        old, node = member.slice, state.nodes[member.slice.node]
        if member.over:
            found.append(Slice(node.id, old.gpus, gpu_milli=old.gpu_milli))
            continue
        if node.health is not NodeHealth.READY:
            return None
        if job.spec.whole_nodes and not state.rooms[node.index].empty:
            return None
        room = rooms.setdefault(node.id, state.rooms[node.index].copy())
        gpus = _gpus(room, old, remaps=node.spec.remaps)
        if gpus is None or room.exclusive or room.cpu_milli < old.cpu_milli or room.memory_mb < 0:
            return None
        found.append(Slice(node.id, gpus, old.cpu_milli, 0, old.gpu_milli))
        room.change(found[-1], -1)
    return tuple(found)


def _gpus(room: Room, old: Slice, *, remaps: bool) -> tuple[int, ...] | None:
    if all(room.gpu_milli[gpu] >= old.gpu_milli for gpu in old.gpus):
        return old.gpus
    free = [gpu for gpu, milli in enumerate(room.gpu_milli) if milli >= old.gpu_milli]
    return tuple(free[: len(old.gpus)]) if remaps and len(free) >= len(old.gpus) else None


def bed_problem(state: State, job: Job, now_ms: int) -> str:
    """Why a sleeper that is to wake cannot; empty if it can."""
    if tenant := budget_of(state, job, now_ms):
        return f"the budget of {tenant_part(tenant)} is used up; see: shoal report --by tenant"
    if tenant := cap_of(state, job):
        return cap_text(state, tenant)
    for member in job.members:
        node = state.nodes[member.slice.node]
        if not member.over and node.health is not NodeHealth.READY:
            return f"{node.id}, where it sleeps, is {node.health.value}"
    if bed(state, job) is not None:
        return ""
    nodes = dict.fromkeys(member.slice.node for member in job.members if not member.over)
    holders = dict.fromkeys(
        other.label
        for node_id in nodes
        for other in state.placed[node_id].values()
        if other.id != job.id and other.phase is not Phase.ASLEEP
    )
    verb = "runs" if len(holders) == 1 else "run"
    there = f"; {', '.join(list(holders)[:3])} {verb} there" if holders else ""
    return f"it sleeps on {', '.join(nodes)}, where {job.spec.demand} is not free{there}"


def doze(round_: Round, job: Job, cause: SleepCause, why: str) -> None:
    """Put it to sleep; `sleeping.why_not` must have had no objection."""
    charges = tuple(host_mb(round_.state, job, number) for number in range(len(job.members)))
    round_.emit(
        JobDozing(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            cause=cause,
            host_mb=charges,
            why=why,
        )
    )


def rouse(round_: Round, job: Job, given: tuple[Slice, ...], why: str = "") -> None:
    """It holds these GPUs again, and is woken."""
    slept = duration_text(round_.now_ms - (job.dozed_ms or 0))
    moved = [
        f"member {number} on GPU {','.join(map(str, slice_.gpus))}"
        for number, (member, slice_) in enumerate(zip(job.members, given, strict=True))
        if member.slice.gpus != slice_.gpus
    ]
    where = f", {'; '.join(moved[:4])}" if moved else ""
    round_.emit(
        JobWaking(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            gpus=tuple(slice_.gpus for slice_ in given),
            why=f"is woken after {slept}{where}{why}",
        )
    )
