"""`shoal up --hosts`: joins the hosts of a file, and shows a line for each meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.screen import show
from shoal.model.phrases import printable

if TYPE_CHECKING:
    from rich.live import Live

    from shoal.control.home import ClusterConfig, Home
    from shoal.hosts.spec import HostSpec, Outcome, Software

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
        from shoal.hosts import wheel
        from shoal.hosts.bring import Task, bring
        from shoal.hosts.ssh import RemoteError, Ssh

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
                task = Task(head, software, python, wheel.build(software.shoal), lines.show)
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
        from shoal.cli.up.machine import join_token

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
