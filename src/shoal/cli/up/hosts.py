"""Other machines over ssh: `shoal up --hosts` joins them, `shoal upgrade` upgrades them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.screen import show
from shoal.model.phrases import printable

if TYPE_CHECKING:
    from rich.live import Live

    from shoal.cli.up.membership import Notify
    from shoal.control.home import ClusterConfig, Home
    from shoal.control.upgrading import Part
    from shoal.hosts.spec import HostSpec, Outcome, Software
    from shoal.hosts.upgrade import HostVersion
    from shoal.model.views import NodeView


STYLES = {"joined": "green", "unchanged": "dim", "left": "dim", "failed": "red"}


class HostsFile:
    """The file is read and checked before anything starts."""

    def __init__(self, home: Home, path: Path) -> None:
        from shoal.forms.hosts import read_hosts

        self._home = home
        self._wanted = read_hosts(path)
        self._joined = JoinedHosts(home.path)
        self._unwanted = self._joined.unwanted(self._wanted)

    def bring(self, config: ClusterConfig, *, quiet: bool) -> list[Outcome]:
        """Join all hosts to this cluster."""
        from shoal.control.home import node_url
        from shoal.forms.failure import Failure
        from shoal.hosts.bring import RemoteError, Ssh, Task, bring, build_wheel

        try:
            ssh = Ssh()
        except RemoteError as error:
            raise Failure(f"--hosts: {error}") from None
        lines = HostLines([spec.node for spec in (*self._wanted, *self._unwanted)], quiet)
        try:
            with lines:
                software = _software()
                python = f"{sys.version_info.major}.{sys.version_info.minor}"
                head = Head(self._home, node_url(config, self._home))
                task = Task(head, software, python, build_wheel(software.shoal), lines.show)
                outcomes = bring(task, self._wanted, self._unwanted, ssh)
        finally:
            ssh.close()
        self._joined.update(self._wanted, outcomes)
        return outcomes

    def show(self, outcomes: list[Outcome]) -> None:
        columns = [
            show.Column("NODE"),
            show.Column("HOST"),
            show.Column("STATE"),
            show.Column("DONE"),
            show.Column("WHY", wraps=True),
        ]
        rows: list[list[str | show.Cell]] = [
            [
                one.node,
                one.host,
                show.Cell(one.state, STYLES.get(one.state, "")),
                ", ".join(one.did),
                one.why,
            ]
            for one in outcomes
        ]
        show.table(columns, rows)


class Head:
    """What a host must know of the cluster to join it."""

    def __init__(self, home: Home, url: str) -> None:
        from shoal.cli.up.hardware import join_token

        self.url = url
        self.token = join_token(home)
        self._home = home
        self._lock = threading.Lock()

    def state(self, node: str) -> str:
        from shoal.client import Client

        with self._lock, Client.at_home(self._home.path, patience_s=30) as client:
            found = next((one for one in client.nodes() if one.id == node), None)
        if found is None or found.intent == "removed":
            return ""
        return found.health


def _software() -> Software:
    from shoal import __version__
    from shoal.hosts.spec import Software

    return Software(__version__)


class HostLines:
    """What happens on each host: lines that change on a terminal, else a line per change."""

    def __init__(self, nodes: list[str], quiet: bool) -> None:
        self._words = dict.fromkeys(nodes, "waiting")
        self._quiet = quiet
        self._lock = threading.Lock()
        self._live: Live | None = None
        if not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.live import Live

            self._live = Live(console=show.console(stderr=True), transient=True)

    def show(self, node: str, words: str) -> None:
        with self._lock:
            self._words[node] = words
            if self._live is not None:
                self._live.update(self._lines())
            elif not self._quiet:
                show.note(f"{node}: {words}")

    def __enter__(self) -> HostLines:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _lines(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for node, words in self._words.items():
            style = STYLES.get(words.partition(":")[0], "cyan")
            grid.add_row(node, Text(printable(words), style=style, overflow="ellipsis"))
        return grid


class JoinedHosts:
    """The hosts that joined through a file, so that those no longer in it can leave."""

    def __init__(self, home: Path) -> None:
        self._path = home / "hosts.json"

    def read(self) -> list[HostSpec]:
        import msgspec

        from shoal.forms.failure import Failure
        from shoal.hosts.spec import HostSpec

        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[HostSpec])
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:
            raise Failure(f"{self._path} is damaged ({error}); remove it") from None

    def unwanted(self, wanted: list[HostSpec]) -> list[HostSpec]:
        targets = {spec.target for spec in wanted}
        return [spec for spec in self.read() if spec.target not in targets]

    def update(self, wanted: list[HostSpec], outcomes: list[Outcome]) -> None:
        """Forget hosts that left, and hosts that were never reached."""
        import msgspec

        from shoal.machine.files import write_private

        results = {outcome.host: outcome for outcome in outcomes}
        specs = {spec.target: spec for spec in (*self.read(), *wanted)}
        before = {spec.target for spec in self.read()}
        kept = [
            spec
            for target, spec in specs.items()
            if target in results
            and results[target].state != "left"
            and (target in before or results[target].did or results[target].state == "unchanged")
        ]
        write_private(self._path, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")


# `shoal upgrade` beyond the head: on a machine that joined, and for the hosts of a file.


NAMES_SHOWN = 8
UPGRADE_STYLES = {"upgraded": "green", "busy": "yellow", "failed": "red"}


def joined_versions(folders: list[Path]) -> list[Part]:
    from shoal.control.upgrading import Part

    return [Part(part=folder.name, version=_written(folder)) for folder in folders]


def upgrade_joined(folders: list[Path], progress: Notify) -> list[Part]:
    """The nodes of this machine, whose head is elsewhere."""
    from shoal.cli.up import membership
    from shoal.control.upgrading import Part
    from shoal.database.formats import VERSION

    parts = []
    for folder in folders:
        before = _written(folder)
        busy = membership.replace(folder, progress)
        state, version = ("busy", before) if busy else ("upgraded", VERSION)
        parts.append(Part(part=folder.name, version=version, state=state, why=busy))
    return parts


def _written(folder: Path) -> str:
    """The version whose agent last used the folder; empty before 0.6.0."""
    import msgspec

    from shoal.machine.files import FORMAT_FILE

    try:
        said = msgspec.json.decode((folder / FORMAT_FILE).read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return ""
    return str(said.get("version", ""))


class HostsUpgrade:
    """The file is read and checked before anything starts."""

    def __init__(self, home: Home, path: Path, at_once: int) -> None:
        from shoal.forms.hosts import read_hosts

        self._home = home
        self._path = path
        self._hosts = read_hosts(path)
        self._at_once = at_once

    def run(self, *, check: bool, quiet: bool) -> list[HostVersion]:
        from shoal.control.upgrading import versions
        from shoal.database.formats import VERSION
        from shoal.forms.failure import Failure
        from shoal.hosts import upgrade
        from shoal.hosts.bring import RemoteError, Ssh, build_wheel
        from shoal.hosts.spec import Software

        head = versions(self._home)[0].version
        if head != VERSION and not check:
            raise Failure(f"the head runs {head}, and this is {VERSION}; first run: shoal upgrade")
        try:
            ssh = Ssh()
        except RemoteError as error:
            raise Failure(f"--hosts: {error}") from None
        try:
            with HostLines([spec.node for spec in self._hosts], quiet) as lines:
                cluster = Cluster(self._home, f"shoal upgrade --hosts {self._path}")
                python = f"{sys.version_info.major}.{sys.version_info.minor}"
                looking = upgrade.Looking(cluster, python, lines.show)
                if check:
                    return upgrade.look_at(looking, self._hosts, ssh)
                task = upgrade.Task(looking, Software(VERSION), build_wheel(VERSION))
                return upgrade.upgrade(task, self._hosts, ssh, self._at_once)
        finally:
            ssh.close()


class Cluster:
    """The nodes as the head sees them; every call has a connection of its own, because hosts are
    upgraded by several threads."""

    def __init__(self, home: Home, command: str) -> None:
        self._home = home
        self._command = command

    def runs(self, node: str) -> str:
        from shoal.client import Client
        from shoal.control.upgrading import BACK_S

        with _unfit(), Client.at_home(self._home.path, patience_s=BACK_S) as client:
            return _ready(client.nodes(), node).version

    def replace(self, node: str, act: Callable[[], str]) -> str:
        from shoal.client import Client
        from shoal.control.upgrading import BACK_S, replace_when_idle

        with _unfit(), Client.at_home(self._home.path, patience_s=BACK_S) as client:
            found = _ready(client.nodes(), node)
            return replace_when_idle(client, found, act, self._command).why


class _unfit:  # noqa: N801
    """What the head says becomes the host's failure."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        from shoal.client.transport import ShoalError
        from shoal.control.lifecycle import LifecycleError
        from shoal.hosts.spec import Unfit

        if isinstance(error, LifecycleError | ShoalError):
            raise Unfit(str(error)) from None


def _ready(nodes: list[NodeView], name: str) -> NodeView:
    from shoal.hosts.spec import Unfit

    found = next((one for one in nodes if one.id == name and one.intent != "removed"), None)
    if found is None:
        raise Unfit("it is not a node of this cluster; let it join with: shoal up --hosts")
    if found.health != "ready":
        raise Unfit(f"its node is {found.health} ({found.why}); see: shoal nodes")
    return found


def show_hosts(results: list[HostVersion], *, check: bool) -> None:
    columns = [
        show.Column("NODE"),
        show.Column("HOST"),
        show.Column("INSTALLED"),
        show.Column("RUNS"),
    ]
    columns += [] if check else [show.Column("STATE")]
    columns.append(show.Column("WHY", wraps=True))
    rows: list[list[str | show.Cell]] = []
    for one in results:
        unknown = one.state in ("failed", "untouched")
        row: list[str | show.Cell] = [one.node, one.host, one.installed or "-"]
        row.append("-" if unknown else one.runs or "before 0.6")
        row += [] if check else [show.Cell(one.state, UPGRADE_STYLES.get(one.state, ""))]
        rows.append([*row, one.why])
    show.table(columns, rows)


def failure_text(results: list[HostVersion], command: str) -> str:
    """Which host failed, why, and what to do next; empty if none did."""
    failed = [one for one in results if one.state == "failed"]
    if not failed:
        return ""
    first, *others = failed
    where = "" if first.node == first.host else f" ({first.host})"
    words = [f"{first.node}{where}: {first.why}"]
    if others:
        words.append(f"{_names(others)} failed, too")
    untouched = [one for one in results if one.state == "untouched"]
    if untouched:
        words.append(f"{_names(untouched)} {'was' if len(untouched) == 1 else 'were'} not touched")
    words.append(f"when that is fixed, run again: {command}")
    return "; ".join(words).replace("?; ", "? ")


def _names(hosts: list[HostVersion]) -> str:
    names = [one.node for one in hosts[:NAMES_SHOWN]]
    more = len(hosts) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
