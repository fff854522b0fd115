"""A node: a server, real or virtual, with its resources and its place in the topology."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from shoal.model.health import Standing
from shoal.model.resources import Kind, cpus_text, plural
from shoal.model.tree import Tree

NODE_ID_PATTERN = r"^[a-z0-9][a-z0-9.-]{0,62}(?!\n)$"

NodeId = Annotated[str, msgspec.Meta(pattern=NODE_ID_PATTERN, max_length=63)]

GPUS_PER_NODE_MAX = 256
JOB_GPUS = "SHOAL_JOB_GPUS"  # a variable: the GPUs of a gang with several members on the node
JOINED = "joined"  # the origin of a node that joined by itself
LABELS_MAX = 64  # of one node
# As in Kubernetes, so that its labels can be taken over.
LABEL_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?)(?!\n)$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?(?!\n)$"
TAINT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}(=[A-Za-z0-9._-]{0,63})?(?!\n)$"

LabelName = Annotated[str, msgspec.Meta(pattern=LABEL_PATTERN, max_length=253)]
LabelValue = Annotated[str, msgspec.Meta(pattern=LABEL_VALUE_PATTERN, max_length=63)]
Labels = Annotated[dict[LabelName, LabelValue], msgspec.Meta(max_length=LABELS_MAX)]
Taint = Annotated[str, msgspec.Meta(pattern=TAINT_PATTERN, max_length=320)]
OF_TENANTS = "tenants"  # how a line about them begins, in what is not enforced
NODES_NAMED_MAX = 4  # in a line about several of them
ENDS_WHY_MAX = 200  # characters
# What a node says about its InfiniBand and RoCE cards, beside why members cannot use them.
RDMA_OPEN, RDMA_ROOT = "open", "root"  # all members can; all but those of a tenant's user


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has. `place` is its path in the topology, `block/rack`, outermost first. A node
    of a newer version may have more fields, which are left out."""

    id: NodeId
    cpu_milli: Annotated[int, msgspec.Meta(ge=0)]
    memory_mb: Annotated[int, msgspec.Meta(ge=0)]
    gpus: Annotated[int, msgspec.Meta(ge=0, le=GPUS_PER_NODE_MAX)] = 0
    gpu_model: str = ""
    gpu_memory_mb: Annotated[int, msgspec.Meta(ge=0)] = 0
    place: str = ""
    address: str = "127.0.0.1"
    checkpoints: str = ""  # names its checkpoint storage: nodes with the same name share it
    containers: str = ""  # what runs images here: podman, docker or apptainer
    unenforced: tuple[str, ...] = ()  # what members are not held to here, and why
    labels: Labels = {}  # given by people or read from the engine: {"pool": "a100"}
    taints: tuple[Taint, ...] = ()  # only jobs that tolerate each of them run here
    # Who can end it: "" is the controller itself, on its own machine; JOINED: nobody but its
    # owner; otherwise the supply that brought it, with the order `order`.
    origin: Annotated[str, msgspec.Meta(max_length=63)] = ""
    order: Annotated[str, msgspec.Meta(max_length=16)] = ""
    # How members sleep here: "freeze" (they have no real GPU) or "cuda"; empty: they cannot.
    sleep: Annotated[str, msgspec.Meta(max_length=16)] = ""
    sleep_why: Annotated[str, msgspec.Meta(max_length=200)] = ""  # why they cannot
    remaps: bool = False  # a sleeper may be woken on other GPUs of the node
    tree: Tree | msgspec.UnsetType = msgspec.UNSET  # how its GPUs, CPUs and cards are joined
    # Left out where there are no InfiniBand and RoCE cards.
    rdma: Annotated[str, msgspec.Meta(max_length=200)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def kind(self) -> Kind:
        return Kind(
            self.gpus,
            self.cpu_milli,
            self.memory_mb,
            self.gpu_model,
            self.gpu_memory_mb,
            bool(self.containers),
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """The topology domains it is in, outermost first: `b1`, `b1/r2`."""
        return domains_in(self.place)


def domains_in(place: str) -> tuple[str, ...]:
    parts = [part for part in place.split("/") if part]
    return tuple("/".join(parts[: depth + 1]) for depth in range(len(parts)))


Changes = Annotated[dict[LabelName, LabelValue | None], msgspec.Meta(max_length=2 * LABELS_MAX)]


class LabelChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values to set, or null to remove that label or taint."""

    labels: Changes = {}
    taints: Changes = {}


class NodeHealth(enum.StrEnum):
    """What the controller believes about a node."""

    JOINING = "joining"  # it reported, but members that must not run are still alive there
    READY = "ready"
    SILENT = "silent"  # out of contact but not given up yet: its jobs are left alone
    LOST = "lost"

    @classmethod
    def _missing_(cls, value: object) -> NodeHealth | None:
        return cls.SILENT if value == "suspect" else None  # its name before 0.2


class NodeIntent(enum.StrEnum):
    """What the operator wants of a node."""

    OPEN = "open"
    CORDONED = "cordoned"  # no new jobs
    DRAINING = "draining"  # no new jobs; jobs that may be restarted move elsewhere
    REMOVED = "removed"  # no longer part of the cluster, unless it joins again


def node_word(health: NodeHealth, standing: Standing, intent: NodeIntent) -> str:
    """The state of a node in one word: what keeps it from getting jobs comes first."""
    if health is not NodeHealth.READY:
        return health.value
    if standing is Standing.QUARANTINED:
        return standing.value
    return health.value if intent is NodeIntent.OPEN else intent.value


# The end of a node whose machine is shut down. After a reboot it is the same node again.
TOLD_TO_END = "it was told to end"


class End(msgspec.Struct, frozen=True):
    """Until when a node lives, and what ends it then: "Slurm time limit", "spot notice"."""

    at_ms: int
    why: str = ""


def kind_text(spec: NodeSpec) -> str:
    gpu = f"{plural(spec.gpus, 'GPU')}{' ' + spec.gpu_model if spec.gpu_model else ''}, "
    return f"{gpu if spec.gpus else ''}{cpus_text(spec.cpu_milli)} CPUs, {spec.memory_mb} MB"


def unenforced_of(spec: NodeSpec, *, tenants: bool) -> list[str]:
    """What members are not held to on that node. Whoever has added no tenant has none to keep
    apart."""
    return [text for text in spec.unenforced if tenants or not text.startswith(OF_TENANTS)]


def unenforced_lines(found: Mapping[str, Sequence[str]]) -> list[str]:
    """What members are not held to, by node, in one line for all nodes that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for node, what in found.items():
        if what:
            alike.setdefault(tuple(what), []).append(node)
    return [f"{_nodes_text(ids, len(found))}: {'; '.join(what)}" for what, ids in alike.items()]


def _nodes_text(nodes: list[str], all_of_them: int) -> str:
    if len(nodes) == all_of_them:
        return "on this node" if all_of_them == 1 else "on all nodes"
    more = len(nodes) - NODES_NAMED_MAX
    return f"on {', '.join(nodes[:NODES_NAMED_MAX])}{f' and {more} more' if more > 0 else ''}"
