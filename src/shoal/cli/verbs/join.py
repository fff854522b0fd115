"""`shoal join` and `shoal leave`: add this machine to a cluster, and remove it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb

if TYPE_CHECKING:
    from shoal.control.home import Home
    from shoal.engines.ray.render import RayNode
    from shoal.model.node import NodeSpec

Notify = Callable[[str], None]

JOIN_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 600.0
TOLD_TIMEOUT_S = 2.5  # an agent looks once a second whether it should leave
POLL_S = 0.1


@verb(
    Argument("head", "HOST:PORT", "The head's address, as `shoal up` printed it."),
    Option("--name", metavar="N", default="", help="The node's name. [the host name]"),
    Option("--place", metavar="B/R", default="", help="Its block and rack, e.g. b1/r2."),
    Option("--gpus", metavar="G", type=number(), help="Number of GPUs. [as detected]"),
    Option("--cpus", metavar="C", help="Number of CPUs, e.g. 16 or 0.5. [as detected]"),
    Option("--memory", metavar="SIZE", help="Memory, e.g. 64G. [as detected]"),
    Option("--node-ip", metavar="IP", help="The address at which other machines reach this one."),
    Option("--spec", metavar="FILE", type=Path, help="YAML or JSON file that describes the node."),
    Option(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="File with the head's token. [$SHOAL_JOIN_TOKEN]",
    ),
    on_head=True,
)
def join(
    head: str,
    name: str,
    place: str,
    gpus: int | None,
    cpus: str | None,
    memory: str | None,
    node_ip: str | None,
    spec: Path | None,
    token_file: Path | None,
    json: bool,
    home: Path,
) -> None:
    """Add this machine to a cluster as a node.

    The cluster's head was started with `shoal up --engine ray`, which printed
    its address. CPUs, memory and GPUs are detected. The token is a copy of
    ray/token in the head's home; it is kept here for the next time.

    A file given with --spec sets fields of the node: id, place, gpus,
    gpu_model, gpu_memory_mb, cpu_milli, memory_mb, address. Flags override it.

    If this machine has already joined, nothing changes.

    Examples:
      shoal join 10.0.0.1:7701 --token-file token
      shoal join 10.0.0.1:7701 --name gpu7 --place b1/r2
      SHOAL_JOIN_TOKEN=... shoal join head:7701
    """
    from shoal.cli.screen import show
    from shoal.cli.up import ray as ray_up
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import Home
    from shoal.engines.ray import machine

    machine.require_ray()
    place_ = Home(home)
    host, port = ray_up.split_address("HOST:PORT", head)
    shape = Shape(None, gpus, None, None, cpus, memory, None)
    already = _already(place_, host, port)
    if already is None:
        token = ray_up.given_token(token_file)
        with show.Spinner(quiet=json) as progress:
            found = _join(
                place_,
                (host, port),
                token,
                lambda ip: ray_up.machine_spec(shape, ip, name, place, spec),
                ray_up.checked_ip(node_ip),
                progress,
            )
    else:
        found = already
    if json:
        show.as_json({"node": found, "head": head, "already": already is not None})
    else:
        from shoal.model.node import kind_text

        did = "is already in" if already is not None else "joined"
        show.line(f"{found.id} {did} the cluster at {head}: {kind_text(found)}", "green")


@verb(
    flag("--now", help="Do not wait: stop the jobs here, and run them on other nodes."),
    Option(
        "--timeout",
        metavar="T",
        help="Wait at most this long, then stop the remaining jobs. [10m]",
    ),
    on_head=True,
)
def leave(now: bool, timeout: str | None, json: bool, home: Path) -> None:
    """Remove this machine from the cluster it joined.

    Nothing new starts here. Jobs that may restart move to other nodes; the
    command waits for the other jobs. Then everything that Shoal runs here ends.
    If this machine is not in a cluster, there is nothing to do (exit 0).

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
    from shoal.model.resources import plural

    place = Home(home)
    node = machine.read_node(place.path)
    if node is None or not (held(place.starter_lock) or _agent_runs(place, node)):
        _print_left(json, "", f"this machine is not in a cluster ({home}); nothing to do")
        return
    if node.leads:
        raise Failure("this machine is the head of the cluster; stop the cluster with: shoal down")
    timeout_s = 0.0 if now else _seconds(timeout)
    with show.Spinner(quiet=json) as progress:
        ended = _leave(place, node, timeout_s, progress)
    what = f"; {plural(ended, 'member')} stopped" if ended else ""
    _print_left(json, node.node, f"{node.node} left the cluster at {node.head}{what}")


def _already(home: Home, host: str, port: int) -> NodeSpec | None:
    """This machine's node in that cluster, if it has joined."""
    import socket

    import msgspec

    from shoal.control.lifecycle import is_up
    from shoal.engines.ray import machine
    from shoal.files import held
    from shoal.forms.failure import Failure
    from shoal.model.node import NodeSpec

    if is_up(home):
        raise Failure(f"a cluster is up in {home.path}; stop it first, or use another --home")
    node = machine.read_node(home.path)
    if node is None or not held(home.starter_lock):
        return None
    try:
        asked = f"{socket.gethostbyname(host)}:{port}"
    except OSError:
        asked = f"{host}:{port}"
    if node.head != asked:
        raise Failure(f"this machine is in the cluster at {node.head}; first: shoal leave")
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
    progress: Notify,
) -> NodeSpec:
    from shoal.engines.agentlink import last_incarnation, write_spec
    from shoal.engines.ray import admission, machine, messages
    from shoal.engines.ray.render import token_path
    from shoal.forms.failure import Failure
    from shoal.kernel import own_address

    progress(f"looking for the head at {head[0]}:{head[1]}")
    address = admission.resolve(*head)
    reach = f"{address}:{head[1]}"
    spec = describe(node_ip or own_address(address))
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
    (home.node(spec.id) / "leaving").unlink(
        missing_ok=True
    )  # left over from an interrupted `shoal leave`
    begun_ns = time.time_ns()
    machine.start_keeper(home.path)
    _wait_for_contact(home, spec, begun_ns, progress)
    return spec


def _wait_for_contact(home: Home, spec: NodeSpec, begun_ns: int, progress: Notify) -> None:
    """Wait until the controller has contacted the agent. On failure, clean up."""
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
        f"the controller did not contact {spec.id} within {JOIN_TIMEOUT_S:.0f} s; "
        f"see {home.ray / 'ray.log'}"
    )


def _leave(home: Home, node: RayNode, timeout_s: float, progress: Notify) -> int:
    """Ask to leave, wait, and stop what is left; returns the number of members stopped."""
    from shoal.control.lifecycle import end_agent, take_down
    from shoal.files import held, write_private
    from shoal.model.resources import plural

    directory = home.node(node.node)
    write_private(directory / "leaving", b"")
    begun = time.monotonic()
    while held(directory / "agent.lock"):
        waited = time.monotonic() - begun
        members = _members(directory)
        if waited > max(timeout_s, TOLD_TIMEOUT_S):
            progress("stopping the remaining jobs")
            end_agent(directory)
            break
        progress(f"waiting for {plural(members, 'member')} of jobs" if members else "leaving")
        time.sleep(POLL_S)
    else:
        members = 0
    progress("stopping Ray")
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
