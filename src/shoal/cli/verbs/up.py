"""A cluster on this machine: up, down, heads (the machines that run one) and upgrade."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.up.flags import Where
    from shoal.cli.up.hosts import HostsFile
    from shoal.control.home import ClusterConfig, Home
    from shoal.control.lifecycle import Up
    from shoal.control.upgrading import Part
    from shoal.hosts.spec import Outcome
    from shoal.model.node import NodeSpec
    from shoal.model.views import HeadView


HEADS = "Several heads"


@verb(
    Option("--nodes", metavar="N", type=number(), help="Start this many virtual nodes."),
    Option("--gpus", metavar="G", type=number(), help="GPUs per virtual node."),
    Option("--gpu-model", metavar="MODEL", help="The model of these GPUs, e.g. A100."),
    Option("--gpu-memory", metavar="SIZE", help="The memory of each GPU, e.g. 80G."),
    Option("--cpus", metavar="C", help="CPUs per virtual node, e.g. 16 or 0.5."),
    Option("--memory", metavar="SIZE", help="Memory per virtual node, e.g. 8G."),
    Option("--topology", metavar="BxR", help="B blocks of R racks each, e.g. 2x2."),
    flag("--this-machine", help="One node: this machine as it is."),
    Option("--engine", metavar="E", help="What brings nodes: slurm, kubernetes, ray or ec2."),
    Option("--supply", metavar="K=V,...", help="Nodes that it may bring; or a file of them."),
    Option("--address", metavar="HOST:PORT", help="With --engine ray: the Ray that runs there."),
    Option("--namespace", metavar="N", help="With --engine kubernetes: where its pods are."),
    Option("--hosts", metavar="FILE", type=Path, help="Join the hosts in this file over ssh."),
    Option("--host", metavar="ADDRESS", help="Listen on this address. [127.0.0.1]"),
    Option("--node-address", metavar="URL", help="Where nodes reach it. [there]"),
    Option(
        "--port", metavar="P", type=number(), help="Listen on this port; 0 is any free port. [7700]"
    ),
    Option("--domain", metavar="D", help="Also serve services at NAME.DOMAIN. [localhost]"),
    Option("--certificate", metavar="PEM", help="Your own certificate and its chain; '' for none."),
    Option("--key", metavar="PEM", help="Its key. [in the same file]"),
    Option(
        "--database",
        metavar="URL",
        heading=HEADS,
        help="Keep everything in this PostgreSQL: postgresql://USER@HOST/NAME.",
    ),
    Option("--shared", metavar="DIR", type=Path, heading=HEADS, help="Folder that all heads see."),
    Option(
        "--head",
        metavar="FILE",
        type=Path,
        heading=HEADS,
        help="Become a head of the cluster that wrote FILE: `shoal heads invite`.",
    ),
    flag("--foreground", help="Stay, for a container; SIGTERM ends the controller only."),
    on_head=True,
)
def up(
    nodes: int | None,
    gpus: int | None,
    gpu_model: str | None,
    gpu_memory: str | None,
    cpus: str | None,
    memory: str | None,
    topology: str | None,
    this_machine: bool,
    engine: str | None,
    supply: str | None,
    address: str | None,
    namespace: str | None,
    hosts: Path | None,
    host: str | None,
    node_address: str | None,
    port: int | None,
    domain: str | None,
    certificate: str | None,
    key: str | None,
    database: str | None,
    shared: Path | None,
    head: Path | None,
    foreground: bool,
    json: bool,
    home: Path,
) -> int:
    """Start a cluster on this machine.

    Without flags the cluster is one node with the CPUs, memory and GPUs of this
    machine. With --nodes or --gpus it has virtual nodes n1, n2, ... Their GPUs
    are only numbers for the scheduler; their processes are real. Each virtual
    node gets plenty of CPUs and its share of the memory. --topology puts them
    into racks, in order: 2x2 puts the first quarter of them in b1/r1.

    Only this machine reaches the cluster, unless --host names another address,
    such as 0.0.0.0 for all. The port then speaks TLS, with a certificate from a
    small CA that the cluster makes, or with yours (--certificate). The command
    prints the lines with which you log in on other machines, and add machines
    as nodes (`shoal join`). If nodes reach the head under another name, behind a
    proxy or a NAT, give it with --node-address. --nodes 0: only the head is here.

    With --engine, nodes come and go with the queue (see `shoal policy`): --supply
    says which and how many, in the words of a policy file. This machine is then
    only the head, unless --nodes or --this-machine says more. Ray and Kubernetes
    must run already; to make a cluster of bare machines, use `shoal join`.

    --hosts takes a YAML list of servers and makes them nodes over ssh, several
    at a time. Shoal is installed where it is missing. Each entry has a field
    host, and may have user, port, name, place, labels, gpus, and python (an
    interpreter there that has Shoal). Run it again with a changed file to apply
    only the changes; a host that is no longer in the file leaves. If some hosts
    fail, the others still join, and the exit code is 1.

    With --database the cluster survives the loss of its head: other machines
    become heads, too, with --head. See `shoal heads`.

    Without flags a cluster that was up before comes back with its jobs. If a
    cluster is up, the same flags change nothing; to use other flags, run
    `shoal down` first.

    Examples:
      shoal up                                   this machine, or the last cluster
      shoal up --nodes 4 --gpus 8                four virtual nodes
      shoal up --nodes 8 --gpus 8 --topology 2x2
      shoal up --nodes 2 --gpus 4 --gpu-model A100 --gpu-memory 80G
      shoal up --engine slurm --supply partition=gpu,gpus=8,most=16
      shoal up --hosts hosts.yaml                these servers, over ssh
      shoal up --host 0.0.0.0                    other machines can log in and join
      shoal up --host 0.0.0.0 --database postgresql://shoal@db/shoal --shared /mnt/shoal
    """
    from shoal.cli.screen import show
    from shoal.cli.up import flags, membership
    from shoal.cli.up.hosts import HostsFile
    from shoal.control.home import Home
    from shoal.control.lifecycle import Staying

    place, last = Home(home), _last_config(Home(home))
    listed = None if hosts is None else HostsFile(place, hosts)
    shape = Shape(nodes, gpus, gpu_model, gpu_memory, cpus, memory, topology or None)
    if listed is not None:
        host = flags.open_host(host, last)
    where = flags.Where(host, port, domain, certificate, key, node_address)
    wanted = flags.Wanted(engine, supply, address, namespace)
    heads = flags.Several(database, shared, head).changes(place, last)
    config = _config(last, shape, this_machine, where, wanted.name(last), heads)
    supplies = wanted.supplies(config.engine)
    flags.check(config, hosts=listed is not None)
    staying = Staying(place) if foreground else None
    with show.Spinner(quiet=json) as progress:
        start_nodes = membership.starter(place, config)
        answer = _bring_up(place, config, progress, start_nodes, stays=foreground)
        flags.use(place, supplies, whole=wanted.whole)
    outcomes = [] if listed is None else listed.bring(config, quiet=json)
    _report(place, config, answer, listed, outcomes, json)
    code = REFUSED if any(outcome.state == "failed" for outcome in outcomes) else 0
    return staying.run() if staying is not None else code


def _bring_up(
    place: Home,
    config: ClusterConfig,
    progress: Callable[[str], None],
    start_nodes: Callable[[str], None],
    *,
    stays: bool,
) -> Up:
    """A process that stays is the cluster's own, so it stays without some of the nodes, too."""
    from shoal.cli.screen import show
    from shoal.control.lifecycle import NodesMissing, bring_up

    try:
        return bring_up(place, config, progress, start_nodes)
    except NodesMissing as missing:
        if not stays:
            raise
        show.note(str(missing))
        return missing.up


@verb(on_head=True)
def down(json: bool, home: Path) -> None:
    """Stop the cluster and everything running on it.

    Jobs are kept: those that ran begin again at the next `shoal up`, from their
    last checkpoint if they save any, and those that waited wait again.
    Machines that joined keep running with their jobs, and are back at the next
    `shoal up`; to stop one, run `shoal leave --now` there. In a cluster with
    several heads, only this head and its own nodes stop. If no cluster is up,
    there is nothing to do (exit 0).

    Examples:
      shoal down
      shoal down --home ~/try
    """
    from shoal.cli.screen import show
    from shoal.cli.up import hardware
    from shoal.control.home import Home
    from shoal.control.lifecycle import take_down

    others = hardware.joined_nodes(Home(home))
    shared = False
    with suppress(OSError, ValueError):  # a damaged file must not keep it up
        config = Home(home).read_config()
        shared = config is not None and bool(config.database)
    with show.Spinner(quiet=json) as progress:
        stopped = take_down(Home(home), progress, show.note)
    if json:
        show.as_json({"stopped": stopped})
    elif stopped:
        processes = "1 process" if stopped == 1 else f"{stopped} processes"
        what = "this head" if shared else "the cluster"
        show.line(f"{what} in {home} is down: {processes} stopped")
        if shared:
            show.line("if the cluster has another head, that one leads now; see there: shoal heads")
        elif others:
            show.line(
                f"{', '.join(others)} keep running with their jobs, and are back at the next "
                "`shoal up`; to stop one, run there: shoal leave --now"
            )
    else:
        show.line(f"no cluster is up in {home}; nothing to do")


class Shape(NamedTuple):
    """The flags for virtual nodes; None means not given."""

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
    where: Where,
    engine: str,
    heads: dict[str, object],
) -> ClusterConfig:
    """The flags, then the configuration of the last time, then the defaults."""
    import msgspec

    from shoal.cli.up import flags
    from shoal.control.home import ClusterConfig
    from shoal.forms.failure import USAGE, Failure

    if this_machine and any(part is not None for part in shape):
        raise Failure("--this-machine: cannot be combined with --nodes, --gpus and the like", USAGE)
    as_before = last is not None and last.engine == engine and not this_machine
    if last is not None and as_before and all(part is None for part in shape):
        nodes = last.nodes
    else:
        nodes = _nodes(shape, this_machine or (engine == "local" and "engine" not in heads))
    changes: dict[str, object] = {"nodes": nodes, "engine": engine, **heads, **where.changes()}
    config = msgspec.structs.replace(last or ClusterConfig(nodes=nodes), **changes)
    return config if config.nodes is (last and last.nodes) else flags.with_names(config)


def _last_config(home: Home) -> ClusterConfig | None:
    import msgspec

    from shoal.forms.failure import Failure

    try:
        return home.read_config()
    except msgspec.DecodeError as error:
        raise Failure(f"{home.config} is damaged ({error}); repair or remove it") from None


def _nodes(shape: Shape, own: bool) -> tuple[NodeSpec, ...]:
    """`own`: without flags, this machine is a node. Where an engine brings nodes it is not."""
    from shoal.cli.up import hardware
    from shoal.forms import units

    if shape.nodes == 0 or (shape.nodes is None and not own):
        return ()
    if all(part is None for part in shape):
        return hardware.this_machine(hardware.detect())
    gpu_memory_mb = amount("--gpu-memory", shape.gpu_memory, units.memory_mb)
    return hardware.virtual_nodes(
        hardware.detect(),
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


def _report(
    place: Home,
    config: ClusterConfig,
    answer: Up,
    listed: HostsFile | None,
    outcomes: list[Outcome],
    json: bool,
) -> None:
    from shoal.cli.up import flags, hardware
    from shoal.control.home import node_url

    if json:
        more = {"join": node_url(config, place), "join_token": str(place.join_token)}
        _print_json(config, answer, place, more | ({"hosts": outcomes} if listed else {}))
        return
    _print_up(config, answer, place.path)
    flags.print_login(place.path)
    flags.note_context()
    if listed is not None:
        listed.show(outcomes)
    else:
        hardware.print_how_to_join(place, config)


def _print_json(config: ClusterConfig, answer: Up, home: Home, more: dict[str, Any]) -> None:
    from shoal.cli.screen.show import as_json

    as_json(
        {
            "url": answer.address.url,
            "fingerprint": answer.address.fingerprint,
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
    line(f"its page is {answer.address.url}/ (to sign in: shoal page)")
    if at_terminal() and not answer.already:
        gpu_flag = "-g 1 " if gpus else ""
        line("try next:")
        line(f"  shoal run --wait {gpu_flag}-- echo hello")
        line("  shoal status")
        line("  shoal down")


# `shoal heads`: the machines that run a controller of this cluster.


ACTIONS = ("list", "invite", "forget")


@verb(
    Argument("action", "[list|invite|forget]", "What to do. [list]", required=False),
    Argument("name", "[NAME]", "With forget: a head that will not come back.", required=False),
)
def heads(action: str | None, name: str | None, json: bool, home: Path) -> None:
    """List the heads of this cluster, or invite another one.

    A cluster that was started with `shoal up --database URL --shared DIR` can
    have several heads. One leads; the others follow it, and one of them takes
    over within seconds when it is lost. BEHIND is how many events a head does not
    know yet, SEEN when it last reported.

    invite prints what another machine needs to become a head. Whoever has this
    file can do everything in the cluster: carry it over ssh, and remove it after
    `shoal up --head FILE` there. forget takes a head off the list that will not
    come back.

    Examples:
      shoal heads
      shoal heads invite > head.json
      shoal up --head head.json --host 0.0.0.0   (on the other machine)
      shoal heads forget node7
    """
    action = action or "list"
    if action not in ACTIONS:
        text = f"ACTION: use {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}"
        raise Failure(f"{text}, not {action[:40]!r}", USAGE)
    if (name is not None) != (action == "forget"):
        raise Failure("NAME: give the name of one head with forget, and with nothing else", USAGE)
    if action == "invite":
        _invite(home)
    elif name is not None:
        _forget(name, json, home)
    else:
        _list(json, home)


def _list(json: bool, home: Path) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        found = client.heads()
    if json:
        show.as_json(found)
    elif not found:
        show.note("this cluster has one head and no database; see docs/several-heads.md")
    else:
        titles = ("HEAD", "URL", "VERSION", "STATE", "BEHIND", "SEEN")
        show.table([show.Column(title) for title in titles], [_row(one) for one in found])


def _row(head: HeadView) -> tuple[str, ...]:
    from shoal.model.durations import duration_text

    ago = "now" if head.seen_ms_ago < 5_000 else f"{duration_text(head.seen_ms_ago)} ago"
    behind = str(head.behind) if head.role != "leads" else ""
    return head.name, head.url, head.version, head.role, behind, ago


def _forget(name: str, json: bool, home: Path) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        client.forget_head(name)
    if json:
        show.as_json({"forgotten": name})
    else:
        show.line(f"{name} is no longer a head of this cluster")


def _invite(home: Path) -> None:
    """Only on a head: the keys are in its home."""
    import os
    import stat
    import sys

    import msgspec

    from shoal.client import Client
    from shoal.control.home import Home
    from shoal.control.invitation import KnownHead, invite

    place = Home(home)
    config = place.read_config()
    if config is None or not config.database:
        text = "this machine is not a head of a cluster with a database"
        raise Failure(f"{text}; start one with: shoal up --database URL --shared DIR")
    if sys.stdout.isatty():
        text = "invite prints the cluster's keys: write them to a file"
        raise Failure(f"{text}: shoal heads invite > head.json", USAGE)
    with Client.at_home(place.path) as client:
        known = tuple(KnownHead(one.name, one.url) for one in client.heads())
    made = invite(place, config, known)
    out = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(out).st_mode):
        os.fchmod(out, 0o600)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(made)).decode() + "\n")


# `shoal upgrade`: this version takes over a cluster that is up, and no job is stopped.


AT_ONCE_MAX = 16


@verb(
    flag("--check", help="Only show which version runs where."),
    Option("--hosts", metavar="FILE", type=Path, help="Upgrade the hosts in this file over ssh."),
    Option(
        "--parallel",
        metavar="N",
        type=number(1, AT_ONCE_MAX),
        help=f"With --hosts: this many at a time, up to {AT_ONCE_MAX}. [1]",
    ),
    on_head=True,
)
def upgrade(
    check: bool, hosts: Path | None, parallel: int | None, json: bool, home: Path
) -> int | None:
    """Upgrade the cluster to this version; jobs keep running.

    Install the new version first (pip install -U shoal), then run this command.
    The head is replaced at once; it is away for a moment, and commands wait for
    it. Jobs and services go on. Then each node of this machine is replaced, one
    at a time, if nothing runs on it. A node where jobs run keeps its version,
    which works with the new head; run the command again when they have ended.

    --hosts then brings this version to the servers of a hosts file, which have
    joined with `shoal up --hosts`. Each node is cordoned. If nothing runs on it,
    this version is installed there, its agent is replaced, and the node is
    opened again. The first failure stops the command with exit code 1; hosts
    after it are not touched.

    On a machine that joined by hand, install the new version, then run
    `shoal upgrade` there while its node is cordoned (`shoal cordon`).

    Make a backup first (`shoal backup`): an older version cannot read what a
    newer one has written.

    Examples:
      shoal upgrade --check
      shoal backup before.tar && pip install -U shoal && shoal upgrade
      shoal upgrade --hosts hosts.yaml --check
      shoal upgrade --hosts hosts.yaml
      shoal upgrade --hosts hosts.yaml --parallel 4
    """
    from shoal.cli.screen import show
    from shoal.control.lifecycle import LifecycleError
    from shoal.forms.failure import USAGE, Failure

    if parallel is not None and hosts is None:
        raise Failure("--parallel: is for --hosts FILE; give both", USAGE)
    try:
        if hosts is not None:
            return _hosts(home, hosts, parallel or 1, check, json)
        parts = _here(home, check, json)
    except LifecycleError as error:
        raise Failure(str(error)) from None
    if json:
        show.as_json(parts)
        return None
    columns = [show.Column("PART"), show.Column("VERSION")]
    if not check:
        columns += [show.Column("STATE"), show.Column("WHY", wraps=True)]
    rows: list[list[str | show.Cell]] = [
        [one.part, one.version or "before 0.6", *(() if check else (one.state, one.why))]
        for one in parts
    ]
    show.table(columns, rows)
    return None


def _here(home: Path, check: bool, json: bool) -> list[Part]:
    """The head and its own nodes, or the nodes with which this machine joined."""
    from shoal.cli.screen import show
    from shoal.cli.up import membership
    from shoal.cli.up.hosts import joined_versions, upgrade_joined
    from shoal.control.home import Home
    from shoal.control.lifecycle import is_up
    from shoal.control.upgrading import upgrade, versions

    place = Home(home)
    joined = [] if is_up(place) else membership.here(place)
    if check:
        return joined_versions(joined) if joined else versions(place)
    with show.Spinner(quiet=json) as progress:
        return upgrade_joined(joined, progress) if joined else upgrade(place, progress)


def _hosts(home: Path, file: Path, at_once: int, check: bool, json: bool) -> int:
    from shoal.cli.errors import print_error
    from shoal.cli.screen import show
    from shoal.cli.up.hosts import HostsUpgrade, failure_text, show_hosts
    from shoal.control.home import Home
    from shoal.forms.failure import REFUSED

    results = HostsUpgrade(Home(home), file, at_once).run(check=check, quiet=json)
    if json:
        show.as_json(results)
    else:
        show_hosts(results, check=check)
    failed = failure_text(results, f"shoal upgrade --hosts {file}{' --check' if check else ''}")
    if failed:
        print_error(failed)
    return REFUSED if failed else 0
