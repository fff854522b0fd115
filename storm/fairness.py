"""What each job really got: no job is stopped for a less entitled one, and wishes are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobPlaced, JobStopping
from shoal.core.state.events.sleep import JobDozing
from shoal.model.job import JobSpec, SleepCause, StopCause, Within
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Preempt
from shoal.model.resources import Slice
from storm.jobtruth import JobTruth
from storm.lives import Untruth


def wishes_kept(event: JobPlaced, spec: JobSpec, nodes: Mapping[str, NodeSpec]) -> None:
    """It got the right GPUs, the right number of members on each node, and near enough nodes."""
    used = [slice_.node for slice_ in event.slices]
    for slice_ in event.slices:
        node = nodes[slice_.node]
        if spec.image and not node.containers:
            raise Untruth(f"{event.job} runs in an image, which {slice_.node} cannot run")
        if slice_.gpus and not _suits(spec, slice_, node):
            raise Untruth(f"{event.job} was given GPUs that it did not ask for: {slice_} of {node}")
    if spec.members_per_node and any(used.count(n) != spec.members_per_node for n in used):
        raise Untruth(f"{event.job} wants {spec.members_per_node} on a node and is on {used}")
    if spec.within_required and spec.within is not Within.ANYWHERE and len(set(used)) > 1:
        depth = {Within.RACK: 2, Within.BLOCK: 1}.get(spec.within)
        places = {tuple(nodes[name].place.split("/")[:depth]) for name in used}
        if depth is None or len(places) > 1 or len(places.pop()) < depth:
            raise Untruth(f"{event.job} must stay within one {spec.within.value} but is on {used}")


def _suits(spec: JobSpec, slice_: Slice, node: NodeSpec) -> bool:
    share = spec.gpu_milli or -(-1000 * spec.gpu_memory_mb // max(1, node.gpu_memory_mb))
    return (
        (not spec.gpu_models or node.gpu_model in spec.gpu_models)
        and node.gpu_memory_mb >= spec.gpu_memory_mb
        and slice_.gpu_milli == share
        and max(slice_.gpus) < node.gpus
    )


def stands_alone(
    job: str, slices: Sequence[Slice], spec: JobSpec, jobs: Iterable[JobTruth]
) -> None:
    """A job that wants whole nodes has them alone; an empty slice does not count, nor does a job
    that sleeps."""
    mine = {slice_.node for slice_ in slices}
    takes = any(map(_takes, slices))
    for other in jobs:
        if other.id != job and not other.asleep and (spec.whole_nodes or other.spec.whole_nodes):
            shared = {slice_.node for slice_ in other.held if _takes(slice_)} & mine
            if shared and takes:
                raise Untruth(f"{job} is beside {other.id} on {sorted(shared)}")


def _takes(slice_: Slice) -> bool:
    return bool(slice_.gpus or slice_.cpu_milli or slice_.memory_mb)


class Entitlements:
    """Follows which job is stopped for which. A victim is never more entitled than its beneficiary:
    what is within a quota is not stopped for what is beyond one, nor among the same what has a
    higher priority."""

    def __init__(self, policy: Policy, jobs: Mapping[str, JobTruth]) -> None:
        self.policy = policy
        self._jobs = jobs
        self._claims: dict[str, tuple[Slice, ...]] = {}  # of jobs that hold nothing yet
        self._victims: list[str] = []

    def done(self) -> None:
        """All of this is decided within one step."""
        self._victims = []

    def node_closed(self, node: str) -> None:
        """It is lost or quarantined: claims on it are void."""
        for job_id, given in list(self._claims.items()):
            if any(slice_.node == node for slice_ in given):
                del self._claims[job_id]

    def stopping(self, event: JobStopping) -> None:
        if event.cause in (StopCause.PREEMPT, StopCause.RESIZE):
            self._victims.append(event.job)

    def dozing(self, event: JobDozing) -> None:
        """Turns go by time, not by entitlement."""
        if event.cause is SleepCause.PREEMPT:
            self._victims.append(event.job)

    def claimed(self, event: JobClaimed) -> None:
        job = self._jobs[event.job]
        if event.job in self._victims:
            if len(event.slices) > len(job.held):
                self._victims.remove(event.job)  # it stops in order to grow
            return
        for number, victim in enumerate(self._victims):
            self._judge(job, self._jobs[victim], [self._jobs[v] for v in self._victims[:number]])
        self._victims = []
        self._claims[event.job] = event.slices

    def settled(self, job_id: str) -> None:
        """It was placed, gave its claim up, or is over."""
        self._claims.pop(job_id, None)

    def _judge(self, job: JobTruth, victim: JobTruth, before: list[JobTruth]) -> None:
        if any(other.spec.gpus and not other.spec.gpu_milli for other in self._jobs.values()):
            return  # only the controller knows how much a share by memory counts
        spec = job.spec
        more = spec.gpus * spec.members * spec.gpu_milli
        within = self._within(spec.tenant, more, claims=True, less=())
        if self._within(victim.spec.tenant, 0, claims=False, less=before) and not within:
            raise Untruth(f"{victim.id} was stopped within its quota for {job.id} beyond its own")
        over = not self._within(victim.spec.tenant, 0, claims=False, less=())
        if within and over:
            return  # borrowed GPUs are taken back, whatever the priority
        equal = victim.spec.priority == spec.priority and self.policy.preempt is Preempt.RANK
        if victim.spec.priority >= spec.priority and not equal:
            raise Untruth(f"{victim.id} was stopped for {job.id} of no higher priority")

    def _within(self, tenant: str, more: int, *, claims: bool, less: Iterable[JobTruth]) -> bool:
        guarantor = self._guarantor(tenant)
        if guarantor is None:
            return False
        held = more
        gone = {job.id for job in less}
        for job in self._jobs.values():
            if self._guarantor(job.spec.tenant) == guarantor and job.id not in gone:
                claimed = self._claims.get(job.id, ()) if claims else ()
                given = () if job.asleep else job.held or claimed
                held += sum(len(slice_.gpus) * slice_.gpu_milli for slice_ in given)
        return held <= 1000 * guarantor[1]

    def _guarantor(self, name: str) -> tuple[str, int] | None:
        """The nearest of the tenant and its ancestors that has a quota."""
        tenants = {tenant.name: tenant for tenant in self.policy.tenants}
        while name in tenants and not tenants[name].quota_gpus:
            name = tenants[name].parent
        return (name, tenants[name].quota_gpus) if name in tenants else None
