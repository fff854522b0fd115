"""Nodes that are brought when they are wanted: what a supply offers, and the orders placed with it.

An *engine* (Slurm, Kubernetes, Ray) brings machines. A *supply* is one kind of node that an engine
can bring, as the policy describes it. An *order* asks a supply for one lot of such nodes. On every
node runs the same agent, which dials the controller; so a supplied node is a node like any other,
whose spec names its order.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.labels import words_of
from shoal.model.node import LABELS_MAX, Labels, NodeSpec, Taint
from shoal.model.resources import Kind

SUPPLIES_MAX = 64
ORDERS_MAX = 10_000  # of all supplies together
ORDER_PATTERN = r"^o[0-9]{1,12}(?!\n)$"
REASON_CHARACTERS_MAX = 300
OPTIONS_MAX = 64

Text = Annotated[str, msgspec.Meta(max_length=16_384)]  # a patch of a pod, say
OptionName = Annotated[str, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class Supply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of node, and how many of them an engine may bring. What the nodes have (`gpus` and
    so on) is what the scheduler expects before the first of them has reported."""

    name: Annotated[str, msgspec.Meta(max_length=40, pattern=JOB_NAME_PATTERN)]
    engine: Annotated[str, msgspec.Meta(max_length=40)]
    gpus: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # of each node
    gpu_model: Annotated[str, msgspec.Meta(max_length=200)] = ""
    gpu_memory_mb: Amount = 0
    cpu_milli: Amount = 0
    memory_mb: Amount = 0
    containers: bool = False  # they can run images
    labels: Labels = {}
    taints: Annotated[tuple[Taint, ...], msgspec.Meta(max_length=LABELS_MAX)] = ()
    lot: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1  # nodes that one order brings
    least: Count = 0  # nodes to keep, wanted or not
    most: Count = 1  # nodes at a time
    idle_ms: Amount = 600_000  # an order whose nodes ran nothing for this long is released
    # An order that has no machines after this long is given back if another supply can serve its
    # jobs; 0: never.
    patience_ms: Amount = 600_000
    lasts_ms: Amount = 0  # how long a node lives, if the supplier limits it; 0: no limit
    # In millionths of the price list's currency, per node and hour; and what all nodes of this
    # supply together may cost per hour (0: no ceiling).
    price: Amount = 0
    ceiling: Amount = 0
    # What only its engine understands: a partition, an account, a namespace, an image.
    options: Annotated[dict[OptionName, Text], msgspec.Meta(max_length=OPTIONS_MAX)] = {}

    @property
    def kind(self) -> Kind:
        return Kind(
            self.gpus,
            self.cpu_milli,
            self.memory_mb,
            self.gpu_model,
            self.gpu_memory_mb,
            self.containers,
            words_of(self.labels),
            self.taints,
        )


SIM_PREFIX = "sim_"  # of options that only `shoal sim` understands


def for_engine(supply: Supply) -> Supply:
    """Without what only `shoal sim` understands."""
    options = {word: text for word, text in supply.options.items() if word[:4] != SIM_PREFIX}
    return msgspec.structs.replace(supply, options=options)


class OrderPhase(enum.StrEnum):
    """Where an order is, as the supplier sees it."""

    UNKNOWN = "unknown"  # the supplier has nothing under this id: it was not sent, or it is over
    PENDING = "pending"  # accepted, waiting for machines
    RUNNING = "running"  # machines were given; agents start there
    ENDED = "ended"  # over; `reason` says why


class OrderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One order in a supplier's inventory. `reason` is the supplier's own word, such as Slurm's
    "Resources" or "PartitionTimeLimit". `failed`: it ended without bringing a node, or against our
    will (a node failure, a preemption, an admin's kill), so asking again at once is unwise."""

    order: str
    phase: OrderPhase
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""
    failed: bool = False
    handle: str = ""  # what people look for there: a Slurm job id, a pod's name


class Order(msgspec.Struct, kw_only=True):
    """A fact of the state: an order that was placed and whose end no supplier has shown yet."""

    id: str
    supply: Supply  # as it was when the order was placed
    nodes: tuple[str, ...]  # the names that its nodes get
    at_ms: int
    why: str = ""
    phase: OrderPhase = OrderPhase.UNKNOWN
    reason: str = ""
    handle: str = ""
    since_ms: int = 0  # in this phase
    release: str = ""  # why it is given back; empty: it is wanted
    failed: bool = False  # it is given back because it brought no node
    unused_ms: int | None = None  # since when no job uses or awaits its nodes


class Setback(msgspec.Struct, frozen=True, kw_only=True):
    """How often in a row a supply failed, and why. The next order waits longer each time."""

    failures: int
    at_ms: int
    why: str


class NodeNote(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine knows of a node that it brought, and the node itself does not: the labels of
    the machine under it, and that the machine ends (a spot notice, an eviction)."""

    node: str
    labels: dict[str, str] = {}
    ends_in_ms: int | None = None  # None: no end is known
    ends_why: str = ""


class SupplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine has for us now, not a difference. `problem`: it could not be asked
    or refuses us ("slurmctld does not answer"); then `orders` and `notes` say nothing."""

    engine: str
    orders: tuple[OrderStatus, ...] = ()
    notes: tuple[NodeNote, ...] = ()
    problem: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""


class Provision(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """For a supplier: bring one lot of these nodes, unless it has an order with this id. Sent again
    until a report shows it."""

    order: Annotated[str, msgspec.Meta(pattern=ORDER_PATTERN)]
    supply: Supply
    # What its nodes are called, one name for each. A name is used again after its order has ended,
    # so that the number of nodes that the cluster has ever known does not grow with orders.
    nodes: tuple[str, ...]
    why: str = ""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """For a supplier: end this order and its machines. Sent again until a report shows that it has
    ended or is unknown."""

    order: Annotated[str, msgspec.Meta(pattern=ORDER_PATTERN)]
    engine: str
    why: str = ""


class DrainMachine(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """For a supplier: the machine under this node is sick. Sent once; nothing depends on it."""

    node: NodeSpec
    engine: str
    why: str


SupplyCommand = Provision | Release | DrainMachine


def problem_with_supplies(supplies: tuple[Supply, ...]) -> str | None:
    """What is wrong beyond what the types refuse, in one sentence; None if nothing is."""
    names: set[str] = set()
    for supply in supplies:
        where = f"supply: {supply.name!r}"
        if supply.name in names:
            return f"{where} is named twice; give each its own name"
        names.add(supply.name)
        if supply.least > supply.most:
            return f"{where}: least ({supply.least}) is more than most ({supply.most})"
        if supply.most % supply.lot or supply.least % supply.lot:
            return f"{where}: least and most must be multiples of lot ({supply.lot})"
        if supply.ceiling and supply.least * supply.price > supply.ceiling:
            return f"{where}: {supply.least} nodes (least) cost more per hour than the ceiling"
    return None


# What people see of supplies and orders: the answer of `/v1/supply`.


class SupplyView(msgspec.Struct, kw_only=True):
    """Prices are in millionths per hour. `state` is a clause: what it does, or why it brings no
    more nodes now."""

    name: str
    engine: str
    kind: str  # what each node has
    nodes: int  # that have joined and are not lost
    coming: int  # that were asked for and have not joined
    leaving: int  # of orders that are being given back
    least: int
    most: int
    price: int
    cost: int  # of all its nodes together
    ceiling: int
    state: str
    failures: int = 0  # in a row
    next_try_ms: int = 0  # after failures; 0: at any time


class OrderView(msgspec.Struct, kw_only=True):
    id: str
    supply: str
    engine: str
    nodes: list[str]
    joined: list[str]
    phase: str  # asked, pending, running, or releasing
    reason: str  # the supplier's own word, or why it is given back
    handle: str  # what to look for at the supplier
    why: str  # why it was placed
    at_ms: int
    price: int  # of all its nodes


class SuppliesView(msgspec.Struct, kw_only=True):
    now_ms: int
    currency: str = ""
    supplies: list[SupplyView]
    orders: list[OrderView]  # oldest first
