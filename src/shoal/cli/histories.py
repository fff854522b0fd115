"""What replays of a cluster's own history read: its log, its prices; and how they show progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shoal.forms.failure import REFUSED, Failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shoal.cli.screen.show import Spinner
    from shoal.model.ledger import PriceList
    from shoal.sim.replay.readers.history import History

QUIET_S = 2.0  # a shorter replay needs no progress bar
FRAME_S = 0.2
LINE_S = 10.0  # between two lines of progress if there is no terminal
BAR_WIDTH = 24


def history_of(home: Path, quiet: bool) -> History:
    """The log of the cluster in use: of this machine, or of its head."""
    from shoal.cli.cluster import context_in_use

    return _from_head(home, quiet) if context_in_use() else _from_home(home)


def prices_of(word: str, home: Path, history: bool) -> PriceList:
    """The file that was named; else, for a history, the prices that the cluster has set."""
    from shoal.cli.cluster import connect, context_in_use
    from shoal.control.home import Home
    from shoal.database.settings import FileSettings
    from shoal.forms.prices import read
    from shoal.ledger.prices import read_prices
    from shoal.model.ledger import PriceList

    if word:
        return read(word)
    if history and context_in_use():
        with connect(home) as client:
            return client.prices()
    return read_prices(FileSettings(Home(home).path)) if history else PriceList()


def _from_head(home: Path, quiet: bool) -> History:
    """In pages, as much of it as the user may see."""
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import Spinner
    from shoal.model.events import Recorded
    from shoal.sim.replay.readers.history import read_history

    begun, read = time.monotonic(), 0
    with Retry(home) as retry, Spinner(quiet) as progress:

        def page(after: int, limit: int) -> list[Recorded]:
            nonlocal read
            while True:
                view = retry(lambda client: client.events(after=after, limit=limit))  # noqa: B023
                read += len(view.events)
                if time.monotonic() - begun > QUIET_S:
                    progress(f"reading the history: {read:,} events")
                if view.events or view.next_after <= after:
                    return view.events
                after = view.next_after  # none of those between is ours to see

        return read_history(page, "history")


def _from_home(home: Path) -> History:
    from shoal.control.home import Home

    return history_at(Home(home).database)


def history_at(path: Path) -> History:
    """The log in this file, or in the home of this name."""
    from shoal.control.home import Home
    from shoal.control.store.sqlite import SqliteStore
    from shoal.ports import StoreError
    from shoal.sim.replay.readers.history import read_history

    if path.is_dir():
        path = Home(path).database
    if not path.exists():
        raise Failure(f"--history: there is no log of a cluster at {path}; see --home", REFUSED)
    try:
        store = SqliteStore(path)
        try:
            return read_history(store.events, str(path))
        finally:
            store.close()
    except StoreError as error:
        raise Failure(str(error), REFUSED) from error


def watcher(progress: Spinner, name: str, total: int) -> Callable[[int, int], None]:
    """A bar on a terminal, else a line every LINE_S; nothing for a short replay."""
    import sys

    from shoal.cli.screen.show import bar
    from shoal.sim.replay.metrics import time_text

    begun = time.monotonic()
    every_s = FRAME_S if sys.stderr.isatty() else LINE_S
    due = [begun + max(QUIET_S, every_s)]

    def watch(done: int, now_ms: int) -> None:
        now = time.monotonic()
        if now < due[0]:
            return
        due[0] = now + every_s
        left_s = (now - begun) * (total - done) / max(done, 1)
        progress(
            f"{name} {bar(done, total, BAR_WIDTH)} {done:,} of {total:,} jobs, "
            f"{time_text(now_ms / 1000)} replayed, {time_text(left_s)} left"
        )

    return watch
