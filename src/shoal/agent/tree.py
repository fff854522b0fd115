"""Reads this machine's tree: GPUs from NVML, cards, switches and memory from sysfs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.agent.numbers import TREE_FILE
from shoal.model.node import NodeSpec
from shoal.model.tree import (
    CARDS_MAX,
    CPULIST_MAX,
    NUMAS_MAX,
    Card,
    Numa,
    Tree,
    TreeGpu,
    list_text,
    numbers_in,
)

log = logging.getLogger("shoal.agent")

FILE_BYTES_MAX = 1 << 20
VERBS_PORT = "ports/1"
NETWORK_CLASS = "0x02"


class Found(NamedTuple):
    """A GPU as its driver shows it. `bus`: its address, as sysfs writes it."""

    bus: str
    model: str = ""
    memory_mb: int = 0
    nvlink: int = -1


def tree_of(spec: NodeSpec, own: Sequence[int], *, real: bool) -> Tree | msgspec.UnsetType:
    """UNSET if there is nothing to tell. `own`: the machine's numbers of the node's GPUs. `real`:
    there are devices; GPUs that exist only in the books have a tree only by a file."""
    file = os.environ.get(TREE_FILE, "")
    if not spec.gpus or not (real or file):
        return msgspec.UNSET
    try:
        tree = _from_file(Path(file)) if file else read(by_nvml())
        if not file and max(own, default=-1) < len(tree.gpus):
            tree = msgspec.structs.replace(tree, gpus=tuple(tree.gpus[one] for one in own))
        if len(tree.gpus) != spec.gpus:
            log.warning("the tree has %d GPUs, the node %d: left out", len(tree.gpus), spec.gpus)
            return msgspec.UNSET
        # A bound that this machine breaks must not keep the node from joining.
        return msgspec.convert(msgspec.to_builtins(tree), Tree)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("the tree of this machine cannot be read: %s", error)
        return msgspec.UNSET


def _from_file(path: Path) -> Tree:
    with path.open("rb") as file:
        return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Tree)


def by_nvml() -> list[Found]:
    """In NVML's order, which is Shoal's. Empty without the driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has its own exceptions for each
        return []
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        groups = _nvlinked(pynvml, handles)
        return [_found(pynvml, one, group) for one, group in zip(handles, groups, strict=True)]
    except Exception as error:
        log.warning("NVML does not show the GPUs: %s", error)
        return []
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _found(nvml: Any, handle: Any, group: int) -> Found:
    bus, name = nvml.nvmlDeviceGetPciInfo(handle).busId, nvml.nvmlDeviceGetName(handle)
    texts = [one.decode() if isinstance(one, bytes) else str(one) for one in (bus, name)]
    memory_mb = 0
    with contextlib.suppress(Exception):  # GPUs that share the host's memory have none of their own
        memory_mb = int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
    return Found(bus_address(texts[0]), texts[1][:80], memory_mb, group)


def bus_address(text: str) -> str:
    """NVML writes 00000000:1B:00.0, sysfs 0000:1b:00.0."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _nvlinked(nvml: Any, handles: Sequence[Any]) -> list[int]:
    """By GPU, the number of its NVLink group; -1 for one that has no link to another."""
    kind = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", 2)

    def joined(one: Any, other: Any) -> bool:
        try:
            return int(nvml.nvmlDeviceGetP2PStatus(one, other, kind)) == 0
        except Exception:  # this driver or GPU does not say
            return False

    return components(len(handles), lambda one, other: joined(handles[one], handles[other]))


def components(count: int, joined: Callable[[int, int], bool]) -> list[int]:
    """The connected parts of a graph, numbered in the order of their first; -1: joined to none."""
    group = [-1] * count
    for start in range(count):
        if group[start] >= 0:
            continue
        part = [start]
        for one in part:
            part += [
                other
                for other in range(count)
                if other not in part and group[other] < 0 and joined(one, other)
            ]
        if len(part) > 1:
            number = max(group) + 1
            for one in part:
                group[one] = number
    return group


def read(gpus: Sequence[Found], sys: Path = Path("/sys")) -> Tree:
    switches: dict[str, int] = {}
    numas = tuple(_numas(sys))
    only = numas[0].number if len(numas) == 1 else -1  # where a device says nothing: virtual ones

    def place(device: Path) -> tuple[int, tuple[int, ...]]:
        """Its memory, and the switches above it. Ways of two ports belong to one switch: the way in
        names it."""
        steps = [part for part in Path(os.path.realpath(device)).parts if part.count(":") == 2]
        ports = steps[1:-1:2]  # below the root port: way in, way out, way in, ...
        numbers = tuple(switches.setdefault(port, len(switches)) for port in ports[:8])
        numa = _number(device / "numa_node")
        return numa if numa >= 0 else only, numbers

    devices = sys / "bus/pci/devices"
    leaves = []
    for gpu in gpus:
        numa, above = place(devices / gpu.bus)
        leaves.append(TreeGpu(gpu.model, gpu.memory_mb, numa, above, gpu.nvlink))
    cards = []
    for name, folder, verbs in _cards(sys)[:CARDS_MAX]:
        numa, above = place(folder / "device")
        cards.append(_card(name, folder, verbs, numa, above))
    return Tree(tuple(leaves), tuple(cards), numas)


def _cards(sys: Path) -> list[tuple[str, Path, bool]]:
    """Name, folder, and whether it is for RDMA; parts of a card that were cut off it (SR-IOV) and
    devices that are no hardware are left out."""
    found = []
    seen = set()
    for kind, verbs in (("infiniband", True), ("net", False)):
        names = os.listdir(sys / "class" / kind) if (sys / "class" / kind).is_dir() else []
        for name in sorted(names, key=lambda word: (len(word), word)):
            folder = sys / "class" / kind / name
            device = folder / "device"
            real = os.path.realpath(device)
            is_card = _text(device / "class").startswith(NETWORK_CLASS)
            if is_card and real not in seen and not (device / "physfn").exists():
                found.append((name, folder, verbs))
                seen.add(real)
    return found


def _card(name: str, folder: Path, verbs: bool, numa: int, above: tuple[int, ...]) -> Card:
    if not verbs:
        speed, up = max(0, _number(folder / "speed")), _text(folder / "operstate") == "up"
        return Card(name, False, "Ethernet", speed // 1000, up, numa, above)
    port = folder / VERBS_PORT
    rate = _text(port / "rate").partition(" ")[0]  # "400 Gb/sec (4X NDR)"
    gbit = int(float(rate)) if rate.replace(".", "", 1).isdecimal() else 0
    up = "ACTIVE" in _text(port / "state")
    return Card(name, True, _text(port / "link_layer")[:16], gbit, up, numa, above)


def _numas(sys: Path) -> list[Numa]:
    """Those with CPUs that this agent may use."""
    top = sys / "devices/system"
    may = os.sched_getaffinity(0) if sys == Path("/sys") else None
    found = []
    names = [path.name for path in (top / "node").glob("node[0-9]*")]
    for number in sorted(int(name.removeprefix("node")) for name in names)[:NUMAS_MAX]:
        folder = top / f"node/node{number}"
        cpus = [cpu for cpu in numbers_in(_text(folder / "cpulist")) if may is None or cpu in may]
        text = list_text(cpus)
        if cpus and len(text) <= CPULIST_MAX:
            words = _text(folder / "meminfo").partition("MemTotal:")[2].split()
            memory_mb = int(words[0]) >> 10 if words and words[0].isdecimal() else 0
            socket = _number(top / f"cpu/cpu{cpus[0]}/topology/physical_package_id")
            found.append(Numa(number, text, memory_mb, socket))
    return found


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else -1


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
