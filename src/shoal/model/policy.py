"""A policy: frozen data that names pure functions and their parameters."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from shoal.model.budget import BudgetPeriod
from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.labels import CONDITION_PATTERN, term_of
from shoal.model.neighbor import NEIGHBORS_MAX, Neighbor
from shoal.model.supply import SUPPLIES_MAX, Supply, problem_with_supplies

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
# Of GPU-hours or money, as people write it; it is counted in microseconds and thousandths.
Amount = Count | Annotated[float, msgspec.Meta(ge=0, le=1_000_000_000_000)]
Span = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]  # in ms, about 30 years at most
FunctionName = Annotated[str, msgspec.Meta(max_length=200)]
PORTS_END = 65_536
SILENT_AFTER_MS_MIN = 1_500  # nodes report every second
TENANTS_MAX = 10_000
VERSION_LETTERS = 16
_PORT = "[0-9]{1,5}"
GRANTS = (
    ("hosts", r"\*|(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*", "chat.example.com or *.lab.example.com"),
    ("ports", rf"\*|{_PORT}(-{_PORT})?", "8443 or 9000-9099"),
)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant submits jobs. Its quota is guaranteed; idle GPUs beyond it may be borrowed and go
    back when their owner wants them. Siblings share their parent's GPUs by weight."""

    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
    parent: Annotated[str, msgspec.Meta(max_length=63)] = ""
    weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    quota_gpus: Count = 0
    gpus_max: Count = 0  # GPUs that it and its branches may hold at a time; 0: no limit of its own
    # What the tenant and its branches may use in a period; 0: no limit.
    budget_gpu_hours: Amount = 0
    budget_money: Amount = 0  # in the currency of the price list
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0  # that its keys may use
    budget_period: BudgetPeriod = BudgetPeriod.MONTH
    # Jobs that it may have at a time, and of these waiting; 0: no limit of its own.
    jobs_max: Count = 0
    waiting_max: Count = 0
    # The highest priority that its members may ask for; services ask for 100.
    priority_max: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 100
    # What services of its members may have of the gateway: `a.example.com, *.lab.example.com` and
    # `8443, 9000-9099`; *: any. Empty: only NAME.DOMAIN and paths on the shared port.
    hosts: Annotated[str, msgspec.Meta(max_length=2_000)] = ""
    ports: Annotated[str, msgspec.Meta(max_length=2_000)] = ""

    @property
    def has_budget(self) -> bool:
        return bool(self.budget_gpu_hours or self.budget_money or self.budget_tokens)


class Preempt(enum.StrEnum):
    """Which waiting jobs may preempt running ones."""

    NEVER = "never"
    PRIORITY = "priority"  # jobs of higher priority, and of tenants within their quota
    RANK = "rank"  # also jobs that come before them in the policy's order


class GpuOver(enum.StrEnum):
    """What happens to a member that uses more of a shared GPU than it asked for."""

    END = "end"
    WARN = "warn"


class Sleeping(enum.StrEnum):
    """Whether jobs that must give up their GPUs are put to sleep."""

    NEVER = "never"
    PREFER = "prefer"  # where that costs less than to stop them


class Places(enum.StrEnum):
    """Where nodes are, for gangs that should be near together."""

    TYPED = "typed"  # as people or engines say
    MEASURED = "measured"  # as tours of the network found it; one never measured as people say


class Rdma(enum.StrEnum):
    """Whose members may open their nodes' InfiniBand and RoCE cards."""

    NOBODY = "nobody"
    OPERATOR = "operator"  # jobs of tenants that were added may not
    EVERYONE = "everyone"


class Others(enum.StrEnum):
    """What a tenant sees of the jobs of others."""

    NOTHING = "nothing"  # only that resources are taken
    TENANTS = "tenants"  # and by which tenant


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults suit one machine; a silent node is given up only after `grace_ms`."""

    name: Annotated[str, msgspec.Meta(max_length=63)] = "fair"
    order: FunctionName = "fair"
    placement: FunctionName = "shoal"
    place: Places = Places.TYPED
    preempt: Preempt = Preempt.RANK
    # How many blocked jobs, from the front of the queue, have room set aside for them.
    reservations: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2
    # A blocked job may be overtaken for this long after it reached the front or after its promised
    # start; then the queue is held for it.
    patience_ms: Count = 3_600_000
    # In `fair`, a job that has waited longer than this, and than 16 times the mean age of the jobs,
    # comes first, one job at a time.
    elder_ms: Count = 24 * 3_600_000
    # Usage from this long ago counts half as much as usage now.
    half_life_ms: Span = 7 * 24 * 3_600_000
    # Usage charged at each start, so that a burst cannot outrun the accounts.
    entry_penalty_ms: Count = 60_000
    run_ms_min: Count = 300_000  # no job is preempted before it has run this long
    # The cost of moving a job, besides the work since its last checkpoint.
    move_cost_ms: Count = 60_000
    # Nodes kept for gangs that lose one; until then only preemptible jobs may use them.
    spares: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    # A gang that counts steps hangs if it makes none for this time and for 20 usual steps.
    hang_after_ms: Count = 60_000
    hangs_max: Count = 3  # a job that hung this often is given up
    # A job whose GPUs are all unused for this time is warned, then gives them back; 0: never.
    idle_warn_ms: Count = 0
    idle_reclaim_ms: Count = 0
    idle_ends: bool = True  # it ends then; if False, it waits to run again
    idle_sleeps: bool = False  # it is put to sleep then, if it can be
    # Jobs that must give up their GPUs for others sleep if that costs less than to stop them.
    sleep: Sleeping = Sleeping.PREFER
    sleepers_max: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 8  # members, on one node
    sleep_memory_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50  # of a node's memory
    # More jobs than GPUs take turns, so long that changing takes this percent of the time at most;
    # 0: they do not take turns.
    turn_cost_percent: Annotated[int, msgspec.Meta(ge=0, le=50)] = 0
    turn_ms_min: Count = 30_000
    # Checkpoints of a job, in MB, that are copied through the head where nodes share no folder for
    # them; 0: none are.
    checkpoint_copy_mb: Count = 20_480
    # They go from node to node instead; the bound is then that of a tenant on each node.
    checkpoint_peers: bool = True
    # How fast a node fetches volumes and packages, and how fast it gives blocks to others; 0: any.
    data_mbit_s: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    retest_ms: Span = 600_000  # first wait before a node in quarantine is checked again
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=TENANTS_MAX)] = ()
    budget_stops: bool = False  # running jobs of a tenant without budget stop and wait, too
    others: Others = Others.NOTHING
    # Labels of this cluster that neighbors are told: `region=eu, power=hydro`.
    site: Annotated[str, msgspec.Meta(max_length=2_000)] = ""
    # Processes and threads of a member; 0: no limit.
    processes_max: Annotated[int, msgspec.Meta(ge=0, le=4_194_304)] = 16_384
    cpu_hard: bool = False  # a member gets no more CPU than it asked for, even if some is idle
    gpu_over: GpuOver = GpuOver.END
    # Cards go past the kernel, and so past its firewall and its rules about ports.
    rdma: Rdma = Rdma.OPERATOR

    # Where nodes come from when they are wanted.
    supply: Annotated[tuple[Supply, ...], msgspec.Meta(max_length=SUPPLIES_MAX)] = ()

    # What of ours may go to other clusters.
    neighbors: Annotated[tuple[Neighbor, ...], msgspec.Meta(max_length=NEIGHBORS_MAX)] = ()

    # Stored under its name before 0.2.
    silent_after_ms: Count = msgspec.field(default=5_000, name="suspect_after_ms")
    grace_ms: Count = 60_000
    # Node losses do not use up a job's retries, but retries are always bounded.
    losses_max: Count = 100
    backoff_ms_max: Count = 300_000
    # Ports of gangs and replicas lie below those that Kubernetes gives to services (30000-32767)
    # and those that Linux gives to outgoing connections.
    port_first: Annotated[int, msgspec.Meta(ge=1024, le=65_535)] = 20_000
    port_count: Annotated[int, msgspec.Meta(ge=1, le=64_000)] = 10_000
    # One step places at most this many jobs and asks to be called again, so that no step is long.
    placements_per_step_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200

    def tenant(self, name: str) -> Tenant:
        """A tenant that the policy does not name has no parent and no guarantee."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        return Tenant(name=name)

    def neighbor(self, name: str) -> Neighbor:
        """One that the policy does not name takes jobs that ask for it."""
        for neighbor in self.neighbors:
            if neighbor.name == name:
                return neighbor
        return Neighbor(name=name)

    def lineage(self, name: str) -> tuple[Tenant, ...]:
        """The path from the root of the tree to the tenant; a checked policy has no cycle."""
        chain = [self.tenant(name)]
        while chain[-1].parent and len(chain) <= len(self.tenants):
            chain.append(self.tenant(chain[-1].parent))
        return tuple(reversed(chain))


def grants_host(lineage: Iterable[Tenant], host: str) -> bool:
    """What is granted to a tenant is granted to its branches."""
    bare = host.lower().rstrip(".")
    for grant in (one for tenant in lineage for one in _listed(tenant.hosts)):
        if grant in ("*", bare) or (grant.startswith("*.") and bare.endswith(grant[1:])):
            return True
    return False


def grants_port(lineage: Iterable[Tenant], port: int) -> bool:
    for grant in (one for tenant in lineage for one in _listed(tenant.ports)):
        first, _, last = grant.partition("-")
        if grant == "*" or int(first) <= port <= int(last or first):
            return True
    return False


def site_labels(policy: Policy) -> dict[str, str]:
    return {term.key: term.values[0] for term in map(term_of, _listed(policy.site))}


def _listed(text: str) -> list[str]:
    return [part.strip().lower() for part in text.split(",") if part.strip()]


class SetPolicy(msgspec.Struct, frozen=True):
    """`expected` is the version of the policy that this one was made from; if another is in force
    meanwhile, it is refused. Empty: it replaces whatever is in force."""

    policy: Policy
    who: str = "a user"
    expected: str = ""


def version_of(policy: Policy) -> str:
    """Names exactly this policy, so that a change can say which one it started from."""
    return hashlib.sha256(msgspec.json.encode(policy)).hexdigest()[:VERSION_LETTERS]


def problem_with(policy: Policy) -> str | None:
    """What is wrong beyond what the types refuse, in one sentence; None if nothing is."""
    if policy.port_first + policy.port_count > PORTS_END:
        most = PORTS_END - policy.port_first
        return f"port_count: ports end at 65535, so from {policy.port_first} on there are {most}"
    if policy.silent_after_ms < SILENT_AFTER_MS_MIN:
        why = f"nodes report every second; ask for at least {SILENT_AFTER_MS_MIN} ms"
        return f"silent_after_ms: every node would be silent, because {why}"
    names: set[str] = set()
    for tenant in policy.tenants:
        if tenant.name in names:
            return f"tenants: {tenant.name!r} is named twice"
        names.add(tenant.name)
        for field, pattern, like in GRANTS:
            for one in _listed(getattr(tenant, field)):
                if not re.fullmatch(pattern, one):
                    return f"tenants.{tenant.name}.{field}: {one!r} is not like {like}, or *"
    for one in _listed(policy.site):
        term = term_of(one)
        known = term.holds and len(term.values) == 1 and term.values[0]
        if not known or not re.fullmatch(CONDITION_PATTERN, one):
            return f"site: {one!r} is not a label like region=eu"
    parents = {tenant.name: tenant.parent for tenant in policy.tenants}
    for tenant in policy.tenants:
        if tenant.parent and tenant.parent not in names:
            return f"tenants: the parent {tenant.parent!r} of {tenant.name!r} is not named"
    for name in _own_ancestors(parents):
        return f"tenants: {name!r} is its own ancestor"
    named = [neighbor.name for neighbor in policy.neighbors]
    if len(set(named)) < len(named):
        return f"neighbors: {max(named, key=named.count)!r} is named twice"
    return problem_with_supplies(policy.supply)


def _own_ancestors(parents: dict[str, str]) -> list[str]:
    """Tenants whose path up never reaches a root. Each tenant is visited once."""
    rooted: set[str] = {""}
    for start in parents:
        way: list[str] = []
        name = start
        while name not in rooted:
            if len(way) > len(parents):
                return [start]
            way.append(name)
            name = parents[name]
        rooted.update(way)
    return []


# A policy for people: its fields with what they mean, a draft of another one, and earlier ones.


TEXT_MAX = 4_000_000
CHANGES_MAX = 1_000  # fields that differ; the rest is counted
RECORDS_MAX = 50


class PolicyField(msgspec.Struct, frozen=True, kw_only=True):
    """`value` and `usual` (of a policy that says nothing) are as a file would write them."""

    name: str
    about: str
    kind: Literal["time", "count", "flag", "choice", "text"]
    value: str = ""
    usual: str = ""
    choices: list[str] = []  # for a text: what is known beside users' own
    common: bool = False


class PolicyForm(msgspec.Struct, frozen=True, kw_only=True):
    """`version` names exactly this policy; empty for those who see only a part of it."""

    version: str
    policy: Policy
    text: str
    fields: list[PolicyField]
    tenant_fields: list[PolicyField]
    seq: int = 0  # of the event that set it; 0: not asked for by its event
    at_ms: int = 0
    who: str = ""


class PolicyDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole policy as a file would write it, or changes to the one in force by field. Among
    these, `tenants` holds changes by tenant; null removes one."""

    text: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] | None = None
    ending: Literal["yaml", "toml", "json"] = "yaml"
    changes: dict[str, Any] = {}


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """As a file would write the values; empty: it is not there."""

    field: str
    before: str
    after: str
    about: str = ""


class PolicyDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that could be set, beside the policy in force; `expected` is the version of that."""

    policy: Policy
    version: str
    expected: str
    text: str
    changes: list[PolicyChange]
    left_out: int = 0


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`changes`: from the policy before it, as far as the log is kept."""

    seq: int
    at_ms: int
    who: str
    name: str
    changes: list[PolicyChange] | None
    left_out: int = 0
