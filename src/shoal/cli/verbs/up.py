"""`shoal up` and `shoal down`: a cluster on this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption
from shoal.forms.failure import REFUSED

if TYPE_CHECKING:
    from shoal.cli.rayup import Wish
    from shoal.control.home import ClusterConfig, Home
    from shoal.control.lifecycle import Up
    from shoal.model.node import NodeSpec

PORT_MAX = 65_535


def up(
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="So many virtual nodes.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="G", help="GPUs of each virtual node.")
    ] = None,
    gpu_model: Annotated[
        str | None,
        typer.Option("--gpu-model", metavar="MODEL", help="Their model, e.g. A100."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="The memory of each GPU, e.g. 80G."),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option("--cpus", metavar="C", help="CPUs of each virtual node, e.g. 16 or 0.5."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory of each virtual node, e.g. 8G."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option("--topology", metavar="BxR", help="B blocks of R racks each, e.g. 2x2."),
    ] = None,
    this_machine: Annotated[
        bool, typer.Option("--this-machine", help="One node: this machine, as it is.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="E", help="local, or ray for many machines. [local]"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Use the Ray that is led there."),
    ] = None,
    node_ip: Annotated[
        str | None,
        typer.Option("--node-ip", metavar="IP", help="This machine's address for the others."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="The token of the Ray at --address."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option("--hosts", metavar="FILE", help="Join the hosts of this file, over ssh."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="Listen on this address. [127.0.0.1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="P", help="Listen on this port; 0 is any free one. [7700]"),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option("--domain", help="Services answer to NAME.DOMAIN, too. [localhost]"),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Start a cluster on this machine.

    Without --nodes or --gpus it is one node with the CPUs, memory and GPUs
    found here. With them it is virtual nodes n1, n2, ...: their GPUs are
    numbers that the scheduler counts with, their processes are real. A
    virtual node gets plenty of CPUs and its share of the memory.

    --topology puts virtual nodes into racks, in order: with 8 nodes, 2x2
    makes b1/r1 of n1 and n2, b1/r2 of n3 and n4, b2/r1 of n5 and n6, b2/r2 of
    n7 and n8.

    With --engine ray other machines may join: it prints how. This machine
    leads them and is a node as well, or only leads with --nodes 0.

    --hosts takes a YAML list of servers and makes them nodes, many at a time,
    over ssh with your own keys and settings: Shoal is installed there if it is
    not, and they join. Each has a field host, and may have user, port, name,
    place, gpus, and python (an interpreter there that has Shoal already). With
    the same file again only what differs is done; who is no longer in it
    leaves. If some fail the others go on, and the exit code is 1.

    What was up before comes back as it was, with its jobs, when no flag says
    otherwise. On a cluster that is up, the same flags change nothing, and
    others are refused: down first.

    Examples:
      shoal up                                   this machine, or what was up last
      shoal up --nodes 4 --gpus 8                four virtual nodes
      shoal up --nodes 8 --gpus 8 --topology 2x2
      shoal up --nodes 2 --gpus 4 --gpu-model A100 --gpu-memory 80G
      shoal up --engine ray                      for many machines, see `shoal join`
      shoal up --hosts hosts.yaml                these servers, over ssh
      shoal up --home ~/try --port 0             a second one, apart from the first
    """
    from shoal.cli import rayup
    from shoal.cli.hosts import Bringing
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.control.lifecycle import bring_up, is_up

    place = Home(home)
    bringing = None if hosts is None else Bringing(place, hosts, engine)
    engine = "ray" if bringing is not None else engine
    shape = Shape(nodes, gpus, gpu_model, gpu_memory, cpus, memory, topology or None)
    last = _last_config(place)
    ray = rayup.wish(place, last, engine, address, node_ip, token_file)
    config = _config(last, shape, this_machine, host, port, domain, ray)
    _warn_if_open(config.host)
    with show.Progress(quiet=json) as progress:
        if ray is not None and (config == last or not is_up(place)):
            rayup.start_ray(place, config, ray, progress)
        answer = bring_up(place, config, progress)
    outcomes = [] if bringing is None else bringing.bring(config.reach, quiet=json)
    if json:
        more = {"reach": config.reach} if ray is not None else {}
        _print_json(config, answer, place, more | ({"hosts": outcomes} if bringing else {}))
    else:
        _print_up(config, answer, home)
        if bringing is not None:
            bringing.show(outcomes)
        elif ray is not None:
            rayup.tell_how_to_join(place, config)
    if any(outcome.state == "failed" for outcome in outcomes):
        raise typer.Exit(REFUSED)


def down(json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Stop the cluster and all that runs on it.

    Machines that have joined run on with their jobs, and come back with them at
    the next `shoal up`; to end them there, use `shoal leave --now`.

    Jobs stay in the store: what was queued or running goes on at the next
    `shoal up`. If no cluster is up there is nothing to do, and the exit code
    is 0.

    Examples:
      shoal down
      shoal down --home ~/try
    """
    from shoal.cli import rayup
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.control.lifecycle import take_down

    others = rayup.others(Home(home))
    with show.Progress(quiet=json) as progress:
        stopped = take_down(Home(home), progress, show.note)
    if json:
        show.as_json({"stopped": stopped})
    elif stopped:
        what = "1 process" if stopped == 1 else f"{stopped} processes"
        show.line(f"the cluster in {home} is down: {what} stopped")
        if others:
            show.line(
                f"{', '.join(others)} run on with their jobs, and are back at the next `shoal up`; "
                "to end them, there: shoal leave --now"
            )
    else:
        show.line(f"no cluster is up in {home}; nothing to do")


class Shape(NamedTuple):
    """What the flags say of virtual nodes; None was not said."""

    nodes: int | None
    gpus: int | None
    gpu_model: str | None
    gpu_memory: str | None
    cpus: str | None
    memory: str | None
    topology: str | None


def _config(
    last: ClusterConfig | None,
    shape: Shape,
    this_machine: bool,
    host: str | None,
    port: int | None,
    domain: str | None,
    ray: Wish | None,
) -> ClusterConfig:
    """What the flags ask for; the rest as it was last time, or else by default."""
    import re

    import msgspec

    from shoal.control.home import ClusterConfig
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.service import DOMAIN_PATTERN

    if this_machine and any(part is not None for part in shape):
        raise Failure("--this-machine: leave out --nodes, --gpus and the like, or it", USAGE)
    if port is not None and not 0 <= port <= PORT_MAX:
        raise Failure(f"--port: must be from 0 to {PORT_MAX}, not {port}", USAGE)
    engine = "local" if ray is None else "ray"
    as_before = last is not None and last.engine == engine and not this_machine
    if last is not None and as_before and all(part is None for part in shape):
        nodes = last.nodes
    else:
        nodes = _nodes(shape) if ray is None else ray.nodes(shape)
    changes: dict[str, object] = {"nodes": nodes, "engine": engine}
    changes["reach"] = "" if ray is None else ray.reach
    if host is not None:
        changes["host"] = host
    if port is not None:
        changes["port"] = port
    if domain is not None:
        if not re.search(DOMAIN_PATTERN, domain):
            raise Failure(f"--domain: {domain!r} is not a name such as ai.example.com", USAGE)
        changes["domain"] = domain
    return msgspec.structs.replace(last or ClusterConfig(nodes=nodes), **changes)


def _last_config(home: Home) -> ClusterConfig | None:
    import msgspec

    from shoal.forms.failure import Failure

    try:
        return home.read_config()
    except msgspec.DecodeError as error:
        raise Failure(f"{home.config} is damaged ({error}); mend or remove it") from None


def _nodes(shape: Shape) -> tuple[NodeSpec, ...]:
    from shoal.cli import layout, machine
    from shoal.forms import units

    if all(part is None for part in shape):
        return layout.this_machine(machine.detect())
    gpu_memory_mb = amount("--gpu-memory", shape.gpu_memory, units.memory_mb)
    return layout.virtual_nodes(
        machine.detect(),
        nodes=1 if shape.nodes is None else shape.nodes,
        gpus=shape.gpus or 0,
        cpu_milli=amount("--cpus", shape.cpus, units.cpu_milli),
        memory_mb=amount("--memory", shape.memory, units.memory_mb),
        topology=shape.topology or "",
        gpu_model=(shape.gpu_model or "").strip(),
        gpu_memory_mb=gpu_memory_mb or 0,
    )


def amount(flag: str, text: str | None, parse: Callable[[str], int]) -> int | None:
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import BadAmount

    try:
        return None if text is None else parse(text)
    except BadAmount as error:
        raise Failure(f"{flag}: {error}", USAGE) from None


def _warn_if_open(host: str) -> None:
    from shoal.cli.screen.show import note

    try:
        private = ipaddress.ip_address(host).is_loopback
    except ValueError:
        private = host == "localhost"
    if not private:
        note(
            f"warning: {host} can be reached from other machines; whoever has the token may run "
            "anything as you, and nothing is encrypted"
        )


def _print_json(config: ClusterConfig, answer: Up, home: Home, more: dict[str, Any]) -> None:
    from shoal.cli.screen.show import as_json

    as_json(
        {
            "url": answer.address.url,
            "pid": answer.address.pid,
            "already": answer.already,
            "home": str(home.path),
            "nodes": config.nodes,
            **more,
        }
    )


def _print_up(config: ClusterConfig, answer: Up, home: Path) -> None:
    from shoal.cli.screen.show import at_terminal, line
    from shoal.model.resources import plural

    gpus = sum(node.gpus for node in config.nodes)
    size = f"{plural(len(config.nodes), 'node')}, {plural(gpus, 'GPU')}"
    was = "is already up" if answer.already else "is up"
    line(f"the cluster {was} at {answer.address.url}: {size}; its files are in {home}", "green")
    line(f"its page is {answer.address.url}/ (a link that signs you in: shoal page)")
    if at_terminal() and not answer.already:
        gpu_flag = "-g 1 " if gpus else ""
        line("try next:")
        line(f"  shoal run --wait {gpu_flag}-- echo hello")
        line("  shoal status")
        line("  shoal down")
