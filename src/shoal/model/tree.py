"""A node's GPUs, CPUs and network cards as a tree: which are joined, and how closely."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec

from shoal.model.resources import memory_text

CARDS_MAX = 64
NUMAS_MAX = 64
GPUS_MAX = 256
CPULIST_MAX = 512  # characters

Number = Annotated[int, msgspec.Meta(ge=-1, le=4095)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,32}(?!\n)$")]
# From the one below the root port to the one that the device is at; none: it is at a root port.
Switches = Annotated[tuple[Number, ...], msgspec.Meta(max_length=8)]


class TreeGpu(msgspec.Struct, frozen=True, omit_defaults=True):
    """GPUs with the same `nvlink` reach each other by NVLink. -1: not known, or none."""

    model: Annotated[str, msgspec.Meta(max_length=80)] = ""
    memory_mb: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    numa: Number = -1
    switches: Switches = ()
    nvlink: Number = -1


class Card(msgspec.Struct, frozen=True, omit_defaults=True):
    """A network card. `verbs`: programs can use it by RDMA, under this name."""

    name: Name
    verbs: bool = False
    link: Annotated[str, msgspec.Meta(max_length=16)] = ""  # InfiniBand or Ethernet
    gbit: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    up: bool = False
    numa: Number = -1
    switches: Switches = ()


class Numa(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory and the CPUs beside it. A socket has one of these or several."""

    number: Number
    cpus: Annotated[str, msgspec.Meta(pattern=r"^[0-9,-]*(?!\n)$", max_length=CPULIST_MAX)]
    memory_mb: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    socket: Number = -1


class Tree(msgspec.Struct, frozen=True, omit_defaults=True):
    """`gpus`: in the order of the node's numbers."""

    gpus: Annotated[tuple[TreeGpu, ...], msgspec.Meta(max_length=GPUS_MAX)] = ()
    cards: Annotated[tuple[Card, ...], msgspec.Meta(max_length=CARDS_MAX)] = ()
    numas: Annotated[tuple[Numa, ...], msgspec.Meta(max_length=NUMAS_MAX)] = ()


class NodeTree(msgspec.Struct, kw_only=True):
    """A node's tree as it is drawn, line by line. Both are empty if the node shows none."""

    node: str
    lines: list[str] = []
    tree: Tree | None = None


class Beside(msgspec.Struct, frozen=True):
    """The CPUs and the memory next to some GPUs, as the kernel writes such lists."""

    cpus: str
    mems: str
    count: int


def beside(tree: Tree, gpus: Iterable[int], cpu_milli: int) -> Beside | None:
    """Where a member with these GPUs and so many CPUs belongs: on the part of the socket next to
    them, or on all of the socket. None if they are on two sockets, or it would get too few CPUs."""
    numbers = {tree.gpus[gpu].numa for gpu in gpus if gpu < len(tree.gpus)}
    near = [numa for numa in tree.numas if numa.number in numbers]
    sockets = {numa.socket for numa in near}
    if not near or len(near) != len(numbers) or len(sockets) != 1 or len(tree.numas) < 2:
        return None
    whole = [numa for numa in tree.numas if numa.socket in sockets] if -1 not in sockets else near
    for some in (near, whole):
        cpus = sorted({cpu for numa in some for cpu in numbers_in(numa.cpus)})
        if len(cpus) * 1000 >= max(cpu_milli, 1) and len(some) < len(tree.numas):
            return Beside(list_text(cpus), list_text([one.number for one in some]), len(cpus))
    return None


def cards_of(tree: Tree, gpus: Iterable[int]) -> list[Card]:
    """The cards for RDMA next to each of these GPUs: at the same switch, else at the same memory.
    If one of them has none, all are left to the program, which then has to cross the socket."""
    usable = [card for card in tree.cards if card.verbs and card.up]
    if any(card.link == "InfiniBand" for card in usable):
        usable = [card for card in usable if card.link == "InfiniBand"]
    found: dict[str, Card] = {}
    for gpu in [tree.gpus[gpu] for gpu in gpus if gpu < len(tree.gpus)]:
        near = [(_shared(gpu, card), card) for card in usable]
        best = max((depth for depth, _ in near), default=0)
        if not best:
            return []
        found |= {card.name: card for depth, card in near if depth == best}
    return [card for card in tree.cards if card.name in found]


def _shared(gpu: TreeGpu, card: Card) -> int:
    """How many steps of their ways are the same; 0: not even the memory."""
    if gpu.numa != card.numa or gpu.numa < 0:
        return 0
    depth = 1
    for one, other in zip(gpu.switches, card.switches, strict=False):
        if one != other:
            break
        depth += 1
    return depth


def numbers_in(text: str) -> list[int]:
    """The kernel's lists: "0-3,8" is 0, 1, 2, 3, 8. What is not one is left out."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or "-" not in part):
            begin, end = int(first), int(last or first)
            found += range(begin, min(end, begin + 8191) + 1)
    return found


def list_text(numbers: Iterable[int]) -> str:
    """The shortest such list."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def tree_lines(tree: Tree, used: Collection[int] = ()) -> list[str]:
    """`used`: GPUs that jobs hold."""
    lines = []
    for numa in [*tree.numas, None]:
        number = -1 if numa is None else numa.number
        known = {one.number for one in tree.numas}
        gpus = [
            (index, gpu)
            for index, gpu in enumerate(tree.gpus)
            if (gpu.numa if gpu.numa in known else -1) == number
        ]
        cards = [card for card in tree.cards if (card.numa if card.numa in known else -1) == number]
        if numa is not None:
            socket = f", socket {numa.socket}" if numa.socket >= 0 else ""
            size = f", {memory_text(numa.memory_mb)}" if numa.memory_mb else ""
            lines.append(f"NUMA {numa.number}{socket}: CPUs {numa.cpus}{size}")
        elif gpus or cards:
            lines.append("place not known")
        ways = sorted({one.switches for one in [gpu for _, gpu in gpus] + cards})
        for way in ways:
            indent = "  "
            if way:
                lines.append(f"{indent}switch {'/'.join(map(str, way))}")
                indent = "    "
            lines += [
                indent + _gpu(index, gpu, index in used)
                for index, gpu in gpus
                if gpu.switches == way
            ]
            lines += [indent + _card(card) for card in cards if card.switches == way]
    return lines


def _gpu(index: int, gpu: TreeGpu, used: bool) -> str:
    size = f", {memory_text(gpu.memory_mb)}" if gpu.memory_mb else ""
    link = f", NVLink group {gpu.nvlink}" if gpu.nvlink >= 0 else ""
    return f"GPU {index}{' ' + gpu.model if gpu.model else ''}{size}{link}{', in use' * used}"


def _card(card: Card) -> str:
    speed = f" {card.gbit} Gbit/s" if card.gbit else ""
    return f"{card.name} {card.link or 'card'}{speed}{'' if card.up else ', down'}"
