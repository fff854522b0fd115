"""`shoal up --hosts`: the hosts of a file, and a line for each while they are brought up."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import show

if TYPE_CHECKING:
    from rich.live import Live

    from shoal.hosts.spec import HostSpec, Outcome

STYLES = {"joined": "green", "unchanged": "dim", "left": "dim", "failed": "red"}


class Board:
    """What is done on each host: lines that change on a terminal, else a line for each change."""

    def __init__(self, nodes: list[str], quiet: bool) -> None:
        self._words = dict.fromkeys(nodes, "waiting")
        self._quiet = quiet
        self._lock = threading.Lock()
        self._live: Live | None = None
        if not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.live import Live

            self._live = Live(console=show.console(stderr=True), transient=True)

    def tell(self, node: str, words: str) -> None:
        with self._lock:
            self._words[node] = words
            if self._live is not None:
                self._live.update(self._lines())
            elif not self._quiet:
                show.note(f"{node}: {words}")

    def __enter__(self) -> Board:
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
            grid.add_row(node, Text(show.printable(words), style=style, overflow="ellipsis"))
        return grid


def print_outcomes(outcomes: list[Outcome]) -> None:
    columns = [
        show.Column("NODE"),
        show.Column("HOST"),
        show.Column("STATE"),
        show.Column("DONE"),
        show.Column("WHY", wraps=True),
    ]
    show.table(
        columns,
        [
            [
                one.node,
                one.host,
                show.Cell(one.state, STYLES.get(one.state, "")),
                ", ".join(one.did),
                one.why,
            ]
            for one in outcomes
        ],
    )


class Record:
    """Which hosts were brought here by a file, so that those no longer in it can be let go."""

    def __init__(self, home: Path) -> None:
        self._path = home / "hosts.json"

    def read(self) -> list[HostSpec]:
        import msgspec

        from shoal.cli.guard import Failure
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

    def write(self, specs: list[HostSpec]) -> None:
        import msgspec

        from shoal.files import write_private

        write_private(self._path, msgspec.json.format(msgspec.json.encode(specs)) + b"\n")
