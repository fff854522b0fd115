"""What should run minus what runs: the commands that make the nodes match the state."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from shoal.core.features.fabric.rdma import may_use
from shoal.core.features.lease import lease_of, renewals
from shoal.core.features.service.sleep import may_freeze
from shoal.core.features.sleep import naps_wanted
from shoal.core.scheduling.meeting import lone_point
from shoal.core.scheduling.roots import copying, travels
from shoal.core.state.events.runs import JobPlaced, JobStopping
from shoal.core.state.events.sleep import JobDozing, JobWaking, SleepRefused
from shoal.core.state.own_members import Strays, present
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.commands import Acknowledge, Command, Launch, Limits, Sleep, Stop, Wake
from shoal.model.durations import rfc3339
from shoal.model.job import (
    ARGUMENT_BYTES_MAX,
    Job,
    MemberRef,
    MemberStatus,
    Phase,
    StopCause,
    for_members,
)
from shoal.model.neighbor import handed_here
from shoal.model.node import JOB_GPUS
from shoal.model.policy import Policy
from shoal.model.reason import render
from shoal.model.report import NodeReport
from shoal.model.resources import WHOLE_GPU_MILLI

# A member that the state does not know has no spec; it gets a moment to end well.
STRANGER_GRACE_MS = 2_000
# Enough for a SIGTERM handler to write a line; the whole gang waits for it.
PEERLESS_GRACE_MS = 100
LARGE_GANG = 16  # members; the environment of a smaller gang is built each time
GANG_VIEWS_MAX = 64
_encode = msgspec.json.Encoder().encode
# Events after which all members of a job get a command.
DECIDED = (JobPlaced, JobStopping, JobDozing, JobWaking, SleepRefused)
HOSTS = "SHOAL_HOSTS"
# Of larger gangs only member 0 gets the list: for all of them it would grow with the square.
EVERYWHERE_MAX = 256


def reconcile(round_: Round, inventories: list[NodeReport]) -> list[Command]:
    """Commands for what was decided in this step, and for every node that reported in it.

    A command that gets lost is derived again from the next inventory of its node.
    """
    state = round_.state
    commands: dict[MemberRef, Command] = {}
    views: dict[str, GangView] = {}  # of the gangs that get commands in this step
    decided = [event.job for event in round_.events if isinstance(event, DECIDED)]
    for job_id in (*decided, *round_.quiet):
        job = state.jobs.get(job_id)
        if job is not None and job.active and not _waits(state, job):
            for number, member in enumerate(job.members):
                if not member.over and not _unheard(state, job, member.slice.node):
                    ref = MemberRef(job.id, job.attempt, number)
                    commands[ref] = _command(state, job, ref, views)
    acknowledgements: list[Command] = []
    if state.leases:
        acknowledgements += renewals(round_, inventories)
    for inventory in inventories:
        strays = round_.strays[inventory.spec.id]
        _compare(state, inventory, strays, commands, acknowledgements, views)
    return [*commands.values(), *acknowledgements]


def _compare(
    state: State,
    inventory: NodeReport,
    strays: Strays,
    commands: dict[MemberRef, Command],
    acknowledgements: list[Command],
    views: dict[str, GangView],
) -> None:
    node_id = inventory.spec.id
    placed = state.placed[node_id]
    for ref in (*(one.ref for one in inventory.exits), *strays.exits):
        if ref not in placed:
            acknowledgements.append(
                Acknowledge(node=node_id, incarnation=inventory.incarnation, ref=ref)
            )
    # A member that is getting ready has its command already, like one that is alive.
    alive = present(inventory, strays)
    told = {*inventory.stopping, *strays.stopping}
    strangers = [ref for ref in alive if ref not in placed]
    for ref in strangers:
        if ref not in told:
            commands[ref] = Stop(
                node=node_id,
                incarnation=inventory.incarnation,
                ref=ref,
                grace_ms=STRANGER_GRACE_MS,
                why="the controller does not want it there",
            )
    some_sleep = bool(inventory.asleep or inventory.refused)
    for ref, job in placed.items():
        if job.phase is Phase.STOPPING:
            missing = ref not in told
        elif (
            job.phase is not Phase.STARTING
            and (some_sleep or job.phase is not Phase.RUNNING)
            and (naps := naps_wanted(job, ref, inventory)) is not None
        ):
            if (naps or not strangers) and not _waits(state, job):
                commands[ref] = _nap(state, job, ref, asleep=naps)
            continue
        else:
            # While a stranger may sit on its GPUs, the node would refuse to start or to wake it.
            pending = job.members[ref.member].status is MemberStatus.PENDING
            missing = pending and ref not in alive and not strangers
            missing = missing and not _unheard(state, job, node_id)
        if missing:
            commands[ref] = _command(state, job, ref, views)


def _unheard(state: State, job: Job, node: str) -> bool:
    """It must not start on a node of which we do not know that it ends leases."""
    starts = job.until_ms and job.phase is Phase.STARTING
    return bool(starts) and lease_of(state, job, node) is None


def _waits(state: State, job: Job) -> bool:
    """A replica is not put to sleep while it answers requests."""
    return job.phase is Phase.DOZING and not may_freeze(state, job)


def _nap(state: State, job: Job, ref: MemberRef, *, asleep: bool) -> Command:
    slice_ = job.members[ref.member].slice
    node = state.nodes[slice_.node]
    if asleep:
        return Sleep(node=node.id, incarnation=node.incarnation, ref=ref)
    return Wake(node=node.id, incarnation=node.incarnation, ref=ref, gpus=slice_.gpus)


def _command(state: State, job: Job, ref: MemberRef, views: dict[str, GangView]) -> Command:
    slice_ = job.members[ref.member].slice
    node = state.nodes[slice_.node]
    if job.phase is Phase.STOPPING:
        return Stop(
            node=node.id,
            incarnation=node.incarnation,
            ref=ref,
            grace_ms=_grace_ms(state, job),
            why=render(job.why, job.reader),  # its own log may quote it
            dump=_is_stuck(state, job, ref.member),
        )
    if job.napping:
        return _nap(state, job, ref, asleep=job.phase is not Phase.WAKING)
    view = views.get(job.id)
    if view is None:
        view = views[job.id] = _view_of(state, job)
        view.alike = _alike(state, job, view)
    return Launch(
        **view.alike,
        node=node.id,
        incarnation=node.incarnation,
        ref=ref,
        env=view.environment(ref.member),
        gpus=slice_.gpus,
        gpu_milli=slice_.gpu_milli,
        copies=ref.member in view.copying,
        lease=lease_of(state, job, node.id) or msgspec.UNSET if job.until_ms else msgspec.UNSET,
    )


def _alike(state: State, job: Job, view: GangView) -> dict[str, Any]:
    """What is the same in the commands that start its members."""
    return {
        **for_members(job.spec),
        "encrypt_network": job.spec.encrypt_network and view.nodes > 1,
        "argv": job.spec.command,
        "gpu_memory_mb": job.spec.gpu_memory_mb if job.spec.gpu_milli == 0 else 0,
        "uid": uid_of(state, job.spec.tenant),
        "limits": _limits(state.policy, rdma=may_use(state, job.spec)),
        "keeps": True,
        "travels": view.travels,
        "continues": view.travels and handed_here(job.spec),
        "peers": view.travels and state.policy.checkpoint_peers,
        "data_mbit_s": state.policy.data_mbit_s,
    }


def _limits(policy: Policy, *, rdma: bool) -> Limits:
    ports = (policy.port_first, policy.port_first + policy.port_count)
    return Limits(policy.processes_max, policy.cpu_hard, policy.gpu_over, ports, rdma)


def uid_of(state: State, tenant: str) -> int:
    """Tenants that the operator has added are kept apart. Others are the operator under another
    name, for shares and reports."""
    record = state.identity.tenants.get(tenant)
    return record.uid if record is not None else 0


def _view_of(state: State, job: Job) -> GangView:
    """Members of a large gang start over many steps: looking at all of them for each one would
    take time that grows with the square of their number."""
    if len(job.members) < LARGE_GANG:
        return GangView(state, job)
    view: GangView | None = state.caches.gang_views.get(job.id)
    if view is None or view.attempt != job.attempt:
        state.caches.gang_views.pop(job.id, None)
        while len(state.caches.gang_views) >= GANG_VIEWS_MAX:
            del state.caches.gang_views[next(iter(state.caches.gang_views))]
        view = state.caches.gang_views[job.id] = GangView(state, job)
    return view


def _grace_ms(state: State, job: Job) -> int:
    """A job that hangs, or that trains in step with a peer that is gone, has nothing to save and
    would only use up its grace time."""
    if job.stop_cause is StopCause.HANG:
        return min(job.spec.stop_grace_ms, STRANGER_GRACE_MS)
    if job.stop_cause in (StopCause.FAILURE, StopCause.NODE_LOSS) and job.id in state.heard.watches:
        return min(job.spec.stop_grace_ms, PEERLESS_GRACE_MS)
    return job.spec.stop_grace_ms


def _is_stuck(state: State, job: Job, number: int) -> bool:
    watch = state.heard.watches.get(job.id)
    return job.stop_cause is StopCause.HANG and watch is not None and number in watch.stuck


class Seat(NamedTuple):
    """The place of a member in its gang, in torchrun's terms; a group is the part on one node."""

    local_rank: int
    local_size: int
    group_rank: int
    groups: int


ALONE = Seat(0, 1, 0, 1)


def seating(job: Job) -> list[Seat]:
    """The seats of all members, in one pass over the gang."""
    if len(job.members) == 1:
        return [ALONE]
    sizes: dict[str, int] = {}
    ranks = []
    for member in job.members:
        node = member.slice.node
        ranks.append(sizes.get(node, 0))
        sizes[node] = ranks[-1] + 1
    groups = {node: rank for rank, node in enumerate(sizes)}
    return [
        Seat(rank, sizes[member.slice.node], groups[member.slice.node], len(groups))
        for rank, member in zip(ranks, job.members, strict=True)
    ]


class GangView:
    """The environment of a gang's members: the user's variables, torchrun's, and ours. The part
    that all of them share is built once.

    A process that is alone gets no variables of a gang: scripts take RANK for a sign that they
    should join one. An elastic gang is a gang even with one member.
    """

    def __init__(self, state: State, job: Job) -> None:
        members = str(len(job.members))
        address, port = _meeting_point(state, job)
        self.attempt = job.attempt
        self.alike: dict[str, Any] = {}  # fields of the commands that start its members
        self._job = job
        self._seats = seating(job)
        self._visible = _visible(job)
        self._of_job = _of_job(job)
        # Each member is a machine of its own, whose GPUs it counts from 0.
        self._as_machines = bool(job.spec.gpus and not job.spec.members_per_node)
        self.travels = travels(state, job)
        self.copying = copying(state, job) if self.travels else frozenset[int]()
        self._alone = len(job.members) == 1 and not job.spec.elastic
        self._ranked = not self._alone and not job.spec.launcher
        self._hosts = "" if self._alone and not job.spec.launcher else hosts_text(state, job)
        self.nodes = self._seats[0].groups
        self._groups = len(job.members) if self._as_machines else self.nodes
        between_ms = state.wear.between_ms(self.nodes)
        self._shared = {
            "SHOAL_MTBF_S": str(between_ms // 1000),  # for how often to save; the user may set it
            **({} if job.spec.service and self._alone else _for_torchrun(job, address, port)),
            **({} if job.spec.service else for_trackers(job)),
            **job.spec.env,
            **({} if self._alone else _of_gang(job, self._groups, address, port)),
            "SHOAL_JOB_ID": job.id,
            "SHOAL_JOB_NAME": job.spec.name or "",
            "SHOAL_RUN_ID": run_id(job),
            "SHOAL_ATTEMPT": str(job.attempt),
            "SHOAL_MEMBERS": members,
            "SHOAL_TENANT": job.spec.tenant,
            **(_of_service(job) if job.spec.service else {}),
            **(_of_schedule(job) if job.spec.schedule else {}),
        }

    def environment(self, number: int) -> dict[str, str]:
        seat, slice_ = self._seats[number], self._job.members[number].slice
        gpus = ",".join(map(str, slice_.gpus))
        rank = str(number)
        env = {
            **self._shared,
            "CUDA_VISIBLE_DEVICES": self._visible.get(slice_.node, gpus),
            "SHOAL_MEMBER": rank,
            "SHOAL_NODE": slice_.node,
            "SHOAL_GPUS": gpus,
            "SHOAL_GPU_MILLI": str(slice_.gpu_milli),
        }
        if slice_.node in self._of_job:
            env[JOB_GPUS] = self._of_job[slice_.node]
        if self._job.spec.service and number == 0:
            env.update(_door(self._job))
        if self._hosts and (number == 0 or seat.groups <= EVERYWHERE_MAX):
            env[HOSTS] = self._hosts
        if not self._alone:
            env["PET_NODE_RANK"] = rank
        if self._ranked:
            seat = Seat(0, 1, number, self._groups) if self._as_machines else seat
            env["RANK"] = env["ROLE_RANK"] = rank
            env["LOCAL_RANK"] = str(seat.local_rank)
            env["LOCAL_WORLD_SIZE"] = str(seat.local_size)
            env["GROUP_RANK"] = str(seat.group_rank)
        return env


def _meeting_point(state: State, job: Job) -> tuple[str, str]:
    if job.master:
        address, _, port = job.master.rpartition(":")
        return address, port
    own, number = lone_point(state, job)
    return own, str(number)


def _of_gang(job: Job, groups: int, address: str, port: str) -> dict[str, str]:
    """What torchrun sets for all processes that it starts. With a run id, libraries believe the
    ranks they find (Lightning). Rank 0 holds the store, because there is no launcher to hold it."""
    members = str(len(job.members))
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "PET_NNODES": members}
    if job.spec.launcher:  # its processes get their ranks from what starts them
        return meeting
    return {
        **meeting,
        "WORLD_SIZE": members,
        "ROLE_WORLD_SIZE": members,
        "GROUP_WORLD_SIZE": str(groups),
        "TORCHELASTIC_RUN_ID": job.id,
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(job.spec.retries),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _for_torchrun(job: Job, address: str, port: str) -> dict[str, str]:
    """Defaults for torchrun's flags, where its own would be wrong here. Members that run torchrun
    form one world with a process for each GPU. A torchrun that is alone does not use the port
    that every other torchrun of the machine uses."""
    slice_ = job.members[0].slice
    return {
        "PET_NPROC_PER_NODE": str(max(1, len(slice_.gpus))),
        "PET_MASTER_ADDR": f"[{address}]" if ":" in address else address,
        "PET_MASTER_PORT": port,
    }


def _visible(job: Job) -> dict[str, str]:
    """The GPUs that the members on a node share as torchrun's processes do: each sees all of them
    and uses the one with the number of its local rank. A gang gets this if it sets the members per
    node and gives each of them one GPU."""
    if not job.spec.members_per_node:
        return {}
    slices = [member.slice for member in job.members]
    if any(len(slice_.gpus) != 1 or slice_.gpu_milli != WHOLE_GPU_MILLI for slice_ in slices):
        return {}
    seen: dict[str, list[str]] = {}
    for slice_ in slices:
        seen.setdefault(slice_.node, []).append(str(slice_.gpus[0]))
    return {node: ",".join(gpus) for node, gpus in seen.items()}


def _of_job(job: Job) -> dict[str, str]:
    """By node, all GPUs of a gang that has several members there. They may open them: NCCL finds
    NVLink between its processes only if each of them can see both ends (ADR 136)."""
    if len(job.members) == 1 or job.members[0].slice.gpu_milli != WHOLE_GPU_MILLI:
        return {}
    found: dict[str, list[int]] = {}
    for member in job.members if job.spec.gpus else ():
        found.setdefault(member.slice.node, []).extend(member.slice.gpus)
    return {
        node: ",".join(map(str, sorted(gpus)))
        for node, gpus in found.items()
        if len(gpus) > job.spec.gpus
    }


def _of_schedule(job: Job) -> dict[str, str]:
    return {
        "SHOAL_SCHEDULE": job.spec.schedule,
        "SHOAL_SCHEDULED_AT": rfc3339(job.spec.scheduled_ms),
    }


def _of_service(job: Job) -> dict[str, str]:
    return {"SHOAL_SERVICE": job.spec.service, "SHOAL_SERVICE_VERSION": str(job.spec.version)}


def _door(job: Job) -> dict[str, str]:
    """Member 0 of a replica answers on this port, at the address of its node, where the gateway
    looks for it. If it listens on all addresses, it is found as well."""
    address, _, port = job.serves_at.rpartition(":")
    return {"HOST": job.spec.env.get("HOST", address), "PORT": port}


def hosts_text(state: State, job: Job) -> str:
    """The nodes of a gang as launchers want them: host1:8,host2:8, in the order of the members.
    Nodes that share an address go by their ids. A slot is a GPU, or a CPU if there are none. Empty
    if no process could be given so long a text."""
    slots = job.spec.gpus or max(1, job.spec.cpu_milli // 1000)
    nodes = Counter(member.slice.node for member in job.members)
    address = {node: state.nodes[node].spec.address for node in nodes}
    shared = Counter(address.values())
    names = {node: node if shared[place] > 1 else place for node, place in address.items()}
    text = ",".join(f"{names[node]}:{slots * count}" for node, count in nodes.items())
    return text if len(HOSTS) + 1 + len(text) <= ARGUMENT_BYTES_MAX else ""


def run_id(job: Job) -> str:
    """Of this job forever, over all its attempts. Job ids alone begin again with each cluster."""
    return f"{job.id}-{job.submitted_ms:x}"


def for_trackers(job: Job) -> dict[str, str]:
    """Variables by which experiment trackers recognize a job (docs/python.md): defaults, the job's
    own win. Only what labels and groups runs is set. Which run a process continues stays the
    script's decision: a script may track several runs, and with a run id in the environment all of
    them would become one."""
    array = job.id.partition(".")[0]  # elements of an array are one group
    prefix = f"{job.spec.name}-" if job.spec.name else ""
    tags = {"shoal.run_id": run_id(job), "shoal.job": job.id, "shoal.tenant": job.spec.tenant}
    return {
        "WANDB_RUN_GROUP": f"{prefix}{array}",
        "WANDB_NAME": f"{prefix}{job.id}",
        "MLFLOW_RUN_CONTEXT": _encode(tags).decode(),
    }
