"""This machine's part of a cluster: join, leave, install-service and slurm-commands."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, Failure

if TYPE_CHECKING:
    from shoal.cli.boot import Systemd, Unit
    from shoal.cli.up.hardware import Described
    from shoal.cli.up.membership import Notify
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import Home
    from shoal.model.node import NodeSpec


ENGINES = "For engines and scripts"
PATIENCE_S = 120.0  # in the foreground an engine started us, and the head may be restarting
LEAVE_TIMEOUT_S = 600.0


@verb(
    Argument("head", "URL", "The head's address, as `shoal up` printed it."),
    Option("--name", metavar="N", default="", help="The node's name. [the host name]"),
    Option("--place", metavar="B/R", default="", help="Its block and rack, e.g. b1/r2."),
    Option("--label", metavar="K=V", multiple=True, help="A label, e.g. pool=a100. Repeatable."),
    Option("--taint", metavar="T", multiple=True, help="Keep away jobs that do not tolerate it."),
    Option("--gpus", metavar="G", type=number(), help="Number of GPUs. [as detected]"),
    Option("--gpu-model", metavar="MODEL", help="Their model, e.g. A100. [as detected]"),
    Option("--gpu-memory", metavar="SIZE", help="Memory of each, e.g. 80G. [as detected]"),
    Option("--cpus", metavar="C", help="Number of CPUs, e.g. 16 or 0.5. [as detected]"),
    Option("--memory", metavar="SIZE", help="Memory, e.g. 64G. [as detected]"),
    Option("--node-ip", metavar="IP", help="The address at which other nodes reach this one."),
    Option("--spec", metavar="FILE", type=Path, help="YAML or JSON file that describes the node."),
    Option(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="File with the join token. [$SHOAL_JOIN_TOKEN]",
    ),
    flag("--foreground", heading=ENGINES, help="Stay until the node has left; SIGTERM ends it."),
    Option("--ends-in", metavar="S", type=number(0), heading=ENGINES, help="It ends in S seconds."),
    Option("--ends-at", metavar="T", type=number(0), heading=ENGINES, help="... at Unix time T."),
    Option("--order", metavar="O", default="", heading=ENGINES, help="The order that brings it."),
    Option("--origin", metavar="S", default="", heading=ENGINES, help="The supply that it is of."),
    on_head=True,
)
def join(
    head: str,
    name: str,
    place: str,
    label: tuple[str, ...],
    taint: tuple[str, ...],
    gpus: int | None,
    gpu_model: str | None,
    gpu_memory: str | None,
    cpus: str | None,
    memory: str | None,
    node_ip: str | None,
    spec: Path | None,
    token_file: Path | None,
    foreground: bool,
    ends_in: int | None,
    ends_at: int | None,
    order: str,
    origin: str,
    json: bool,
    home: Path,
) -> None:
    """Add this machine to a cluster as a node.

    `shoal up --host 0.0.0.0` on the head prints the line to run here. The agent
    of this machine dials the head, so nothing here has to accept connections,
    and a NAT or a proxy may be in between. CPUs, memory and GPUs are detected.

    The join token is the file join-token in the head's home. With it the machine
    gets a key of its own, which it keeps: without a token, a machine that was in
    the cluster before comes back with that key.

    A file given with --spec sets fields of the node: id, place, labels, taints,
    gpus, gpu_model, gpu_memory_mb, cpu_milli, memory_mb, address. Flags override
    it. If this machine has already joined, nothing changes.

    Examples:
      shoal join https://head:7700 --token-file join-token
      SHOAL_JOIN_TOKEN=... shoal join head:7700 --name gpu7 --place b1/r2
      shoal join head:7700 --token-file token --label pool=a100 --taint spot
      shoal join head:7700 --token-file token --foreground --ends-in 3600
    """
    from shoal.cli.screen import show
    from shoal.cli.up import hardware, membership
    from shoal.cli.verbs.up import Shape
    from shoal.control.home import Home
    from shoal.engines.linked.joining import at
    from shoal.forms.failure import USAGE, Failure

    if ends_in is not None and ends_at is not None:
        raise Failure("--ends-at: cannot be combined with --ends-in; give one of them", USAGE)
    place_, url = Home(home), at(head).url
    shape = Shape(None, gpus, gpu_model, gpu_memory, cpus, memory, None)
    ip = hardware.checked_ip(node_ip)
    said = hardware.Described(name, place, ip, label, taint, origin, order, spec)
    already = None if foreground else _already(place_, url, name)
    said = said._replace(name=name or membership.name_before(place_, url))
    found = already
    if found is None:
        end_s = time.time() + ends_in if ends_in is not None else ends_at
        with show.Spinner(quiet=json) as progress:
            progress(f"looking for the head at {url}")
            patience_s = PATIENCE_S if foreground else 0.0
            token = hardware.given_token(token_file)
            found = _prepare(place_, url, token, shape, said, patience_s)
            folder = place_.node(found.id)
            _note_end(folder, end_s)
            if not foreground:
                _start(folder, progress)
    if foreground:
        show.note(f"{found.id} joins the cluster at {url}")
        membership.become_starter(place_.node(found.id))
    _print_joined(json, found, url, already is not None)


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
    """Remove this machine from its cluster.

    Nothing new starts here. Jobs that may restart move to other nodes; the
    command waits for the other jobs. Then everything that Shoal runs here ends,
    and the machine's key is void. If this machine is not in a cluster, there is
    nothing to do (exit 0).

    Examples:
      shoal leave
      shoal leave --timeout 2h
      shoal leave --now
    """
    from shoal.cli.screen import show
    from shoal.cli.up import membership
    from shoal.control.home import Home
    from shoal.control.lifecycle import is_up
    from shoal.engines.linked.joining import head_of
    from shoal.forms.failure import Failure
    from shoal.model.resources import plural

    place = Home(home)
    folders = membership.here(place)
    if not folders and is_up(place):
        raise Failure("this machine is the head of the cluster; stop the cluster with: shoal down")
    if not folders:
        _print_left(json, [], f"this machine is not in a cluster ({home}); nothing to do")
        return
    timeout_s = 0.0 if now else _seconds(timeout)
    for folder in folders:
        url = head_of(folder)
        with show.Spinner(quiet=json) as progress:
            ended = membership.leave(folder, timeout_s, progress)
        what = f"; {plural(ended, 'member')} stopped" if ended else ""
        _print_left(json, [folder.name], f"{folder.name} left the cluster at {url}{what}")


def _already(home: Home, url: str, name: str) -> NodeSpec | None:
    """This machine's node in that cluster, if it has joined and the head accepts its key."""
    import msgspec

    from shoal.cli.up import membership
    from shoal.control.lifecycle import is_up
    from shoal.engines.linked.joining import head_of
    from shoal.forms.failure import Failure
    from shoal.machine.files import LEAVING, SPEC
    from shoal.model.node import NodeSpec

    if is_up(home):
        raise Failure(f"a cluster is up in {home.path}; stop it first, or use another --home")
    for folder in membership.here(home):
        if head_of(folder) != url:
            known = head_of(folder)
            raise Failure(f"this machine is in the cluster at {known}; first: shoal leave")
        if name not in ("", folder.name):
            text = f"this machine is in that cluster as {folder.name}; first: shoal leave"
            raise Failure(f"{text}, or use another --home for a second node")
        (folder / LEAVING).unlink(missing_ok=True)
        if not membership.refused(folder):
            membership.start(folder)  # its starter may have been killed
            return msgspec.json.decode((folder / SPEC).read_bytes(), type=NodeSpec)
    return None


def _prepare(
    home: Home, url: str, token: str, shape: Shape, said: Described, patience_s: float
) -> NodeSpec:
    """With a token, this machine gets a key. Without one, it uses the key that it has."""
    from shoal.cli.up.hardware import TOKEN_VARIABLE, machine_spec
    from shoal.engines.agentlink import write_spec
    from shoal.engines.linked.joining import ADVICE, at, head_of, prepare
    from shoal.forms.failure import USAGE, Failure
    from shoal.machine.kernel import own_address

    spec = machine_spec(shape, said.ip or own_address(at(url).host), said)
    folder = home.node(spec.id)
    if token:
        prepare(home.path, url, token, spec, patience_s)
    elif head_of(folder) == url:
        write_spec(folder, spec)
    else:
        raise Failure(
            f"a join token is needed: {ADVICE}, and name the copy with --token-file, "
            f"or set {TOKEN_VARIABLE}",
            USAGE,
        )
    return spec


def _note_end(folder: Path, end_s: float | None) -> None:
    from shoal.machine.ends import forget_end, write_end

    if end_s is None:
        forget_end(folder)
    else:
        write_end(folder, end_s, "its time limit")


def _start(folder: Path, progress: Notify) -> None:
    """Start the node, and wait until the head has spoken to it. On failure, end it again."""
    from shoal.cli.up import membership
    from shoal.control.lifecycle import end_node

    begun_ns = time.time_ns()
    progress(f"starting the agent of {folder.name}")
    membership.start(folder)
    try:
        membership.wait_for_contact(folder, begun_ns, progress)
    except BaseException:
        end_node(folder)
        raise


def _seconds(text: str | None) -> float:
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import BadAmount, duration_ms

    if text is None:
        return LEAVE_TIMEOUT_S
    try:
        return duration_ms(text) / 1000
    except BadAmount as error:
        raise Failure(f"--timeout: {error}", USAGE) from None


def _print_joined(json: bool, spec: NodeSpec, url: str, already: bool) -> None:
    from shoal.cli.screen import show
    from shoal.model.node import kind_text

    if json:
        show.as_json({"node": spec, "head": url, "already": already})
    else:
        did = "is already in" if already else "joined"
        show.line(f"{spec.id} {did} the cluster at {url}: {kind_text(spec)}", "green")


def _print_left(json: bool, nodes: list[str], text: str) -> None:
    from shoal.cli.screen import show

    if json:
        show.as_json({"left": nodes[0] if nodes else ""})
    else:
        show.line(text)


# `shoal install-service`: start this machine's head and nodes at boot, with systemd.


LINGER = "loginctl enable-linger"


@verb(
    flag("--head", help="Only the head of the cluster."),
    flag("--node", help="Only the nodes with which this machine joined a cluster."),
    flag("--user", help="Units of your own, although you are root."),
    flag("--print", help="Print the units, and change nothing."),
    Option(
        "--enable/--no-enable",
        default=True,
        help="Also start them, now and at every boot. [yes]",
    ),
    flag("--remove", help="Remove the units; what runs continues."),
    on_head=True,
)
def install_service(
    head: bool,
    node: bool,
    user: bool,
    print: bool,  # noqa: A002
    enable: bool,
    remove: bool,
    json: bool,
    home: Path,
) -> None:
    """Start this machine's part of a cluster at boot.

    Writes a unit of systemd for the head if `shoal up` has started a cluster
    here, and one for each node with which this machine has joined a cluster
    (`shoal join`). Root gets units of the system. Other users get units of their
    own, which start at boot after `loginctl enable-linger`.

    The units use the Python that runs this command, this home, and the PATH and
    the settings of this shell that jobs may see. Run it again after a change.

    Jobs outlive the head's unit: `systemctl restart shoal-head` replaces the
    controller, and nothing else. Stopping a node's unit ends the node, and its
    jobs continue elsewhere.

    Without systemd, the units are written all the same, and the commands that
    enable them are printed.

    Examples:
      shoal install-service
      shoal install-service --print
      shoal install-service --node --no-enable
      shoal install-service --home /srv/shoal
      shoal install-service --remove
    """
    from shoal.cli.boot import Systemd, units
    from shoal.control.home import Home
    from shoal.forms.failure import USAGE, Failure

    if remove and print:
        raise Failure("--print: cannot be combined with --remove; give one of them", USAGE)
    systemd = Systemd(own=user or os.geteuid() != 0)
    if remove:
        names = systemd.installed(Home(home).path)
        only = [kind for kind, asked in (("head", head), ("node", node)) if asked]
        wanted = tuple(f"shoal-{kind}" for kind in only or ("head", "node"))
        _remove(systemd, [name for name in names if name.startswith(wanted)], home, json)
        return
    try:
        found = units(Home(home), systemd, head=head, node=node)
        if print:
            _print(systemd, found, json)
            return
        paths = [systemd.write(unit) for unit in found]
    except ValueError as error:
        raise Failure(str(error)) from None
    _install(systemd, found, paths, enable=enable, json=json)


def _print(systemd: Systemd, units: list[Unit], json: bool) -> None:
    import sys

    from shoal.cli.boot import render
    from shoal.cli.screen import show

    texts = {str(systemd.folder / unit.name): render(unit) for unit in units}
    if json:
        show.as_json({"units": [{"path": path, "text": texts[path]} for path in texts]})
    else:
        shown = [f"# {path}\n{text}" for path, text in texts.items()]
        sys.stdout.write("\n".join(shown))


def _install(
    systemd: Systemd, units: list[Unit], paths: list[Path], *, enable: bool, json: bool
) -> None:
    from shoal.cli.screen import show

    names = [unit.name for unit in units]
    started = enable and systemd.runs
    if started:
        with show.Spinner(quiet=json) as progress:
            progress("reading the units")
            systemd.order("daemon-reload")
            for name in names:
                progress(f"starting {name}")
                systemd.order("enable", "--now", name)
    left = [] if started else systemd.commands("daemon-reload", f"enable --now {' '.join(names)}")
    left += [] if systemd.lingers() else [LINGER]
    if json:
        show.as_json({"units": list(map(str, paths)), "started": started, "next": left})
        return
    for path in paths:
        show.line(f"{path} {'starts at boot, and runs' if started else 'is written'}", "green")
    if enable and not started:
        show.note("systemd does not run here, or does not answer")
    if left:
        show.line("next: " + "; ".join(left))


def _remove(systemd: Systemd, names: list[str], home: Path, json: bool) -> None:
    from shoal.cli.screen import show

    runs = bool(names) and systemd.runs
    for name in names:
        if runs:
            systemd.order("disable", name)
        systemd.remove(name)
    if runs:
        systemd.order("daemon-reload")
    if json:
        show.as_json({"removed": names})
    elif names:
        show.line(f"{', '.join(names)} removed; what runs continues until: shoal down, shoal leave")
    else:
        show.line(f"no unit in {systemd.folder} is for {home}; nothing to do")


# `shoal slurm-commands`: sbatch, srun and the like as commands that speak to Shoal.


MARK = "# Written by shoal slurm-commands."


@verb(
    Argument("folder", "DIR", "Where to write them; it should be in the PATH."),
    flag("--remove", help="Remove them again."),
)
def slurm_commands(folder: str, remove: bool, json: bool, home: Path) -> None:  # noqa: ARG001
    """Install sbatch, srun and others, for Slurm scripts.

    It writes sbatch, srun, squeue, scancel, sacct and scontrol. Scripts with
    #SBATCH lines, and tools that call Slurm's commands, then run on Shoal
    (docs/slurm-commands.md). They use the Python that runs this
    command. A command that is there already, such as a real sbatch, is not replaced.

    Examples:
      shoal slurm-commands ~/bin
      shoal slurm-commands ~/bin --remove
    """
    import shlex
    import sys

    from shoal.cli.screen import show
    from shoal.cli.slurm.commands import COMMANDS

    place = Path(folder).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / name for name in COMMANDS]
    strange = [path for path in paths if path.exists() and MARK not in path.read_text("latin-1")]
    if strange:
        raise Failure(f"DIR: {strange[0]} is another program; choose another folder", REFUSED)
    for path in paths:
        if remove:
            path.unlink(missing_ok=True)
            continue
        words = [sys.executable, "-P", "-m", "shoal.cli.slurm", path.name]
        path.write_text(f'#!/bin/sh\n{MARK}\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
    if json:
        show.as_json([str(path) for path in paths])
    else:
        show.line(f"{'removed' if remove else 'wrote'} {', '.join(COMMANDS)} in {place}")
