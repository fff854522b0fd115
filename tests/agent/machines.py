"""Machines from public texts of `nvidia-smi topo -m` (the folder trees), as sysfs shows them."""

from __future__ import annotations

from pathlib import Path

from shoal.agent.tree import Found, components, read
from shoal.model.tree import Tree, numbers_in

TEXTS = Path(__file__).parent / "trees"
NAMES = ("dgx-h100", "hgx-a100", "two-sockets-switches", "two-sockets-plain")
NETWORK = {"GPU": "0x030200", "NIC": "0x020700"}


def machine(name: str, sys: Path) -> Tree:
    """Its tree, read from a sysfs that is made below `sys`."""
    table, numas = _parsed((TEXTS / f"{name}.txt").read_text())
    devices = [*table, *(one for one in next(iter(table.values())) if one.startswith("NIC"))]
    for number, (cpus, socket) in enumerate(numas):
        _write(sys / f"devices/system/node/node{number}/cpulist", cpus)
        meminfo = f"Node {number} MemTotal:       {256 << 20} kB"
        _write(sys / f"devices/system/node/node{number}/meminfo", meminfo)
        first = numbers_in(cpus)[0]
        _write(sys / f"devices/system/cpu/cpu{first}/topology/physical_package_id", socket)
    gpus = list(table)
    for number, device in enumerate(devices):
        folder = _folder(table, devices, device, sys)
        near = next((gpu for gpu in gpus if table[gpu].get(device, "SYS") != "SYS"), gpus[0])
        owner = device if device in table else near
        _write(folder / "numa_node", table[owner]["NUMA"])
        _write(folder / "class", NETWORK[device[:3]])
        _link(sys / f"bus/pci/devices/{folder.name}", folder)
        if device.startswith("NIC"):
            card = sys / f"class/infiniband/mlx5_{number - len(gpus)}"
            for file, text in (("link_layer", "InfiniBand"), ("state", "4: ACTIVE")):
                _write(card / "ports/1" / file, text)
            _write(card / "ports/1/rate", "400 Gb/sec (4X NDR)")
            _link(card / "device", folder)
    links = components(len(gpus), lambda a, b: table[gpus[a]][gpus[b]].startswith("NV"))
    buses = [_folder(table, devices, gpu, sys).name for gpu in gpus]
    return read(
        [Found(bus, "GPU", 81920, link) for bus, link in zip(buses, links, strict=True)], sys
    )


def _folder(table: dict[str, dict[str, str]], devices: list[str], device: str, sys: Path) -> Path:
    """Devices at PXB share an outer switch, at PIX the inner one as well. The text does not say
    where a GPU is that NVLink joins to the others: it is at the switch of its cards."""
    number = devices.index(device)
    outer, inner = (_first(table, devices, number, words) for words in (("PIX", "PXB"), ("PIX",)))
    root = number if outer < 0 else 64 + outer
    path = sys / f"devices/pci0000:{root:02x}/0000:{root:02x}:01.0"
    if outer >= 0:
        path = path / f"0000:{root:02x}:02.0" / f"0000:{root:02x}:03.{max(inner, 0) % 8}"
    if inner >= 0:
        path = path / f"0000:{160 + inner:02x}:04.0" / f"0000:{160 + inner:02x}:05.{number % 8}"
    return path / f"0000:{number:02x}:00.0"


def _first(
    table: dict[str, dict[str, str]], devices: list[str], number: int, words: tuple[str, ...]
) -> int:
    """Which of the groups that are joined so it is in; -1: in none."""
    joined = components(len(devices), lambda a, b: _word(table, devices[a], devices[b]) in words)
    return joined[number]


def _word(table: dict[str, dict[str, str]], one: str, other: str) -> str:
    return table.get(one, {}).get(other) or table.get(other, {}).get(one, "")


def _parsed(text: str) -> tuple[dict[str, dict[str, str]], list[tuple[str, str]]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = lines[0].split()
    table = {line.split()[0]: dict(zip(names, line.split()[1:], strict=True)) for line in lines[1:]}
    numas = next(line for line in text.splitlines() if line.startswith("# CPUs: "))
    pairs = [part.split() for part in numas.removeprefix("# CPUs: ").split(";")]
    return table, [(cpus, socket) for cpus, socket in pairs]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)
