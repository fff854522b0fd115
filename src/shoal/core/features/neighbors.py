"""Other clusters: which waiting jobs go to a neighbor, and when they come back.

A job is handed over in two stored phases: `JobHanded` is stored before anything is sent, and from
then on the job is not started here before the host's own record of it has ended, its lease is over,
or a person has declared the neighbor gone. What is sent follows from the state alone, so a crash
on either side only sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from shoal.core.scheduling.roots import carries
from shoal.core.state.ending import CANCELLED_CODE, finish
from shoal.core.state.events.neighbors import (
    AwayEvent,
    JobGivenUp,
    JobHanded,
    JobLeaseAsked,
    JobReturned,
    JobRunsAway,
    JobSettled,
    JobTaken,
    JobWithdrawn,
)
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.away import Away
from shoal.model.durations import HOUR_MS, about, duration_text
from shoal.model.job import Job, JobSpec, Outcome, Phase, Restart
from shoal.model.neighbor import (
    NEVER_RUNS,
    OFFERED_MAX,
    PRICE_UNIT,
    REGION,
    STAYS,
    Ending,
    HandedJob,
    Neighbor,
    NeighborReport,
    Offer,
    Outgoing,
    Wish,
    asks,
    cut_problem,
    key_of,
    spec_there,
    stays_home,
    wish_of,
)
from shoal.model.policy import Policy
from shoal.model.reason import quoted
from shoal.model.report import Accepted, Answer, DeclareGone, Refused, Submit

# A job that may run here, too, goes only where it would start within this time.
SOON_MS = 60_000
# It is taken back if it is still waiting there so long after it should have begun.
LATE_MS = 600_000
STARTS_MS = 2 * 3_600_000  # ... or has been starting for so long
# Before it is handed over again; then twice that, up to an hour.
PAUSE_MS = 30_000
PAUSE_DOUBLINGS_MAX = 7
LANES_MAX, OF_LANE_MAX = 1_000, 4
LOOKED_MAX = 4_096  # waiting jobs, to find some that may be asked about
# Of the jobs that are asked about, so many are others each time.
OTHERS, TURN_MS, SCATTERS = OFFERED_MAX // 2, 1_000, 2_654_435_761
DRIFT = 1_000  # their clock may be faster by less than a part in so many
HALF = 2  # of its lease's length is left when it is renewed


# -- what a job may ask for ------------------------------------------------------------------------


def cluster_problem(spec: JobSpec) -> Refused | None:
    """Of a job that says something about clusters."""
    if not asks(spec.cluster) and spec.if_cut_ms:
        return Refused("if_cut", "is for jobs that name another cluster; add e.g. cluster: any")
    try:
        wish = wish_of(spec.cluster)
    except ValueError as error:
        return Refused("cluster", str(error))
    if not wish.asks:
        return None
    if home := stays_home(spec):
        return Refused("cluster", f"cannot be chosen: {home}")
    if cut := cut_problem(spec):
        return Refused("if_cut", cut)
    return None


# -- which jobs go, and where ----------------------------------------------------------------------


def wanted_offers(state: State, policy: Policy, now_ms: int) -> list[Job]:
    """Waiting jobs that neighbors should be asked about: those that only neighbors may run, those
    that ask for any cluster, and those that the policy lets go after a while."""
    queue = state.queue
    numbers = [*queue.outbound, *queue.wishing]
    found: dict[str, Job] = {}
    if any(neighbor.after_ms for neighbor in policy.neighbors):
        numbers += _heads(state)
    for number in _in_turn(numbers, now_ms)[:LOOKED_MAX]:
        job = state.job_numbered(number)
        if (
            now_ms >= job.away_after_ms
            and _asks(policy, job, now_ms)
            and not _stays(state, job, now_ms)
        ):
            found[job.id] = job
            if len(found) >= OFFERED_MAX:
                break
    return list(found.values())


def _stays(state: State, job: Job, now_ms: int) -> str:
    """Why it cannot leave; empty: it can. Work that the head does not have stays: its job waits for
    as long as that took, and then leaving costs no more than waiting has cost."""
    if job.until_ms:
        return "it has a lease, which is renewed here"
    if _waited_ms(job, now_ms) < job.attained_ms and not carries(state, job):
        work = duration_text(job.attained_ms)
        return f"it has saved {work} of work here, and leaves when it has waited as long"
    return stays_home(job.spec)


def _in_turn(numbers: list[int], now_ms: int) -> list[int]:
    """The first come first; but some of all come sometimes, as nobody may ever take the first."""
    if len(numbers) <= OFFERED_MAX:
        return numbers
    start, step = now_ms // TURN_MS * SCATTERS >> 16, max(1, len(numbers) // OTHERS)
    others = [numbers[(start + place * step) % len(numbers)] for place in range(OTHERS)]
    return [*numbers[: OFFERED_MAX - OTHERS], *others, *numbers]


def _heads(state: State) -> Iterator[int]:
    """The first jobs of lanes: those behind them are alike and come later."""
    for line in islice(state.queue.lanes.values(), LANES_MAX):
        for _, number in line[:OF_LANE_MAX]:
            yield number


def _asks(policy: Policy, job: Job, now_ms: int) -> bool:
    return asks(job.spec.cluster) or any(_spills(one, job, now_ms) for one in policy.neighbors)


def why_not(state: State, policy: Policy, job: Job, neighbor: str, now_ms: int) -> str:
    """Why the job may not go there, whatever the neighbor offers; empty: it may."""
    share, wish = policy.neighbor(neighbor), wish_of(job.spec.cluster)
    if wish.names and neighbor not in wish.names:
        return "the job does not name it"
    if not wish.asks and not _spills(share, job, now_ms):
        return "jobs go there when they ask for it"
    if barred := barred_by(state, share, job.spec):
        return barred
    missing = [f"{key}={value}" for key, value in wish.labels if share.labels.get(key) != value]
    if missing:
        return f"it is not {' and '.join(missing)} in the policy"
    gpus = job.spec.gpus * job.spec.members
    if share.gpus_max and gpus and gpus_there(state, neighbor) + gpus > share.gpus_max:
        return f"the policy has at most {share.gpus_max} GPUs of ours there"
    return ""


def barred_by(state: State, share: Neighbor, spec: JobSpec) -> str:
    """Why nothing like it goes to this neighbor, by the policy; empty: it may."""
    if share.tenants and spec.tenant not in share.tenants:
        return "the policy sends it no jobs of this tenant"
    if not share.tenants and spec.tenant in state.identity.tenants:
        return "the policy names no tenants for it, and there they would be one Unix user"
    stays = spec.labels.get(STAYS, "")
    return f"the job stays in {stays}" if stays and share.labels.get(REGION) != stays else ""


def _spills(share: Neighbor, job: Job, now_ms: int) -> bool:
    return bool(share.after_ms) and _waited_ms(job, now_ms) >= share.after_ms


def _waited_ms(job: Job, now_ms: int) -> int:
    return now_ms - max(job.since_ms, job.requeued_ms)


def too_dear(share: Neighbor, wish: Wish, price: int | None) -> str:
    """Why its price is not acceptable; empty: it is."""
    if not share.price_max and wish.price_max is None:
        return ""
    if price is None:
        return "it names no price"
    dear = share.price_max and price > share.price_max
    if dear or (wish.price_max is not None and price >= wish.price_max):
        return f"its price is {price / PRICE_UNIT:g} per GPU-hour"
    return ""


def gpus_there(state: State, neighbor: str) -> int:
    """That jobs of ours have, or wait for, at a neighbor, and that services there may have."""
    jobs = (state.jobs[job_id] for job_id in state.away)
    served = (one.spec for one in state.services.values() if neighbor in one.sites)
    return sum(
        job.spec.gpus * job.spec.members
        for job in jobs
        if job.away is not None and job.away.neighbor == neighbor
    ) + sum(one.scale.most * one.replica.gpus * one.replica.members for one in served)


def hand_over(round_: Round, reports: tuple[NeighborReport, ...]) -> None:
    """Jobs that wait after this step's placements go where they would start first, of equal starts
    where they cost least. Only offers that have just come count, and not two for the same GPUs."""
    if not reports or round_.more:
        return
    best: dict[str, tuple[int, int, str, Offer]] = {}
    for report in reports:
        for offer in report.offers[:OFFERED_MAX]:
            if offer.start_ms is not None:
                rank = (offer.start_ms, offer.price or 0, report.name, offer)
                job = _still_waits(round_.state, offer.job)
                if job is None or _refused(round_, job, report.name, offer):
                    continue
                if offer.job not in best or rank[:3] < best[offer.job][:3]:
                    best[offer.job] = rank
    spoke = {report.name: report for report in reports}
    free = {report.name: report.gpus_free for report in reports if report.gpus}
    for job_id, (start_ms, _, neighbor, offer) in best.items():
        job = round_.state.jobs[job_id]
        if why_not(round_.state, round_.policy, job, neighbor, round_.now_ms):
            continue  # those before it have taken our share
        gpus = job.spec.gpus * job.spec.members
        if not start_ms and neighbor in free and gpus:
            if gpus > free[neighbor]:
                continue  # they have taken what is free there; it asks again
            free[neighbor] -= gpus
        _hand(round_, job, neighbor, offer, spoke[neighbor].clock_ms)


def _still_waits(state: State, job_id: str) -> Job | None:
    job = state.jobs.get(job_id)
    if job is None or job.phase is not Phase.WAITING or job.id in state.claims:
        return None
    queue = state.queue
    stands = any(job.number in one for one in (queue.lane, queue.outbound, queue.capped_lane))
    return job if stands else None


def _refused(round_: Round, job: Job, neighbor: str, offer: Offer) -> str:
    """Why this offer is not accepted; empty: it is."""
    state, policy, now_ms = round_.state, round_.policy, round_.now_ms
    if now_ms < job.away_after_ms:
        return "it has just come back"
    if home := _stays(state, job, now_ms):
        return home
    wish = wish_of(job.spec.cluster)
    if not wish.only and (offer.start_ms or 0) > SOON_MS:
        return f"it would start there in {about(offer.start_ms or 0)}"
    return why_not(state, policy, job, neighbor, now_ms) or too_dear(
        policy.neighbor(neighbor), wish, offer.price
    )


def _hand(round_: Round, job: Job, neighbor: str, offer: Offer, clock_ms: int) -> None:
    now_ms, state, start_ms = round_.now_ms, round_.state, offer.start_ms or 0
    until = _lease(job.spec, clock_ms, now_ms)
    when = "at once" if not start_ms else f"in {about(start_ms)}"
    round_.emit(
        JobHanded(
            at_ms=now_ms,
            job=job.id,
            attempt=state.next_attempt(job),
            neighbor=neighbor,
            why=f"{neighbor} would start it {when}",
            start_ms=start_ms,
            price=offer.price,
            until_there_ms=until[0],
            until_here_ms=until[1],
        )
    )


def _lease(spec: JobSpec, clock_ms: int, now_ms: int) -> tuple[int, int]:
    """From a stamp of the host's clock that has just come: the host stops it half of the time
    before it may start again here. That half is for clocks that run at different speeds, and for
    stopping it. (0, 0): it has none."""
    if not spec.if_cut_ms:
        return 0, 0
    return clock_ms + spec.if_cut_ms // HALF, now_ms + spec.if_cut_ms


def outgoing(state: State) -> Iterator[Outgoing]:
    """What neighbors are told, again and again, until it is not here any more."""
    for job_id in state.away:
        job = state.jobs[job_id]
        assert job.away is not None, job_id
        yield Outgoing(job.id, job.attempt, job.away, job.spec)
    for one in state.strays.values():
        away = Away(neighbor=one.neighbor, since_ms=one.since_ms, withdrawn="it was given up")
        yield Outgoing(one.job, one.attempt, away, NEVER_RUNS, stray=True)


def submission(home: str, tenant: str, out: Outgoing) -> Submit | None:
    """What its host is asked: to end it, or to take it; None: it has it. The same key asks for the
    same job."""
    key, there = key_of(home, out.job, out.attempt), spec_there(out.spec, tenant)
    if out.away.withdrawn:
        return Submit(there, key, cancelled=True, who=home)
    if not out.away.id:
        return Submit(there, key, who=home, until_ms=out.away.until_there_ms)
    return None


# -- what becomes of them --------------------------------------------------------------------------


def hear_neighbors(round_: Round, reports: tuple[NeighborReport, ...]) -> None:
    """What hosts say of our jobs. Each is believed about jobs that it was given, and about the
    newest hand-over only."""
    state = round_.state
    for report in reports:
        state.heard.neighbors[report.name] = report
        for handed in report.jobs:
            if handed.ended is not None:
                _hear_of_stray(round_, handed, report.name)
            job = state.jobs.get(handed.job)
            away = job.away if job is not None else None
            if job is None or away is None or job.attempt != handed.attempt:
                continue
            if away.neighbor == report.name:
                _hear(round_, job, away, handed, report.clock_ms)
    if state.away:
        _look_at_clocks(round_)


def _hear(round_: Round, job: Job, away: Away, handed: HandedJob, clock_ms: int) -> None:
    if handed.ended is not None:
        _come_back(round_, job, away, handed.ended)
        return
    if handed.refused and not away.withdrawn:
        withdraw(round_, job, f"{away.neighbor} does not take it: {quoted(handed.refused)}")
        return
    if handed.id and not away.id:  # one key has one job
        round_.emit(_about(JobTaken, round_, job, away, id=handed.id))
    running = handed.phase in (Phase.RUNNING, Phase.DOZING, Phase.ASLEEP, Phase.WAKING)
    if running and away.running_ms is None:
        why = f"is running at {away.neighbor}"
        round_.emit(_about(JobRunsAway, round_, job, away, why=why))
    elif _is_late(away, handed, round_.now_ms):
        withdraw(round_, job, "it has not begun there, long after it should have")
        return
    half_ms = job.spec.if_cut_ms // HALF // HALF
    if half_ms and clock_ms and not away.withdrawn and away.until_there_ms < clock_ms + half_ms:
        there, here = _lease(job.spec, clock_ms, round_.now_ms)
        round_.emit(
            _about(JobLeaseAsked, round_, job, away, until_there_ms=there, until_here_ms=here)
        )


def _is_late(away: Away, handed: HandedJob, now_ms: int) -> bool:
    """By the host's word: a cut may have hidden that it has begun. What has to be sent first may
    take its time, and so may what the host fetches before the start."""
    if away.withdrawn or away.running_ms is not None or not away.taken_ms:
        return False
    if handed.phase == Phase.STARTING:
        return now_ms >= away.taken_ms + away.start_ms + STARTS_MS
    due_ms = max(away.taken_ms, away.since_ms + away.start_ms)
    return handed.phase == Phase.WAITING and now_ms >= due_ms + LATE_MS


def _about(
    kind: Callable[..., AwayEvent], round_: Round, job: Job, away: Away, **more: object
) -> AwayEvent:
    at_ms, name = round_.now_ms, away.neighbor
    return kind(at_ms=at_ms, job=job.id, attempt=job.attempt, neighbor=name, **more)


def withdraw(round_: Round, job: Job, why: str) -> None:
    assert job.away is not None, job.id
    round_.emit(_about(JobWithdrawn, round_, job, job.away, why=why))


def _come_back(round_: Round, job: Job, away: Away, ended: Ending) -> None:
    """It has ended there. If that was not its own end, and nobody here cancelled it, it waits."""
    again = job.spec.restart is not Restart.NEVER or not ended.started
    gpus = job.spec.gpus * max(job.spec.members, job.spec.members_max)
    used = _owed(round_, ended, gpus, away.since_ms, away.price)
    if ended.outcome is Outcome.CANCELLED and not away.cancelled and again:
        why = f"{away.neighbor} ended it"
        if ended.why:
            why += f": {quoted(ended.why)}"
        _return(round_, job, away, away.withdrawn or why, used)
        return
    round_.emit(_about(JobSettled, round_, job, away, **used._asdict()))
    text = f"at {away.neighbor}"
    why = f"{text}: {quoted(ended.why)}" if ended.why else text
    finish(round_, job, ended.outcome, ended.code, why)


class Owed(NamedTuple):
    """For what a neighbor ran: GPU time, and millionths of the currency."""

    gpu_ms: int = 0
    money: int = 0


NOTHING = Owed()


def _owed(round_: Round, ended: Ending, gpus: int, since_ms: int, price: int | None) -> Owed:
    """What it says that it used, which is not more than there was time for, at the price that was
    offered. Without a price, no money is owed."""
    passed_ms = round_.now_ms - since_ms
    gpu_ms = min(ended.gpu_ms, gpus * (passed_ms + passed_ms // DRIFT))
    money = min(ended.money, gpu_ms * price // HOUR_MS + 1) if price is not None else 0
    return Owed(gpu_ms, money)


def _hear_of_stray(round_: Round, handed: HandedJob, name: str) -> None:
    """What it used there is owed, though it was not waited for."""
    key = f"{handed.job}/{handed.attempt}"
    stray, ended = round_.state.strays.get(key), handed.ended
    if stray is None or stray.neighbor != name or ended is None:
        return
    owed = _owed(round_, ended, stray.gpus, stray.since_ms, stray.price)
    round_.emit(
        JobSettled(
            at_ms=round_.now_ms,
            job=stray.job,
            attempt=stray.attempt,
            neighbor=name,
            tenant=stray.tenant,
            gpu_ms=owed.gpu_ms,
            money=owed.money,
        )
    )


def _return(round_: Round, job: Job, away: Away, why: str, used: Owed = NOTHING) -> None:
    after_ms = round_.now_ms + (PAUSE_MS << min(job.returns, PAUSE_DOUBLINGS_MAX))
    more = {"why": why, "away_after_ms": after_ms, **used._asdict()}
    round_.emit(_about(JobReturned, round_, job, away, **more))


def _look_at_clocks(round_: Round) -> None:
    """Leases that are over for certain. Nothing else ends because nothing is heard."""
    state, now_ms = round_.state, round_.now_ms
    for job_id in list(state.away):
        job = state.jobs[job_id]
        away = job.away
        assert away is not None, job_id
        if away.until_here_ms and now_ms >= away.until_here_ms:
            cut = duration_text(job.spec.if_cut_ms)
            why = f"{away.neighbor} has not been heard of for {cut}, and has stopped it"
            _give_up(round_, job, away, why)


def _give_up(round_: Round, job: Job, away: Away, why: str) -> None:
    """No end of it is waited for."""
    round_.emit(_about(JobGivenUp, round_, job, away, why=why))
    if away.cancelled:
        finish(round_, job, Outcome.CANCELLED, CANCELLED_CODE, away.withdrawn)
    elif job.spec.restart is Restart.NEVER:  # it may have begun there
        why = f"{why}, and it must not run twice"
        finish(round_, job, Outcome.CANCELLED, CANCELLED_CODE, why)
    else:
        _return(round_, job, away, why)


def next_neighbor_ms(state: State) -> int | None:
    """When the first lease is over."""
    found = [state.jobs[job_id].away for job_id in state.away]
    return min([one.until_here_ms for one in found if one and one.until_here_ms], default=None)


def declare_gone(round_: Round, request: DeclareGone) -> Answer:
    """Its jobs of ours wait here again, though it may still run them: that is what the person who
    says so takes on."""
    state, why = round_.state, f"{request.neighbor} was declared gone by {request.who}"
    gone = 0
    for job_id in list(state.away):
        job = state.jobs[job_id]
        if job.away is not None and job.away.neighbor == request.neighbor:
            _give_up(round_, job, job.away, why)
            gone += 1
    state.heard.neighbors.pop(request.neighbor, None)
    return Accepted("", f"{gone} of our jobs were there")


# -- what people are told --------------------------------------------------------------------------


def neighbors_note(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """Why no neighbor has a job that may go to one; empty: it may not go, or nothing is known."""
    if not _asks(policy, job, now_ms):
        return ""
    if stays := _stays(state, job, now_ms):
        return f"no neighbor is asked: {stays}"
    wish, heard = wish_of(job.spec.cluster), state.heard.neighbors
    if now_ms < job.away_after_ms:
        left = duration_text(job.away_after_ms - now_ms)
        return f"neighbors are asked again in {left}: {job.why}"
    if not heard:
        return "no neighbor is known; add one with: shoal neighbor add"
    unknown = [name for name in wish.names if name not in heard]
    if unknown:
        return f"no neighbor {unknown[0]} is known; see: shoal neighbor list"
    named = [name for name in _of(wish, heard) if name in wish.names or _shared(policy, job, name)]
    texts = [f"{name}: {_there(state, policy, job, heard[name], now_ms)}" for name in named[:3]]
    return "; ".join(texts) or "the policy shares no neighbor with this tenant"


def _shared(policy: Policy, job: Job, name: str) -> bool:
    tenants = policy.neighbor(name).tenants
    return not tenants or job.spec.tenant in tenants


def away_text(state: State, job: Job) -> str:
    """Where it is, and why it waits there, as far as its host has said."""
    away = job.away
    assert away is not None, job.id
    name, report = away.neighbor, state.heard.neighbors.get(away.neighbor)
    handed = next((one for one in report.jobs if one.job == job.id), None) if report else None
    if away.withdrawn:
        what = "is being cancelled at" if away.cancelled else "is being taken back from"
        text = f"{what} {name}: {away.withdrawn}"
    elif not away.id:
        text = f"{job.why}; it has not said yet that it has it"
    elif away.running_ms is not None:
        text = f"runs at {name} as {quoted(away.id)}"
    else:
        why = f": {quoted(handed.why)}" if handed is not None and handed.why else ""
        text = f"waits at {name} as {quoted(away.id)}{why}"
    trouble = quoted(report.problem) if report is not None and report.problem else ""
    return f"{text}; {name} cannot be asked: {trouble}" if trouble else text


def _of(wish: Wish, heard: Iterable[str]) -> Iterable[str]:
    return wish.names or sorted(heard)


def _there(state: State, policy: Policy, job: Job, report: NeighborReport, now_ms: int) -> str:
    if report.problem:
        return quoted(report.problem)
    if refused := why_not(state, policy, job, report.name, now_ms):
        return refused
    offer = next((one for one in report.offers if one.job == job.id), None)
    if offer is None:
        return "is being asked"
    if offer.start_ms is None:
        return quoted(offer.why) if offer.why else "cannot say when it would start"
    dear = too_dear(policy.neighbor(report.name), wish_of(job.spec.cluster), offer.price)
    return dear or f"would start it in {about(offer.start_ms)}"


# -- what always holds, in code that shares nothing with the code above ---------------------------


def neighbors_violation(state: State) -> str:
    """Empty if all is well."""
    for job in state.jobs.values():
        if (job.phase is Phase.AWAY) != (job.away is not None):
            return f"{job.id} is {job.phase.value}, but its record says otherwise"
        if job.away is not None and (job.members or job.attempt < 1):
            return f"{job.id} is at {job.away.neighbor} and holds something here"
        if job.phase is Phase.AWAY and (job.spec.service or job.spec.array):
            return f"{job.id} must not leave this cluster"
        names = [
            word for word in job.spec.cluster.split(",") if "=" not in word and "<" not in word
        ]
        if f"{job.id}/{job.attempt}" in state.strays and job.phase is Phase.AWAY:
            return f"{job.id} was given up, and is away"
        elsewhere = names not in ([""], ["any"], ["here"]) and bool(names)
        if elsewhere and job.phase not in (Phase.WAITING, Phase.AWAY):
            return f"{job.id} runs here, but asks for {job.spec.cluster}"
        if elsewhere and job.number in state.queue.lane:
            return f"{job.id} stands where jobs may start here, but asks for {job.spec.cluster}"
    if set(state.away) != {job.id for job in state.jobs.values() if job.phase is Phase.AWAY}:
        return "the index of jobs that are away does not match the jobs"
    return ""
