"""This machine as a node of a cluster whose head is elsewhere: what it has, and how it joins."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import ClusterConfig, Home
    from shoal.model.node import NodeSpec

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

    from shoal.cli.up import hardware
    from shoal.cli.verbs.up import amount
    from shoal.forms import units
    from shoal.model.node import GPUS_PER_NODE_MAX, JOINED, NODE_ID_PATTERN, NodeSpec

    found = hardware.this_machine(hardware.detect())[0]
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
        return msgspec.convert({**msgspec.structs.asdict(found), **fields}, NodeSpec)
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
    from shoal.control.jointoken import NAME

    url = node_url(config, home)
    if not url.startswith("https://"):
        return
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
