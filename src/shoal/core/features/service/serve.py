"""Services: as many ready replicas as wanted, of the wanted version, without losing a request.

Each replica is a job, perhaps a gang. A roll-out starts replicas of the new version beside the old
ones; for each that is ready an old one is drained, and it ends when it has answered its requests.
Where there is no room beside the old ones, `rollout` says what happens. If a new version does not
get ready, the service rolls back to the version before.
"""

from __future__ import annotations

import msgspec

from shoal.core.books.scale import RecentWork, Wish, wish
from shoal.core.features.service.rollout import at_a_time, by_rack, leave_first, side_by_side
from shoal.core.features.service.sites import clusters_problem, roll_out
from shoal.core.features.service.sleep import look_at, nap_and_wake, sized_to_sleep
from shoal.core.scheduling.ends import end_text
from shoal.core.state.ending import cancel
from shoal.core.state.ends import lead_ms, stop_ms
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.services import (
    ReplicaDraining,
    ReplicaReady,
    ServiceScaled,
    ServiceSet,
    ServiceStopped,
    ServiceStopping,
)
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Job, JobSpec, Phase, Restart, StopCause
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import grants_host, grants_port
from shoal.model.report import Accepted, Answer, Refused, SetService, StopService
from shoal.model.resources import plural
from shoal.model.service import (
    Claims,
    Route,
    Service,
    ServiceLoad,
    ServiceSpec,
    problem_with_certificate,
    problem_with_service,
)

TRIES_MAX = 3  # a version that never got ready is given up after this many failures
DOWN_MS = 30_000  # a replica that the gateway cannot reach for this long is replaced
LOOK_MS = 1_000


def serve(round_: Round, loads: tuple[ServiceLoad, ...]) -> None:
    """`loads`: reports since the last step. Older ones prove nothing: the controller may have been
    down, or the gateway silent. A service is looked at again when something has changed that its
    last look has read, or when that look asked for it."""
    state, agenda, now_ms = round_.state, round_.state.agenda, round_.now_ms
    unserved, due_ms = agenda.unserved, agenda.serve_ms
    if unserved is None:
        if not state.services:
            return
        unserved = agenda.unserved = dict.fromkeys(state.services)
    if not unserved and not loads and (due_ms is None or now_ms < due_ms):
        return
    agenda.serve_ms = None
    fresh = {load.service: load for load in loads if load.service in state.services}
    state.heard.loads.update(fresh)
    for name in list(state.services):
        late_ms = agenda.late_ms.get(name)
        if name in unserved or name in fresh or (late_ms is not None and late_ms <= now_ms):
            unserved.pop(name, None)
            if _tend(round_, name, state.services[name], fresh.get(name)):
                unserved[name] = None
        elif late_ms is not None:
            look_at(round_, late_ms)
    left = {name: None for name in unserved if name in state.services}
    agenda.unserved = left if state.services else None


def set_service(round_: Round, request: SetService, problem: Refused | None) -> Answer:
    """`problem`: why a replica would be refused as a job."""
    state, spec = round_.state, request.spec
    wrong = problem_with_service(spec)
    if wrong is not None:
        return Refused(*wrong)
    if (path := problem_with_certificate(spec.way)) is not None:
        return Refused("certificate", path.removeprefix("certificate: "))
    if problem is None and spec.clusters:
        problem = clusters_problem(state, round_.policy, spec)
    if problem is not None:
        return problem
    known = state.services.get(spec.name)
    if known is not None and not within(request.scope, known):
        return Refused("name", f"{spec.name} is taken in this cluster; choose another name")
    if known is not None and known.stopping:
        return Refused("name", f"{spec.name} is stopping; wait until it is gone")
    if known is not None and known.spec == spec:
        return Accepted(spec.name, "nothing changed")
    refused = ungranted(state, request) or taken(state, request)
    if refused is not None:
        return refused
    version = known.newest + 1 if known is not None else 1
    why = f"version {version} set by {request.who}"
    if known is not None and replica_spec(known.spec, 0) == replica_spec(spec, 0):
        version = known.version  # what runs can stay
        why = f"changed by {request.who}; its replicas stay"
    round_.emit(
        ServiceSet(
            at_ms=round_.now_ms,
            service=spec.name,
            spec=spec,
            version=version,
            why=why,
        )
    )
    return Accepted(spec.name)


def stop_service(round_: Round, request: StopService) -> Answer:
    service = round_.state.services.get(request.service)
    if service is None or not within(request.scope, service):
        return Refused("service", f"there is no service {request.service}", missing=True)
    if service.stopping:
        return Accepted(request.service, "it is already stopping")
    why = f"stopped by {request.who}"
    round_.emit(ServiceStopping(at_ms=round_.now_ms, service=request.service, why=why))
    return Accepted(request.service)


# -- one service -----------------------------------------------------------------------------
def _tend(round_: Round, name: str, service: Service, load: ServiceLoad | None) -> bool:
    """`load`: None if nothing was reported of it. Must the next step look at it, too, even if
    nothing happens to it?"""
    state, agenda = round_.state, round_.state.agenda
    agenda.late_ms.pop(name, None)
    others_ms, agenda.serve_ms = agenda.serve_ms, None
    jobs = [state.jobs[job_id] for job_id in state.replicas.get(name, {})]
    if load is not None:
        _greet(round_, service, jobs, load)
        _replace_unreached(round_, service, jobs, load)
        _replace_hung(round_, service, jobs, load)
    late_ms = _replace_late(round_, service, jobs)
    _go_back(round_, service)
    if service.spec.clusters:
        roll_out(round_, service)
    if load is not None and load.tells and not service.stopping:
        _scale(round_, service, jobs, load)
    _size(round_, service, jobs)
    nap_and_wake(round_, service, jobs, load)
    _let_drained_go(round_, service, jobs, load)
    if service.stopping and not state.replicas.get(name) and not service.sites:
        why = "all its replicas have ended"
        round_.emit(ServiceStopped(at_ms=round_.now_ms, service=name, why=why))
    unsettled = agenda.serve_ms is not None or _depends_on_more(round_, service, jobs)
    if late_ms is not None:
        agenda.late_ms[name] = late_ms
        look_at(round_, late_ms)
    if others_ms is not None:
        look_at(round_, others_ms)
    return unsettled


def _depends_on_more(round_: Round, service: Service, jobs: list[Job]) -> bool:
    """Than on its replicas and the intents for their nodes: on the time, on requests, or on the
    room elsewhere."""
    state = round_.state
    return (
        bool(service.spec.sleep_after_ms)
        or any(job.spec.version != service.version for job in jobs)
        or any(
            node.intent is NodeIntent.DRAINING or node.end is not None
            for job in jobs
            for node in [state.nodes[member.slice.node] for member in job.members]
        )
    )


def _greet(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
    for job in jobs:
        if job.id in load.ready and job.phase is Phase.RUNNING and job.id not in service.ready:
            taken_ms = round_.now_ms - (job.awake_ms or round_.now_ms)
            began = "woke" if job.naps else "started"
            why = f"its probe answered {duration_text(taken_ms)} after it {began}"
            recent = round_.state.heard.recent_work.setdefault(service.spec.name, RecentWork())
            recent.start_ms = recent.start_ms if job.naps else taken_ms
            if round_.state.endings:  # replicas need more or less time to leave a node than before
                round_.state.agenda.other_gaps()
                round_.state.agenda.ends_ms = 0
            start = None if job.naps else round_.state.heard.starts.get(job.id)
            round_.emit(
                ReplicaReady(
                    at_ms=round_.now_ms,
                    service=service.spec.name,
                    job=job.id,
                    why=why,
                    got_ms=dict(start.got_ms) if start is not None else None,
                    listened_ms=start.listened_ms if start is not None else None,
                )
            )


def _replace_late(round_: Round, service: Service, jobs: list[Job]) -> int | None:
    """A replica that does not get ready in time is stopped. When is the next one too late?"""
    start_ms, due_ms = service.spec.probe.start_ms, None
    for job in jobs:
        since_ms = job.awake_ms or job.running_ms
        if job.phase is not Phase.RUNNING or since_ms is None or job.id in service.ready:
            continue
        if round_.now_ms - since_ms > start_ms:
            probe = service.spec.probe
            did = "listed no model" if probe.models else "did not answer"
            why = f"its probe {probe.path} {did} within {duration_text(start_ms)}"
            _stop(round_, job, StopCause.FAILURE, why)
        elif due_ms is None or since_ms + start_ms < due_ms:
            due_ms = since_ms + start_ms + 1
    return due_ms


def _replace_unreached(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
    """A replica that the gateway cannot reach for 30 s is stopped, unless it drains anyway."""
    down_ms, starts = round_.state.heard.down_ms, round_.state.heard.starts
    now_ms = round_.now_ms
    for job in jobs:
        seen = load.replicas.get(job.id)
        served = job.id in service.ready and job.id not in service.draining
        if not served or seen is None or seen.up:
            down_ms.pop(job.id, None)
            start = starts.get(job.id) if served and seen is not None else None
            if start is not None and start.served_ms is None:
                start.served_ms = now_ms
        elif now_ms - down_ms.setdefault(job.id, now_ms) > DOWN_MS:
            why = f"the gateway has not reached it for {duration_text(DOWN_MS)}"
            _stop(round_, job, StopCause.FAILURE, why)


def _replace_hung(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
    """A replica that was ready and no longer answers is stopped: one at a time, and the next only
    when all others are ready again. If no replica gets ready, the fault is elsewhere and stopping
    more would not help. A replica that answers requests is alive, whatever its probe says, and the
    replicas of a silent node are not taken to hang."""
    probe, state = service.spec.probe, round_.state
    staying = [job for job in jobs if job.id not in service.draining and not job.napping]
    if any(job.id not in service.ready for job in staying):
        return
    hung = [
        job
        for job in staying
        if load.unanswered.get(job.id, 0) >= probe.failures
        and not ((seen := load.replicas.get(job.id)) and seen.answers_per_ks)
        and all(state.nodes[m.slice.node].health is NodeHealth.READY for m in job.members)
    ]
    if hung:
        worst = max(hung, key=lambda job: (load.unanswered[job.id], -job.number))
        times = load.unanswered[worst.id]
        why = f"its probe {probe.path} had no answer {times} times in a row: it hangs"
        _stop(round_, worst, StopCause.FAILURE, why)


def _go_back(round_: Round, service: Service) -> None:
    """Replace a version that never got ready with the one before it."""
    if service.proven or service.before is None or service.failures < TRIES_MAX:
        return
    round_.emit(
        ServiceSet(
            at_ms=round_.now_ms,
            service=service.spec.name,
            spec=service.before,
            version=service.before_version,
            back=True,
            why=f"version {service.version} failed {service.failures} times before it was ready; "
            f"back to version {service.before_version}: {service.why}",
        )
    )


def _scale(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
    state, now_ms = round_.state, round_.now_ms
    name, scale = service.spec.name, service.spec.scale
    recent = state.heard.recent_work.setdefault(name, RecentWork())
    goals, start_ms = service.spec.goals, recent.start_ms
    if goals:
        start_ms = max(start_ms, _start_ms(state, service))
        if any(job.phase is Phase.WAITING for job in jobs):  # what is missing is room
            load = msgspec.structs.replace(load, tokens=None)
    wished = wish(recent, scale, load, service.wanted, start_ms, now_ms, goals)
    if wished.wanted == 0 and not service.proven and service.failures < TRIES_MAX:
        # No request yet: one replica shows that the version works, then it may scale to zero.
        recent.asked_ms = now_ms
        wished = Wish(1, "the first replica shows that the version works")
    wished = sized_to_sleep(round_, service, jobs, load, wished)
    if wished.wanted != service.wanted:
        _scaled(round_, name, wished.wanted, wished.why)


def _start_ms(state: State, service: Service) -> int:
    """How long the newest replica took from its placement until it was ready."""
    jobs = [(since_ms, state.jobs[job_id]) for job_id, since_ms in service.ready.items()]
    took = [(at_ms, at_ms - (job.placed_ms or at_ms)) for at_ms, job in jobs if not job.naps]
    return max(took, default=(0, 0))[1]


def _scaled(round_: Round, name: str, wanted: int, why: str) -> None:
    round_.emit(ServiceScaled(at_ms=round_.now_ms, service=name, wanted=wanted, why=why))


def _size(round_: Round, service: Service, jobs: list[Job]) -> None:
    """Start missing replicas and drain surplus ones: first old versions and replicas on nodes that
    drain, then those that are not ready."""
    now_ms = round_.now_ms
    wanted = 0 if service.stopping else service.wanted
    staying = [job for job in jobs if job.id not in service.draining and not _ends(job)]
    leaving = {job.id: why for job in staying if (why := _leaving(round_, service, job))}
    new = [job for job in staying if job.id not in leaving]
    old = [job for job in staying if job.id in leaving]
    surge = at_a_time(service.spec, wanted) if old else 0
    missing = min(wanted - len(new), wanted + surge - len(staying))
    if missing > 0 and now_ms < service.retry_ms:
        look_at(round_, service.retry_ms)
    elif missing > 0:
        for _ in range(missing):
            _start(round_, service)
    ready_new = [job for job in new if job.id in service.ready]
    ready_old = side_by_side(round_.state, service, [job for job in old if job.id in service.ready])
    # An old replica that answers, or does when it is awake, stays until a new one answers in its
    # place.
    enough = len(ready_new) + len(ready_old) + sum(job.napping for job in new) >= wanted
    for job in [j for j in old if j.id not in service.ready and (enough or not j.naps)]:
        _drain(round_, service, job, leaving[job.id])
    for job in ready_old[: max(0, len(ready_new) + len(ready_old) - wanted)]:
        _drain(round_, service, job, leaving[job.id])
    for job in leave_first(round_, service, jobs, [j for j in ready_old if _serves(service, j)]):
        _drain(round_, service, job, f"{leaving[job.id]}, and its room is needed for that")
    _empty_nodes(round_, service, old, new)
    too_many = len(new) - wanted
    if too_many > 0:
        spare = sorted(new, key=lambda job: (job.id in service.ready, -job.number))
        for job in spare[:too_many]:
            _drain(
                round_,
                service,
                job,
                f"{plural(wanted, 'replica')} {'is' if wanted == 1 else 'are'} wanted",
            )


def _serves(service: Service, job: Job) -> bool:
    return job.id in service.ready and job.id not in service.draining


def _leaving(round_: Round, service: Service, job: Job) -> str:
    """Why another replica replaces this one; empty if none does."""
    if job.spec.version != service.version:
        return f"version {job.spec.version} is replaced"
    return _drained(round_, job, lead_ms(round_.state, job))


def _drained(round_: Round, job: Job, lead: int) -> str:
    """Why it has to leave its node; empty if it can stay. `lead`: so long before the node's end."""
    for member in job.members if job.active else ():
        node = round_.state.nodes[member.slice.node]
        if node.end is not None and node.end.at_ms - lead <= round_.now_ms:
            return f"{node.id} {end_text(node.end, round_.now_ms)}"
        if node.intent is NodeIntent.DRAINING:
            return f"{node.id} is being drained"
    return ""


def _empty_nodes(round_: Round, service: Service, old: list[Job], new: list[Job]) -> None:
    """A replica that answers on a node that drains stays until another one answers; but it leaves
    if there is no room for another, or none gets ready: what it has in flight is answered first,
    unless the node ends. There it stays for as long as it can."""
    staying = [job for job in old if job.id not in service.draining and not _ends(job)]
    found = ((job, _drained(round_, job, stop_ms(round_.state, job))) for job in staying)
    here = [(job, why) for job, why in found if why]
    if not here:
        return
    waits = [j for j in new if j.phase is Phase.WAITING and j.submitted_ms < round_.now_ms]
    if not waits and service.failures < TRIES_MAX:
        look_at(round_, round_.now_ms + LOOK_MS)
        return
    reason = f"{waits[0].mention} waits for room" if waits else "no other replica got ready"
    for job, why in here:
        nodes = [round_.state.nodes[member.slice.node] for member in job.members]
        if _serves(service, job) and all(node.end is None for node in nodes):
            _drain(round_, service, job, f"{why}, and {reason}")
        else:
            _stop(round_, job, StopCause.DRAIN, f"{why}, and {reason}")


def _start(round_: Round, service: Service) -> None:
    state = round_.state
    number = state.next_job
    spec = replica_spec(service.spec, service.version)
    round_.emit(JobSubmitted(at_ms=round_.now_ms, job=f"j{number}", spec=spec))


def replica_spec(spec: ServiceSpec, version: int) -> JobSpec:
    env = spec.replica.env
    return msgspec.structs.replace(
        spec.replica,
        env={**spec.way.root_path_env, **env} if spec.way.root_path_env else env,
        name=spec.replica.name or f"{spec.name}-v{version}",
        service=spec.name,
        version=version,
        restart=Restart.ON_NODE_LOSS,
    )


def _drain(round_: Round, service: Service, job: Job, why: str) -> None:
    if job.phase is Phase.WAITING or job.id not in service.ready:
        _stop(round_, job, StopCause.CANCEL, why)
    else:
        _emit_replica(round_, ReplicaDraining, service, job, why)


def _let_drained_go(
    round_: Round, service: Service, jobs: list[Job], load: ServiceLoad | None
) -> None:
    """Stop replicas that drain when the gateway reports nothing in flight there, or their time is
    over. A replica that was lost meanwhile has nothing left to finish."""
    now_ms = round_.now_ms
    known = load is not None and load.tells
    busy: list[Job] = []
    drained: list[Job] = []
    for job in jobs:
        since_ms = service.draining.get(job.id)
        if since_ms is None or _ends(job):
            continue
        seen = load.replicas.get(job.id) if load is not None else None
        quiet = known and now_ms - since_ms >= 2 * LOOK_MS and not (seen and seen.in_flight)
        over = now_ms - since_ms >= service.spec.drain_ms
        if (quiet and over) or (job.id not in service.ready and not job.napping):
            _stop(round_, job, StopCause.CANCEL, "drained")
        elif over:
            _stop(round_, job, StopCause.CANCEL, "its time to drain is over")
        else:
            (drained if quiet else busy).append(job)
    for job in by_rack(round_.state, jobs, busy, drained):
        _stop(round_, job, StopCause.CANCEL, "drained")
    for job in busy + drained:
        if not _ends(job):
            look_at(round_, min(now_ms + LOOK_MS, service.draining[job.id] + service.spec.drain_ms))


def _stop(round_: Round, job: Job, cause: StopCause, why: str) -> None:
    if not _ends(job):
        cancel(round_, job, why, cause)


def _ends(job: Job) -> bool:
    return job.phase in (Phase.STOPPING, Phase.FINISHED)


def _emit_replica(
    round_: Round,
    kind: type[ReplicaReady] | type[ReplicaDraining],
    service: Service,
    job: Job,
    why: str,
) -> None:
    round_.emit(kind(at_ms=round_.now_ms, service=service.spec.name, job=job.id, why=why))


# -- what a service may have of the gateway that all tenants share: hosts, paths and ports ---------


def within(scope: str, service: Service) -> bool:
    return scope in (EVERY_TENANT, service.spec.replica.tenant)


def owner_of(state: State, tenant: str) -> str:
    """Empty for the operator, and in a cluster that keeps no tenants apart."""
    known = tenant in state.identity.tenants or tenant in state.identity.removed
    return tenant if known else ""


def taken(state: State, request: SetService) -> Refused | None:
    """With two services at one address, the gateway could serve neither. A service that may still
    go back to its version before keeps that address too."""
    spec, claims = request.spec, Claims()
    others = [one for one in state.services.values() if one.spec.name != spec.name]
    for other in others:
        for known in (other.before, other.spec):
            if known is not None:
                claims.add(known.way, owner_of(state, known.replica.tenant))
    clash = claims.clash(spec.way, owner_of(state, spec.replica.tenant))
    if clash is None:
        return None
    seen = within(request.scope, state.services[clash.holder])
    by = f"service {clash.holder}" if seen else "another tenant"
    return Refused(clash.field, f"{clash.claim} is already used by {by}")


def ungranted(state: State, request: SetService) -> Refused | None:
    """A host, a port and a certificate of its own take a part of what all tenants share, so a
    tenant that was added needs them granted. What an admin has set for the service may stay."""
    spec, tenant = request.spec, request.spec.replica.tenant
    if request.scope == EVERY_TENANT or tenant not in state.identity.tenants:
        return None
    known, way = state.services.get(spec.name), spec.way
    before = [one.way for one in (known.spec, known.before) if one] if known is not None else []
    lineage = state.accounts.lineage(tenant)
    for field, grant, granted in (
        ("host", f"hosts: {way.host}", grants_host(lineage, way.host)),
        ("port", f"ports: {way.port}", grants_port(lineage, way.port)),
        ("certificate", f"ports: {way.port}", grants_port(lineage, way.port)),
    ):
        value = getattr(way, field)
        if value and not granted and not _had(before, field, value):
            fix = f"an admin may grant it in the policy: tenants: {{{tenant}: {{{grant}}}}}"
            return Refused(field, f"{value} is not granted to {tenant}; {fix}")
    if spec.adapters.startswith("/") and (known is None or known.spec.adapters != spec.adapters):
        fix = "let the replicas load theirs by their command, or ask an admin to set it"
        return Refused(
            "adapters", f"the folders in {spec.adapters} would be listed on the head; {fix}"
        )
    return None


def _had(before: list[Route], field: str, value: object) -> bool:
    return any(getattr(one, field) == value for one in before)
