"""`shoal join` and `shoal leave`: this machine becomes a node of a cluster led elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.control.home import Home
    from shoal.engines.ray.render import RayNode
    from shoal.model.node import NodeSpec

Progress = Callable[[str], None]

JOIN_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 600.0
TOLD_TIMEOUT_S = 2.5  # an agent looks once a second whether it is to leave
POLL_S = 0.1


def join(
    head: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where the head is, as `shoal up` said.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Its name. [the host's name]")
    ] = None,
    place: Annotated[
        str | None, typer.Option("--place", metavar="B/R", help="Its block and rack, e.g. b1/r2.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="G", help="So many GPUs, not those found.")
    ] = None,
    cpus: Annotated[
        str | None, typer.Option("--cpus", metavar="C", help="So many CPUs, e.g. 16 or 0.5.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="So much memory, e.g. 64G.")
    ] = None,
    node_ip: Annotated[
        str | None,
        typer.Option("--node-ip", metavar="IP", help="This machine's address for the others."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", metavar="FILE", help="JSON or YAML with what the node is."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="The head's token; or $SHOAL_JOIN_TOKEN."
        ),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Make this machine a node of a cluster that is led elsewhere.

    The head was started with `shoal up --engine ray`, and said where it is.
    CPUs, memory and GPUs are detected. The token is a copy of ray/token of the
    head's home; it is kept here for the next time.

    A file given with --spec holds fields of the node: id, place, gpus,
    gpu_model, gpu_memory_mb, cpu_milli, memory_mb, address. Flags win over it.

    On a machine that has joined already, nothing changes.

    Examples:
      shoal join 10.0.0.1:7701 --token-file token
      shoal join 10.0.0.1:7701 --name gpu7 --place b1/r2
      SHOAL_JOIN_TOKEN=... shoal join head:7701
    """
    from shoal.cli import rayup
    from shoal.cli.screen import show
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import Home
    from shoal.engines.ray import machine

    machine.require_ray()
    place_ = Home(home)
    host, port = rayup.split_address("HOST:PORT", head)
    shape = Shape(None, gpus, None, None, cpus, memory, None)
    already = _already(place_, host, port)
    if already is None:
        token = rayup.given_token(token_file)
        with show.Progress(quiet=json) as progress:
            found = _join(
                place_,
                (host, port),
                token,
                lambda ip: rayup.machine_spec(shape, ip, name or "", place or "", spec),
                rayup.checked_ip(node_ip),
                progress,
            )
    else:
        found = already
    if json:
        show.as_json({"node": found, "head": head, "already": already is not None})
    else:
        from shoal.model.node import kind_text

        did = "is already in" if already is not None else "has joined"
        show.line(f"{found.id} {did} the cluster led at {head}: {kind_text(found)}", "green")


def leave(
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait: what runs here is stopped, and healed.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="T", help="Wait so long, then stop what is left. [10m]"),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Take this machine out of the cluster it has joined.

    Nothing new is started here, jobs that may restart move to other nodes, and
    the others are waited for. Then all that Shoal runs here ends. On a machine
    that is in no cluster there is nothing to do, and the exit code is 0.

    Examples:
      shoal leave
      shoal leave --timeout 2h
      shoal leave --now
    """
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.engines.ray import machine
    from shoal.files import held
    from shoal.forms.failure import Failure

    place = Home(home)
    node = machine.read_node(place.path)
    if node is None or not (held(place.starter_lock) or _agent_runs(place, node)):
        _print_left(json, "", f"this machine is in no cluster by {home}; nothing to do")
        return
    if node.leads:
        raise Failure("this machine leads the cluster; take it down with: shoal down")
    timeout_s = 0.0 if now else _seconds(timeout)
    with show.Progress(quiet=json) as progress:
        ended = _leave(place, node, timeout_s, progress)
    what = f"; {ended} of its members were stopped" if ended else ""
    _print_left(json, node.node, f"{node.node} has left the cluster led at {node.head}{what}")


def _already(home: Home, host: str, port: int) -> NodeSpec | None:
    """What this machine has joined as, if it is in that cluster."""
    import socket

    import msgspec

    from shoal.control.lifecycle import is_up
    from shoal.engines.ray import machine
    from shoal.files import held
    from shoal.forms.failure import Failure
    from shoal.model.node import NodeSpec

    if is_up(home):
        raise Failure(f"a cluster is up in {home.path}; take it down first, or name another --home")
    node = machine.read_node(home.path)
    if node is None or not held(home.starter_lock):
        return None
    try:
        asked = f"{socket.gethostbyname(host)}:{port}"
    except OSError:
        asked = f"{host}:{port}"
    if node.head != asked:
        raise Failure(f"this machine is in the cluster led at {node.head}; first: shoal leave")
    directory = home.node(node.node)
    if (directory / "leaving").exists():
        (directory / "leaving").unlink(missing_ok=True)
    return msgspec.json.decode((directory / "spec.json").read_bytes(), type=NodeSpec)


def _join(
    home: Home,
    head: tuple[str, int],
    token: str,
    describe: Callable[[str], NodeSpec],
    node_ip: str,
    progress: Progress,
) -> NodeSpec:
    from shoal.engines.agentlink import last_incarnation, write_spec
    from shoal.engines.ray import admission, machine, messages
    from shoal.engines.ray.render import token_path
    from shoal.forms.failure import Failure

    progress(f"looking for the head at {head[0]}:{head[1]}")
    address = admission.resolve(*head)
    reach = f"{address}:{head[1]}"
    spec = describe(node_ip or machine.own_address(address))
    home.create()
    lack = admission.lack_of_disk(home.path)
    if lack:
        raise Failure(lack)
    if token:
        machine.keep_token(home.path, token)
    if not token_path(home.path).exists():
        raise Failure(f"a token is needed: {admission.TOKEN_ADVICE}, or set SHOAL_JOIN_TOKEN")
    facts = admission.ask(home.path, reach)
    incarnation = last_incarnation(home.node(spec.id))
    refused = admission.refusal(facts, messages.versions(), spec.id, incarnation)
    if refused:
        raise Failure(refused)
    node = machine.member_of(home.path, reach, spec.address, spec.id)
    write_spec(home.node(spec.id), spec)
    machine.write_node(home.path, node)
    (home.node(spec.id) / "leaving").unlink(missing_ok=True)  # of a leave that was cut short
    begun_ns = time.time_ns()
    machine.start_keeper(home.path)
    _wait_for_contact(home, spec, begun_ns, progress)
    return spec


def _wait_for_contact(home: Home, spec: NodeSpec, begun_ns: int, progress: Progress) -> None:
    """Until the controller has spoken to the agent here. If it does not, nothing is left behind."""
    from shoal.control.lifecycle import take_down
    from shoal.files import held
    from shoal.forms.failure import Failure

    progress(f"starting Ray and the agent of {spec.id}")
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    contact = home.node(spec.id) / "contact"
    try:
        while time.monotonic() < deadline:
            if contact.exists() and contact.stat().st_mtime_ns >= begun_ns:
                return
            if held(home.node(spec.id) / "agent.lock"):
                progress("waiting for the controller")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        take_down(home, lambda _: None)
        raise
    take_down(home, lambda _: None)
    raise Failure(
        f"the controller did not speak to {spec.id} within {JOIN_TIMEOUT_S:.0f} s; "
        f"see {home.ray / 'ray.log'}"
    )


def _leave(home: Home, node: RayNode, timeout_s: float, progress: Progress) -> int:
    """Ask, wait, and end what is left; returns how many members that were."""
    from shoal.control.lifecycle import end_agent, take_down
    from shoal.files import held, write_private

    directory = home.node(node.node)
    write_private(directory / "leaving", b"")
    begun = time.monotonic()
    while held(directory / "agent.lock"):
        waited = time.monotonic() - begun
        members = _members(directory)
        if waited > max(timeout_s, TOLD_TIMEOUT_S):
            progress("stopping what is left")
            end_agent(directory)
            break
        progress(f"waiting for {members} of its jobs' members" if members else "leaving")
        time.sleep(POLL_S)
    else:
        members = 0
    progress("ending Ray")
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while held(home.starter_lock) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    take_down(home, lambda _: None)
    return members


def _agent_runs(home: Home, node: RayNode) -> bool:
    from shoal.files import held

    return bool(node.node) and held(home.node(node.node) / "agent.lock")


def _members(directory: Path) -> int:
    try:
        return sum(1 for _ in (directory / "members").iterdir())
    except OSError:
        return 0


def _seconds(text: str | None) -> float:
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import BadAmount, duration_ms

    if text is None:
        return LEAVE_TIMEOUT_S
    try:
        return duration_ms(text) / 1000
    except BadAmount as error:
        raise Failure(f"--timeout: {error}", USAGE) from None


def _print_left(json: bool, node: str, text: str) -> None:
    from shoal.cli.screen import show

    if json:
        show.as_json({"left": node})
    else:
        show.line(text)
