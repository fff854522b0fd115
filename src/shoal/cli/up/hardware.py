"""This machine as nodes: its CPUs, memory and GPUs, what `shoal up` makes of them, how it joins."""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.forms.failure import USAGE, Failure
from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec

if TYPE_CHECKING:
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import ClusterConfig, Home
    from shoal.model.node import NodeSpec


NVIDIA_SMI_TIMEOUT_S = 10
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


class Gpus(NamedTuple):
    """If the GPUs differ, the model is that of the first, the memory that of the smallest."""

    number: int
    model: str = ""
    memory_mb: int = 0  # 0: unknown


class Hardware(NamedTuple):
    name: str
    cpus: int
    memory_mb: int
    gpus: Gpus


def detect() -> Hardware:
    return Hardware(node_name(platform.node()), cpus(), memory_mb(), gpus())


def cpus() -> int:
    """The CPUs that this process may use; in a container these can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_mb() -> int:
    """The installed memory, or the limit of the container if that is smaller."""
    import psutil

    total: int = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(CGROUP_MEMORY.read_text()))
    return total // (1024 * 1024)


def gpus() -> Gpus:
    """Asks the driver's library, then its tool, then counts its device files."""
    for look in (_by_library, _by_tool):
        found = look()
        if found is not None:
            return found
    return Gpus(len(glob.glob("/dev/nvidia[0-9]*")))


def node_name(host: str) -> str:
    """A host name as a node id: the first label, in lower case."""
    label = re.sub(r"[^a-z0-9-]", "-", host.split(".")[0].lower()).strip("-")
    return label[:63] or "n1"


def _by_library() -> Gpus | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has its own exceptions for each
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(pynvml.nvmlDeviceGetCount()))
        ]
        model = pynvml.nvmlDeviceGetName(handles[0]) if handles else ""
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        return Gpus(
            len(handles),
            model.decode() if isinstance(model, bytes) else model,
            min(sizes, default=0) // (1024 * 1024),
        )
    except Exception:
        return None
    finally:
        pynvml.nvmlShutdown()


def _by_tool() -> Gpus | None:
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_listing(run.stdout)


def parse_listing(text: str) -> Gpus:
    """The tool prints a line like '143771, NVIDIA H200' per GPU. For a few devices the memory is
    '[N/A]'."""
    found = re.findall(r"^\s*([0-9]+|\[[^\]]*\]), (.+?)\s*$", text, flags=re.MULTILINE)
    sizes = [int(size) for size, _ in found if size.isdigit()]
    known = len(sizes) == len(found)
    return Gpus(len(found), found[0][1] if found else "", min(sizes, default=0) if known else 0)


# Makes the nodes of a cluster from the flags of `shoal up` and the detected hardware. Pure.


# Each virtual node is a process on this machine.
VIRTUAL_NODES_MAX = 256


def this_machine(hardware: Hardware) -> tuple[NodeSpec, ...]:
    return (
        NodeSpec(
            id=hardware.name,
            cpu_milli=hardware.cpus * 1000,
            memory_mb=hardware.memory_mb,
            gpus=hardware.gpus.number,
            gpu_model=hardware.gpus.model,
            gpu_memory_mb=hardware.gpus.memory_mb,
        ),
    )


def virtual_nodes(
    hardware: Hardware,
    *,
    nodes: int,
    gpus: int,
    cpu_milli: int | None,
    memory_mb: int | None,
    topology: str,
    gpu_model: str = "",
    gpu_memory_mb: int = 0,
) -> tuple[NodeSpec, ...]:
    """Equal nodes n1..nN. By default they have many CPUs, so that GPUs run out first."""
    if not 1 <= nodes <= VIRTUAL_NODES_MAX:
        raise Failure(f"--nodes: must be from 1 to {VIRTUAL_NODES_MAX}, not {nodes}", USAGE)
    if not 0 <= gpus <= GPUS_PER_NODE_MAX:
        raise Failure(f"--gpus: must be from 0 to {GPUS_PER_NODE_MAX}, not {gpus}", USAGE)
    if not gpus and (gpu_model or gpu_memory_mb):
        flag = "--gpu-model" if gpu_model else "--gpu-memory"
        raise Failure(f"{flag}: has no effect without GPUs; add e.g. --gpus 8", USAGE)
    where = places(topology, nodes) if topology else [""] * nodes
    if cpu_milli is None:
        cpu_milli = 1000 * max(hardware.cpus, 2 * gpus, 4)
    if memory_mb is None:
        memory_mb = hardware.memory_mb // nodes
    return tuple(
        NodeSpec(
            id=f"n{number + 1}",
            cpu_milli=cpu_milli,
            memory_mb=memory_mb,
            gpus=gpus,
            gpu_model=gpu_model,
            gpu_memory_mb=gpu_memory_mb,
            place=where[number],
        )
        for number in range(nodes)
    )


def places(topology: str, nodes: int) -> list[str]:
    """'2x2' for 8 nodes puts two each in b1/r1, b1/r2, b2/r1, b2/r2. Neighbors share a rack."""
    match = re.fullmatch(r"\s*([0-9]{1,4})\s*[xX]\s*([0-9]{1,4})\s*", topology)
    if match is None or not int(match[1]) or not int(match[2]):
        message = "--topology: write BLOCKSxRACKS, e.g. 2x4 for two blocks of four racks each"
        raise Failure(message, USAGE)
    racks_per_block = int(match[2])
    racks = int(match[1]) * racks_per_block
    if racks > nodes:
        message = f"--topology: {topology.strip()} has {racks} racks, but there are {nodes} nodes"
        raise Failure(f"{message}; use more nodes or fewer racks", USAGE)
    numbers = [number * racks // nodes for number in range(nodes)]
    return [f"b{rack // racks_per_block + 1}/r{rack % racks_per_block + 1}" for rack in numbers]


# This machine as a node of a cluster whose head is elsewhere: what it has, and how it joins.


TOKEN_VARIABLE = "SHOAL_JOIN_TOKEN"
LOOPBACK = "127.0.0.1"  # a node's default address
PLACE_PATTERN = r"[a-zA-Z0-9._-]{1,63}(/[a-zA-Z0-9._-]{1,63}){0,3}"


class Described(NamedTuple):
    """What the flags of `shoal join` say of the node; empty: nothing."""

    name: str = ""
    place: str = ""
    ip: str = ""
    labels: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    origin: str = ""
    order: str = ""
    file: Path | None = None


def machine_spec(shape: Shape, ip: str, said: Described) -> NodeSpec:
    """The detected hardware, changed by the file and the flags. Other machines reach it at `ip`."""
    import msgspec

    from shoal.cli.verbs.up import amount
    from shoal.forms import units
    from shoal.model.node import GPUS_PER_NODE_MAX, JOINED, NODE_ID_PATTERN, NodeSpec

    found = this_machine(detect())[0]
    if said.order and shape.gpus:
        _check_gpus(shape.gpus, found.gpus)
    if said.file is not None:
        found = _from_file(found, said.file)
        ip = ip if found.address == LOOPBACK or said.ip else found.address
    if shape.gpus is not None and not 0 <= shape.gpus <= GPUS_PER_NODE_MAX:
        raise Failure(f"--gpus: must be from 0 to {GPUS_PER_NODE_MAX}, not {shape.gpus}", USAGE)
    name = said.name
    if name and not re.search(NODE_ID_PATTERN, name):
        raise Failure(f"--name: '{name[:70]}' is not a name; use a-z, 0-9, dots and dashes", USAGE)
    if said.place and not re.fullmatch(PLACE_PATTERN, said.place):
        raise Failure("--place: write block/rack, e.g. b1/r2", USAGE)
    changes = {
        "id": name or None,
        "gpus": shape.gpus,
        "gpu_model": shape.gpu_model,
        "gpu_memory_mb": amount("--gpu-memory", shape.gpu_memory, units.memory_mb),
        "cpu_milli": amount("--cpus", shape.cpus, units.cpu_milli),
        "memory_mb": amount("--memory", shape.memory, units.memory_mb),
        "place": said.place or None,
        "address": ip,
        "labels": {**found.labels, **_labels(said.labels)},
        "taints": tuple(dict.fromkeys((*found.taints, *said.taints))),
        "origin": said.origin or JOINED,
        "order": said.order or None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        fields = {**msgspec.to_builtins(found), **given}
        return msgspec.convert(fields, NodeSpec)
    except msgspec.ValidationError as error:
        raise Failure(_bad_field(str(error)), USAGE) from None


def _check_gpus(claimed: int, shown: int) -> None:
    """Whoever ordered this machine said how many GPUs it has. Jobs for GPUs that are not there
    would fail one after another."""
    if not shown:
        from shoal.cli.screen.show import note

        note(f"no driver shows GPUs here; that there are {claimed} is taken from the supply")
    elif shown < claimed:
        text = f"the supply says {claimed} GPUs, and the driver shows {shown} here"
        raise Failure(f"--gpus: {text}; correct the supply, or what it asks its engine for")


def _labels(words: tuple[str, ...]) -> dict[str, str]:
    from shoal.model.labels import NODE

    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise Failure(f"--label: write NAME=VALUE, e.g. pool=a100, not '{word[:80]}'", USAGE)
        if name == NODE:
            raise Failure(f"--label: {name} is the node's own name; use --name", USAGE)
        found[name] = value
    return found


def _bad_field(message: str) -> str:
    """Which flag has a value that a node cannot have."""
    rules = {
        "$.labels": "--label: names and values are letters, digits, '.', '_' and '-', e.g. "
        "pool=a100; a node has at most 64",
        "$.taints": "--taint: write a word such as spot, or NAME=VALUE",
        "$.order": "--order: is set by an engine, e.g. o12",
        "$.origin": "--origin: is set by an engine: the name of its supply",
    }
    for path, text in rules.items():
        if path in message:
            return text
    return message


def _from_file(found: NodeSpec, file: Path) -> NodeSpec:
    """The node with the fields of a file."""
    import msgspec

    from shoal.forms import datafile
    from shoal.forms.failure import BadField
    from shoal.model.node import NodeSpec

    text = datafile.read_text(file.expanduser(), "node file")
    ending = file.suffix if file.suffix in (".yaml", ".yml", ".toml", ".json") else ".yaml"
    try:
        fields = {str(name): value for name, value in datafile.load(text, ending).items()}
        return msgspec.convert({**msgspec.to_builtins(found), **fields}, NodeSpec)
    except (BadField, msgspec.ValidationError) as error:
        raise Failure(f"--spec: {file}: {error}") from None


def given_token(token_file: Path | None) -> str:
    """From a file or the environment; other users could read it on the command line. Of what this
    process starts, nothing inherits it: jobs of the agent's own user can read its environment."""
    given = os.environ.pop(TOKEN_VARIABLE, "").strip()
    if token_file is not None:
        try:
            return token_file.expanduser().read_text().strip()
        except OSError as error:
            raise Failure(f"--token-file: {token_file}: {error.strerror}", USAGE) from None
        except UnicodeDecodeError:
            raise Failure(f"--token-file: {token_file}: holds no join token", USAGE) from None
    return given


def checked_ip(text: str | None) -> str:
    if text is None:
        return ""
    try:
        return str(ipaddress.ip_address(text.strip()))
    except ValueError:
        raise Failure(f"--node-ip: '{text[:80]}' is not an address like 10.0.0.7", USAGE) from None


def joined_nodes(home: Home) -> list[str]:
    """The machines that joined this cluster, as far as the controller knows."""
    import msgspec

    from shoal.client import Client, ShoalError

    try:
        config = home.read_config()
        if config is None or not home.address.exists():
            return []
        ours = {spec.id for spec in config.nodes}
        with Client.at_home(home.path) as client:
            return sorted(n.id for n in client.nodes() if n.health != "lost" and n.id not in ours)
    except (OSError, msgspec.DecodeError, ShoalError):
        return []


def print_how_to_join(home: Home, config: ClusterConfig) -> None:
    """The line to paste on another machine; the token itself is only for a terminal."""
    import sys

    from shoal.cli.screen.show import line
    from shoal.control.home import node_url

    url = node_url(config, home)
    if not url.startswith("https://"):
        return
    from shoal.control.jointoken import NAME

    token = join_token(home)
    if not sys.stdout.isatty():
        line(f"to add a machine, install Shoal there, copy {home.path / NAME} to it, and run:")
        print(f"  shoal join {url} --token-file {NAME}")
        return
    line("to add a machine, install Shoal there, and run:")
    # A line that is broken cannot be pasted.
    print(f"  {TOKEN_VARIABLE}={token} shoal join {url}")


def join_token(home: Home) -> str:
    """The cluster's own. With a database it is in a table there, and the home gets a copy to carry
    to other machines."""
    from shoal.client import Client
    from shoal.control.jointoken import NAME, standing
    from shoal.database.settings import FileSettings
    from shoal.machine.files import write_private

    config = home.read_config()
    if config is not None and config.database:
        with Client.at_home(home.path, patience_s=30) as client:
            write_private(home.path / NAME, client.join_token().encode())
    return standing(FileSettings(home.path))
