"""`shoal up --engine ray`: a cluster that other machines can join."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import ClusterConfig, Home
    from shoal.model.node import NodeSpec

TOKEN_VARIABLE = "SHOAL_JOIN_TOKEN"
LOOPBACK = "127.0.0.1"  # a node's default address
Notify = Callable[[str], None]


class RayPlan(NamedTuple):
    """Where Ray's head answers, this machine's address, and whether this machine is the head."""

    reach: str
    ip: str
    leads: bool
    token: str

    def nodes(self, shape: Shape) -> tuple[NodeSpec, ...]:
        """This machine, or nothing if it is only the head."""
        from shoal.forms.failure import USAGE, Failure

        if shape.topology is not None:
            message = "is for virtual nodes; with --engine ray use --place when a machine joins"
            raise Failure(f"--topology: {message}", USAGE)
        if shape.nodes is not None and shape.nodes not in (0, 1):
            message = "must be 1 or 0 with --engine ray: this machine is a node, or only the head"
            raise Failure(f"--nodes: {message}; add others with: shoal join", USAGE)
        return () if shape.nodes == 0 else (machine_spec(shape, self.ip),)


def plan(
    home: Home,
    last: ClusterConfig | None,
    engine: str | None,
    address: str | None,
    node_ip: str | None,
    token_file: Path | None,
) -> RayPlan | None:
    """None without Ray: all nodes are on this machine."""
    from shoal.engines.ray import machine
    from shoal.forms.failure import USAGE, Failure
    from shoal.kernel import own_address

    was_ray = last is not None and last.engine == "ray"
    if engine not in (None, "local", "ray"):
        raise Failure(f"--engine: must be local or ray, not '{str(engine)[:40]}'", USAGE)
    if (engine or ("ray" if was_ray else "local")) == "local":
        for flag, value in (("--address", address), ("--node-ip", node_ip)):
            if value is not None:
                raise Failure(f"{flag}: has no effect without --engine ray", USAGE)
        return None
    machine.require_ray()
    before = machine.read_node(home.path)
    host = split_address("--address", address)[0] if address else ""
    ip = checked_ip(node_ip) or (before.ip if before else "") or own_address(host)
    if address is None and was_ray and last is not None and before is not None and not before.leads:
        address = last.reach
    token = given_token(token_file)
    if address is not None:
        return RayPlan(address, ip, leads=False, token=token)
    return RayPlan(machine.head_of(home.path, ip, "").head, ip, leads=True, token=token)


def machine_spec(
    shape: Shape, ip: str, name: str = "", place: str = "", file: Path | None = None
) -> NodeSpec:
    """This machine as a node: the detected hardware, changed by the file and the flags."""
    import re

    import msgspec

    from shoal.cli.up import hardware, node_specs
    from shoal.cli.verbs.up import amount
    from shoal.forms import units
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.node import GPUS_PER_NODE_MAX, NODE_ID_PATTERN

    found = node_specs.this_machine(hardware.detect())[0]
    if file is not None:
        found = described(found, file)
        ip = ip if found.address == LOOPBACK else found.address
    if shape.gpus is not None and not 0 <= shape.gpus <= GPUS_PER_NODE_MAX:
        raise Failure(f"--gpus: must be from 0 to {GPUS_PER_NODE_MAX}, not {shape.gpus}", USAGE)
    if name and not re.fullmatch(NODE_ID_PATTERN, name):
        raise Failure(f"--name: '{name[:70]}' is not a name; use a-z, 0-9, dots and dashes", USAGE)
    if place and not re.fullmatch(r"[a-zA-Z0-9._-]{1,63}(/[a-zA-Z0-9._-]{1,63}){0,3}", place):
        raise Failure("--place: write block/rack, e.g. b1/r2", USAGE)
    changes = {
        "id": name or None,
        "gpus": shape.gpus,
        "gpu_model": shape.gpu_model,
        "gpu_memory_mb": amount("--gpu-memory", shape.gpu_memory, units.memory_mb),
        "cpu_milli": amount("--cpus", shape.cpus, units.cpu_milli),
        "memory_mb": amount("--memory", shape.memory, units.memory_mb),
        "place": place or None,
        "address": ip,
    }
    return msgspec.structs.replace(
        found, **{name: value for name, value in changes.items() if value is not None}
    )


def described(found: NodeSpec, file: Path) -> NodeSpec:
    """The node with the fields of a file."""
    import msgspec

    from shoal.forms import datafile
    from shoal.forms.failure import BadField, Failure
    from shoal.model.node import NodeSpec

    text = datafile.read_text(file.expanduser(), "node file")
    ending = file.suffix if file.suffix in (".yaml", ".yml", ".toml", ".json") else ".yaml"
    try:
        fields = {str(name): value for name, value in datafile.load(text, ending).items()}
        return msgspec.convert({**msgspec.structs.asdict(found), **fields}, NodeSpec)
    except (BadField, msgspec.ValidationError) as error:
        raise Failure(f"--spec: {file}: {error}") from None


def start_ray(home: Home, config: ClusterConfig, plan: RayPlan, progress: Notify) -> None:
    """Start this machine's part of Ray: the head, or a node of a Ray whose head is elsewhere."""
    from shoal.engines.agentlink import write_spec
    from shoal.engines.ray import admission, machine
    from shoal.engines.ray.render import token_path
    from shoal.forms.failure import Failure

    home.create()
    name = config.nodes[0].id if config.nodes else ""
    if plan.token:
        machine.keep_token(home.path, plan.token)
    if plan.leads:
        machine.make_token(home.path)
        node = machine.head_of(home.path, plan.ip, name)
    else:
        host, port = split_address("--address", plan.reach)
        head = f"{admission.resolve(host, port)}:{port}"
        if not token_path(home.path).exists():
            raise Failure(f"a token is needed: {admission.TOKEN_ADVICE}, or set {TOKEN_VARIABLE}")
        admission.ask_ray(home.path, head, 0)
        node = machine.member_of(home.path, head, plan.ip, name)
    for spec in config.nodes:
        write_spec(home.node(spec.id), spec)
    machine.write_node(home.path, node)
    machine.start_keeper(home.path)
    machine.wait_for_head(home.path, node, progress)


def given_token(token_file: Path | None) -> str:
    """From a file or the environment; other users could read it on the command line."""
    from shoal.forms.failure import USAGE, Failure

    if token_file is not None:
        try:
            text = token_file.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"--token-file: cannot read {token_file}: {error}", USAGE) from None
        where = f"--token-file: {token_file}"
    else:
        text, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not text:
            return ""
    if not 16 <= len(text) <= 4096 or not text.isascii() or not text.isprintable() or " " in text:
        raise Failure(f"{where} is not a token; copy ray/token from the head's home", USAGE)
    return text


def split_address(flag: str, text: str) -> tuple[str, int]:
    from shoal.forms.failure import USAGE, Failure

    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536 or "/" in host:
        raise Failure(f"{flag}: write HOST:PORT, e.g. 10.0.0.1:7701, not '{text[:80]}'", USAGE)
    return host, int(port)


def checked_ip(text: str | None) -> str:
    from shoal.forms.failure import USAGE, Failure

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
        if config is None or config.engine != "ray" or not home.address.exists():
            return []
        ours = {spec.id for spec in config.nodes}
        with Client.at_home(home.path) as client:
            return sorted(n.id for n in client.nodes() if n.health != "lost" and n.id not in ours)
    except (OSError, msgspec.DecodeError, ShoalError):
        return []


def print_how_to_join(home: Home, config: ClusterConfig) -> None:
    from shoal.cli.screen.show import line

    line("to add a machine that has the same Shoal, Ray and Python, run there:")
    line(f"  shoal join {config.reach} --token-file token")
    line(f"`token` is a copy of {home.ray / 'token'}; or put its text in {TOKEN_VARIABLE}")
