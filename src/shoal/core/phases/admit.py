"""Users' requests: each is accepted, or refused with the field at fault and what would work."""

from __future__ import annotations

import msgspec

from shoal.core.books.quarantine import released
from shoal.core.features.access import change_api_keys
from shoal.core.features.array import (
    cancel_array,
    no_live_job,
    retry,
    too_many_arrays,
)
from shoal.core.features.caps import (
    above_cap,
    above_gpus_max,
    too_large,
    too_many,
    too_many_replicas,
)
from shoal.core.features.ends import forget_set_end, lose, reason, set_end
from shoal.core.features.fabric.tours import begin_tour
from shoal.core.features.identity import change_identity, change_keys, void_keys
from shoal.core.features.labels import (
    kinds_if_asked,
    kinds_with,
    no_such_labels,
    set_labels,
    too_many_values,
)
from shoal.core.features.lease import lease_problem, renew
from shoal.core.features.neighbors import cluster_problem, declare_gone, withdraw
from shoal.core.features.notices import change_notices
from shoal.core.features.schedules import change_schedule
from shoal.core.features.service.serve import set_service, stop_service
from shoal.core.features.service.sites import forget_sites, set_sites
from shoal.core.features.sleep import put_to_sleep, wake
from shoal.core.features.storage import begin_storage
from shoal.core.features.workflow import (
    after_problem,
    cancel_workflow,
    enter,
    enter_all,
    graph_problem,
    submit_instead,
)
from shoal.core.phases.reserved import reserved, reserved_secrets
from shoal.core.phases.spec_problem import shape_problem, spec_problem
from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.scheduling.fit import NO_CONTAINERS
from shoal.core.scheduling.packing import could_bring
from shoal.core.state.ending import cancel, stop
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.nodes import NodeIntended, NodeJudged
from shoal.core.state.queue import Gang, gang_of_spec
from shoal.core.state.room import UNLIMITED
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.health import Standing
from shoal.model.identity import EVERY_TENANT
from shoal.model.ids import array_of
from shoal.model.job import DEFAULT_TENANT, JobSpec, Phase, Restart, StopCause
from shoal.model.labels import admits
from shoal.model.neighbor import HERE, NEVER_RUNS, asks
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import version_of
from shoal.model.reason import render
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    Cancel,
    CancelWorkflow,
    CheckNetwork,
    CheckNode,
    DeclareGone,
    EndSignIn,
    LabelJob,
    NoteJob,
    Nothing,
    PauseSchedule,
    Refused,
    RemoveApiKey,
    RemoveKey,
    RemoveRule,
    RemoveSchedule,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    RenewLease,
    Request,
    Requeue,
    Retry,
    RunSchedule,
    SetApiKey,
    SetEnd,
    SetIntent,
    SetKey,
    SetLabels,
    SetPolicy,
    SetRule,
    SetSchedule,
    SetService,
    SetSites,
    SetToken,
    SetUser,
    SleepJob,
    StopService,
    Submit,
    SubmitWorkflow,
    WakeJob,
    WorkflowJob,
)
from shoal.model.resources import cpus_text, plural
from shoal.model.schedule import ScheduleSpec
from shoal.model.storage import CheckStorage

DRAIN_NAMED_MAX = 5
DEEDS = {
    NodeIntent.OPEN: "opened",
    NodeIntent.CORDONED: "cordoned",
    NodeIntent.DRAINING: "drained",
    NodeIntent.REMOVED: "removed",
}
POSSIBLE_MAX = 4096  # gangs that are known to fit an empty cluster


def admit(round_: Round, requests: tuple[Request, ...]) -> list[Answer]:
    return [_admit_one(round_, request) for request in requests]


def _admit_one(round_: Round, request: Request) -> Answer:
    match request:
        case Submit():
            return _submit(round_, request)
        case SubmitWorkflow():
            return _submit_workflow(round_, request)
        case SetSchedule() | PauseSchedule() | RunSchedule() | RemoveSchedule():
            return change_schedule(round_, request, run_problem)
        case CancelWorkflow():
            return cancel_workflow(round_, request)
        case Cancel():
            return _cancel(round_, request)
        case RenewLease():
            return renew(round_, request)
        case Requeue():
            return _requeue(round_, request)
        case SleepJob():
            return put_to_sleep(round_, request)
        case WakeJob():
            return wake(round_, request)
        case Retry():
            return _retry(round_, request)
        case SetIntent():
            return _set_intent(round_, request)
        case SetEnd():
            return set_end(round_, request)
        case SetLabels():
            return set_labels(round_, request)
        case CheckNode():
            return _check_node(round_, request)
        case CheckNetwork():
            return begin_tour(round_, request)
        case CheckStorage():
            return begin_storage(round_, request)
        case SetService():
            return set_service(round_, request, _replica_problem(round_, request))
        case StopService():
            return stop_service(round_, request)
        case SetSites():
            return set_sites(round_, request)
        case RemoveUser():
            return _remove_user(round_, request)
        case AddTenant() | RemoveTenant() | SetUser() | SetToken() | RemoveToken() | EndSignIn():
            return change_identity(round_, request)
        case LabelJob() | NoteJob() | SetRule() | RemoveRule():
            return change_notices(round_, request)
        case SetKey() | RemoveKey():
            return change_keys(round_, request)
        case SetApiKey() | RemoveApiKey():
            return change_api_keys(round_, request)
        case SetPolicy():
            return set_policy(round_, request)
        case DeclareGone():
            forget_sites(round_, request)
            return declare_gone(round_, request)
        case Nothing():
            return Accepted("")


def _replica_problem(round_: Round, request: SetService) -> Refused | None:
    spec = request.spec.replica
    return (
        out_of_scope(round_.state, request.scope, spec)
        or above_cap(round_.state, spec, request.scope)
        or no_sweep(spec)
        or reserved(spec.env, replica=True)
        or reserved_secrets(spec, spec.env, replica=True)
        or spec_problem(spec)
        or shape_problem(spec)
        or no_neighbor(spec)
        or above_gpus_max(round_.state, spec)
        or impossible(round_.state, spec)
        or too_many_replicas(round_.state, request.spec)
    )


def no_neighbor(spec: JobSpec) -> Refused | None:
    if spec.cluster in ("", HERE) and not spec.if_cut_ms:
        return None
    return Refused("cluster", "is for jobs; a service runs here")


def no_sweep(spec: JobSpec) -> Refused | None:
    if spec.sweep is None and not spec.array:
        return None
    return Refused("array", "is for jobs; a service has replicas")


def _check_node(round_: Round, request: CheckNode) -> Answer:
    state = round_.state
    node = state.nodes.get(request.node)
    if node is None:
        return Refused("node", f"there is no node {request.node}", missing=True)
    if node.health is NodeHealth.LOST:
        return Refused("node", f"{node.id} is lost: {node.why}")
    return Accepted(state.heard.asked.setdefault(node.id, f"m{round_.now_ms}"))


def _submit(round_: Round, request: Submit) -> Answer:
    state = round_.state
    known = state.keys.get(request.key) or round_.finished_keys.get(request.key)
    if request.key and known:
        job = state.jobs.get(known)
        if request.cancelled and job is not None:
            if request.scope not in (EVERY_TENANT, job.spec.tenant):
                return no_live_job(state, known)
            return _cancel(round_, Cancel(known, request.who))
        return Accepted(known, "this submission was already accepted")
    spec = request.spec
    if request.cancelled:
        return _never_runs(round_, request)
    problem = job_problem(round_, spec, request.scope)
    if problem is None and request.until_ms:
        problem = lease_problem(round_, spec, request.until_ms)
    if problem is None and request.instead:
        return submit_instead(round_, request)
    if problem is None:
        problem = no_room(state, (spec,))
    return problem or enter(round_, spec, request.key, request.until_ms)


def _never_runs(round_: Round, request: Submit) -> Answer:
    """Its key is taken, so the same submission, which may still be on its way, is this job. What
    else it asks for does not matter, and nobody has looked at it."""
    denied = out_of_scope(round_.state, request.scope, request.spec)
    if denied is not None or not request.key:
        return denied or Refused("key", "is missing: nothing else names what is cancelled")
    name, tenant = request.spec.name, request.spec.tenant
    bare = msgspec.structs.replace(NEVER_RUNS, name=name, tenant=tenant)
    entered = enter(round_, bare, request.key)
    job = round_.state.jobs[entered.id]
    cancel(round_, job, f"cancelled by {request.who} before it came")
    return entered


def no_room(state: State, specs: tuple[JobSpec, ...]) -> Refused | None:
    """Why these, all of one tenant, are too many or too large now."""
    tenant, count = specs[0].tenant, len(specs)
    many = too_many(state.tally, state.accounts, tenant, count, waiting=count)
    return many or too_large(state.sizes, tenant, sum(map(state.caches.specs.measure, specs)))


def _submit_workflow(round_: Round, request: SubmitWorkflow) -> Answer:
    state, jobs = round_.state, request.jobs
    known = state.keys.get(request.key) or round_.finished_keys.get(request.key)
    if request.key and known:
        return Accepted(known, "this submission was already accepted")
    problem = workflow_problem(round_, jobs, request.scope)
    return problem or enter_all(round_, jobs, request.key)


def workflow_problem(round_: Round, jobs: tuple[WorkflowJob, ...], scope: str) -> Refused | None:
    state = round_.state
    if (problem := graph_problem(jobs)) is not None:
        return problem
    tenant = jobs[0].spec.tenant
    for job in jobs:
        if job.spec.tenant != tenant:
            return Refused(f"{job.name}.tenant", f"all jobs of a workflow run on {tenant}")
        if (problem := job_problem(round_, job.spec, scope)) is not None:
            return msgspec.structs.replace(problem, field=f"{job.name}.{problem.field}")
    return no_room(state, tuple(job.spec for job in jobs))


def run_problem(round_: Round, spec: ScheduleSpec, scope: str) -> Refused | None:
    """Why a run of this schedule would be refused now."""
    if spec.workflow:
        return workflow_problem(round_, spec.jobs, scope)
    job = spec.jobs[0].spec
    return job_problem(round_, job, scope) or no_room(round_.state, (job,))


def job_problem(round_: Round, spec: JobSpec, scope: str) -> Refused | None:
    """Why no such job is accepted, however many there are already."""
    state = round_.state
    denied = out_of_scope(state, scope, spec) or above_cap(state, spec, scope)
    if denied is not None:
        return denied
    if spec.service or spec.version:
        return Refused("service", "is set by Shoal itself; use: shoal serve")
    if spec.workflow or spec.schedule or spec.scheduled_ms:
        field = "workflow" if spec.workflow else "schedule"
        return Refused(field, f"is set by Shoal itself; see: shoal {field} --help")
    if spec.array or spec.index:
        return Refused("array", "is set by Shoal itself; say which elements with sweep")
    env = _env(spec)
    return (
        reserved(env, replica=False)
        or reserved_secrets(spec, env, replica=False)
        or spec_problem(spec)
        or shape_problem(spec)
        or cluster_problem(spec)
        or above_gpus_max(state, spec)
        or (None if asks(spec.cluster) else impossible(state, spec))
        or after_problem(round_, spec, scope)
        or (too_many_arrays(round_.state, spec.tenant) if spec.sweep is not None else None)
    )


def _env(spec: JobSpec) -> dict[str, str]:
    """Every variable that a member would find set by its user."""
    if spec.sweep is None:
        return spec.env
    return {**spec.env, **dict.fromkeys(spec.sweep.variables, "")}


def out_of_scope(state: State, scope: str, spec: JobSpec) -> Refused | None:
    """A tenant that was removed, or whose name is misspelt, has no Unix user: its jobs would run as
    the agent's. A cluster that keeps no tenants apart takes any name that was never one."""
    tenant, added = spec.tenant, state.identity.tenants
    if scope != EVERY_TENANT:
        known = tenant == scope and scope in added
        return None if known else Refused("tenant", "is not yours, or was removed; ask an admin")
    if tenant in state.identity.removed:
        fix = f"add it again with: shoal tenant add {tenant}"
        return Refused("tenant", f"{tenant} was removed, so it has no Unix user; {fix}")
    if not added or tenant in (DEFAULT_TENANT, *added, *(one.name for one in state.policy.tenants)):
        return None
    fix = f"add it with: shoal tenant add {tenant}, or name it in the policy"
    return Refused("tenant", f"there is no tenant {tenant}; {fix}")


def impossible(state: State, spec: JobSpec) -> Refused | None:
    """Would the job never start even if every known node were up and empty? Lost and cordoned
    nodes count because they may come back, and so do nodes that a supply may bring. Before any node
    is known, everything is possible."""
    gang, possible = gang_of_spec(spec), state.caches.possible
    if gang in possible or not any(state.capacity.values()):
        return None
    if (many := too_many_values(state, spec)) is not None:
        return Refused(*many)
    problem = _beyond_nodes(state, spec, gang)
    if problem is None:
        if len(possible) >= POSSIBLE_MAX:
            possible.clear()
        possible.add(gang)
    elif could_bring(state, gang):
        return None
    return problem


def _beyond_nodes(state: State, spec: JobSpec, wanted: Gang) -> Refused | None:
    """Why the known nodes cannot hold it."""
    as_if = kinds_if_asked(state, spec)
    kinds = kinds_with(state, as_if)
    if (unmet := no_such_labels(state, spec, kinds)) is not None:
        return Refused(*unmet)
    demand = spec.demand._replace(tolerates=("*",))  # taints may go away, like a cordon
    kinds = [kind for kind in kinds if admits(demand.where, ("*",), kind.labels, ())]
    where = f" with {' and '.join(demand.where)}" if demand.where else ""
    if demand.image:
        kinds = [kind for kind in kinds if kind.containers]
        if not kinds:
            return Refused("image", NO_CONTAINERS)
        where += " that can run images"
    for field, asked, best, unit in (
        ("gpus", demand.gpus, max(kind.gpus for kind in kinds), "GPUs"),
        ("cpus", demand.cpu_milli, max(kind.cpu_milli for kind in kinds), "CPUs"),
        ("memory", demand.memory_mb, max(kind.memory_mb for kind in kinds), "MB"),
    ):
        if asked > best:
            have, want = (
                (str(best), str(asked)) if field != "cpus" else (cpus_text(best), cpus_text(asked))
            )
            return Refused(
                field,
                f"asks for {want} {unit} per member, but no node{where} has more than {have}; "
                f"ask for at most {have}" + (" and use more members" if best else ""),
            )
    if not any(demand.suits(kind) for kind in kinds):
        models = ", ".join(sorted({kind.gpu_model or "unnamed" for kind in kinds if kind.gpus}))
        field = "gpu_models" if demand.gpu_models else "gpu_memory"
        problem = f"no node{where} has such GPUs ({demand}); there are: {models or 'none'}"
        return Refused(field, problem)
    gang = wanted._replace(demand=demand)
    fits = held_when_empty(state, gang, open_only=False, as_if=as_if)
    if fits == 0:
        largest = max(kinds)
        return Refused(
            "gpus" if demand.gpus else "cpus",
            f"and the rest do not fit together on any node: a member needs {demand}; "
            f"the largest node has {largest}",
        )
    if spec.members > fits and fits < UNLIMITED:
        area = spec.together or spec.within.value
        most = f"no {area}{where} holds more than" if gang.bound else "the whole cluster holds"
        if where and not gang.bound:
            most = f"all nodes{where} hold"
        return Refused(
            "members",
            f"asks for {spec.members} members with {demand} each, but {most} "
            f"{plural(fits, 'such member')}; ask for at most {fits}",
        )
    return None


def _cancel(round_: Round, request: Cancel) -> Answer:
    array = round_.state.arrays.get(request.job)
    if array is not None:
        return cancel_array(round_, array, request)
    job = round_.state.jobs.get(request.job)
    if job is None:
        return no_live_job(round_.state, request.job)
    if job.stop_cause is StopCause.CANCEL or (job.away is not None and job.away.cancelled):
        return Accepted(job.id, "already being cancelled")
    cancel(round_, job, f"cancelled by {request.who}")
    return Accepted(job.id)


def _remove_user(round_: Round, request: RemoveUser) -> Answer:
    """In one step, so that nothing is left half done if the controller dies."""
    answer = change_identity(round_, request)
    if request.end and isinstance(answer, Accepted):
        state, who = round_.state, request.who
        for service in list(state.services.values()):
            if service.spec.replica.user == request.user:
                stop_service(round_, StopService(service.spec.name, who))
        for array in [one.id for one in state.arrays.values() if one.spec.user == request.user]:
            _cancel(round_, Cancel(array, who))
        for job in [one for one in state.jobs.values() if one.spec.user == request.user]:
            if not job.spec.service:
                _cancel(round_, Cancel(job.id, who))
    return answer


def _requeue(round_: Round, request: Requeue) -> Answer:
    if request.job in round_.state.arrays:
        fix = f"requeue a single element, e.g. {request.job}.0, or: shoal retry {request.job}"
        return Refused("job", f"{request.job} is an array; {fix}")
    job = round_.state.jobs.get(request.job)
    if job is None:
        return no_live_job(round_.state, request.job)
    if job.spec.service:
        return Refused("job", f"is a replica of {job.spec.service}; cancel it to get another")
    away = job.away
    if job.phase in (Phase.WAITING, Phase.STOPPING) or (away is not None and away.withdrawn):
        return Accepted(job.id, f"it is already {job.phase.value}")
    if (denied := above_cap(round_.state, job.spec, request.scope)) is not None:
        return denied
    if away is not None:
        withdraw(round_, job, f"requeued by {request.who}")
        return Accepted(job.id, f"it waits here as soon as {away.neighbor} has ended it")
    stop(round_, job, StopCause.MOVE, f"requeued by {request.who}")
    return Accepted(job.id)


def _retry(round_: Round, request: Retry) -> Answer:
    """The tenant of an array that has ended may be gone; a tenant with a live one cannot be."""
    if request.record is not None:
        identity, tenant = round_.state.identity, request.record.spec.tenant
        if tenant in identity.removed or identity.is_earlier(tenant, request.record.id):
            return Refused("job", f"{request.job} is of a tenant {tenant} that was removed")
        gone = out_of_scope(round_.state, EVERY_TENANT, request.record.spec)
        if gone is not None:
            return gone
    array = round_.state.arrays.get(array_of(request.job) or request.job) or request.record
    if array and (denied := above_cap(round_.state, array.spec, request.scope)) is not None:
        return denied
    return retry(round_, request)


def _set_intent(round_: Round, request: SetIntent) -> Answer:
    state = round_.state
    node = state.nodes.get(request.node)
    if node is None:
        return Refused("node", f"there is no node {request.node}", missing=True)
    if request.intent is NodeIntent.OPEN and node.record.standing is not Standing.OK:
        record = released(node.record, request.who, round_.now_ms)
        round_.emit(NodeJudged(at_ms=round_.now_ms, node=node.id, record=record, why=record.why))
        if node.intent is NodeIntent.OPEN:
            return Accepted(node.id)
    if request.intent is NodeIntent.OPEN and node.spec.order:
        order = state.orders.get(node.spec.order)
        if order is None or order.release:
            why = order.release if order is not None else f"order {node.spec.order} has ended"
            return Refused("node", f"{node.id} is being released: {render(why)}")
    opening = request.intent is NodeIntent.OPEN
    if opening and forget_set_end(round_, node, request.who) and node.intent is NodeIntent.OPEN:
        return Accepted(node.id, "it was open; its scheduled drain was cancelled")
    if node.intent is request.intent:
        return Accepted(node.id, f"it is already {request.intent.value}")
    if request.intent is NodeIntent.REMOVED and node.health is not NodeHealth.LOST:
        lose(round_, node, dead=True, why="removed from the cluster")
    round_.emit(
        NodeIntended(
            at_ms=round_.now_ms,
            node=node.id,
            intent=request.intent,
            why=f"{DEEDS[request.intent]} by {request.who}{reason(request.why)}",
        )
    )
    void_keys(round_, node)
    return Accepted(node.id, _kept_by(round_.state, node))


def _kept_by(state: State, node: Node) -> str:
    """Jobs that a drain waits for, because they must not run twice."""
    if node.intent is not NodeIntent.DRAINING:
        return ""
    here = {job.id: job for job in state.placed[node.id].values()}
    never = [job for job in here.values() if job.spec.restart is Restart.NEVER]
    names = ", ".join(f"{job.title}{' (asleep)' * job.napping}" for job in never[:DRAIN_NAMED_MAX])
    more = f" and {len(never) - DRAIN_NAMED_MAX} more" if len(never) > DRAIN_NAMED_MAX else ""
    asleep = "; those that sleep are woken" * any(job.napping for job in never)
    text = f"it is empty when {names}{more} have ended, which must not run twice (restart: never)"
    return text + asleep if never else ""


def set_policy(round_: Round, request: SetPolicy) -> Answer:
    """It is in force for the rest of the step, unless it was made from another one. Whoever asks
    again for what is already in force is told so: an answer may have been lost."""
    now = round_.state.policy
    if request.policy == now:
        return Accepted("", "already in effect; nothing changed")
    if request.expected and request.expected != version_of(now):
        message = "was changed by someone else; review the current one, then try again"
        return Refused("policy", message, late=True)
    event = PolicyChanged(at_ms=round_.now_ms, policy=request.policy, who=request.who)
    round_.emit(event)
    round_.policy = request.policy
    return Accepted("")
