"""The state of `shoal top`: which rows are shown, in which order, and what the keys do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.cli.screen.gpu_map import natural
from shoal.cli.screen.top_rows import COLUMNS, Seen, job_place, words_of
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries

VIEWS = {"j": "jobs", "n": "nodes", "s": "services"}
PAGE = 10
FILTER_MAX = 100
SPARKS = "▁▂▃▄▅▆▇█"


class Board:
    """`sort` is a column, or None for the usual order. `mode`: table, filter (somebody types one),
    ask (whether to cancel) or help."""

    def __init__(self) -> None:
        self.view = "jobs"
        self.mode = "table"
        self.sort: dict[str, int | None] = dict.fromkeys(COLUMNS)
        self.down: dict[str, bool] = dict.fromkeys(COLUMNS, False)
        self.filter = ""
        self.cursor = 0
        self.chosen = ""  # the row that somebody moved to: the cursor stays on it
        self.map = True
        self.asked = ""  # the job that somebody may cancel: the rows move on while they think
        self.message = ""
        self.over = False
        self.drawn_map: tuple[object, list[Any]] = (None, [])
        self._known: tuple[object, list[str]] = (None, [])

    def press(self, key: str) -> str:
        """What is left to do: "logs" of the chosen job, "cancel" of the asked one, or nothing."""
        if key == "ctrl-c":
            self.over = True
            return ""
        self.message = ""
        if self.mode == "filter":
            self._type(key)
        elif self.mode == "ask":
            self.mode = "table"
            if key in ("y", "Y"):
                return "cancel"
            self.message = "not cancelled"
        elif self.mode == "help":
            self.mode = "table"
        else:
            return self._command(key)
        return ""

    def _type(self, key: str) -> None:
        if key in ("enter", "escape", "up", "down"):
            self.mode = "table"
            self.filter = "" if key == "escape" else self.filter
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif key == "ctrl-u":
            self.filter = ""
        elif len(key) == 1 and len(self.filter) < FILTER_MAX:
            self.filter += key
            self.cursor, self.chosen = 0, ""

    def _command(self, key: str) -> str:
        moves = {"up": -1, "k": -1, "down": 1, "page-up": -PAGE, "page-down": PAGE, " ": PAGE}
        if key == "q":
            self.over = True
        elif key in VIEWS:
            self.view, self.cursor, self.chosen = VIEWS[key], 0, ""
        elif key in moves:
            self._move(self.cursor + moves[key])
        elif key in ("home", "g"):
            self._move(0)
        elif key in ("end", "G"):
            self._move(len(self._known[1]))
        elif key in ("left", "right", "<", ">", "r"):
            self._order(key)
        elif key == "/":
            self.mode = "filter"
        elif key == "escape":
            self.filter = ""
        elif key == "?":
            self.mode = "help"
        elif key == "m":
            self.map = not self.map
        elif key == "enter" and self.view == "jobs":
            return "logs"
        elif key == "c" and self.view == "jobs":
            self.mode, self.asked = ("ask" if self.key else "table"), self.key
        return ""

    def _move(self, to: int) -> None:
        keys = self._known[1]
        self.cursor = max(0, min(to, len(keys) - 1))
        self.chosen = keys[self.cursor] if keys else ""

    def _order(self, key: str) -> None:
        sort, columns = self.sort[self.view], len(COLUMNS[self.view])
        if key == "r":
            self.down[self.view] = not self.down[self.view]
        elif key in ("right", ">"):
            self.sort[self.view] = 0 if sort is None else (sort + 1 if sort + 1 < columns else None)
        else:
            self.sort[self.view] = columns - 1 if sort is None else (sort - 1 if sort else None)

    @property
    def key(self) -> str:
        """The row that the cursor is on; "" if there is none."""
        keys = self._known[1]
        return keys[self.cursor] if keys else ""

    def keys(self, seen: Seen) -> list[str]:
        """The rows that match, in order; puts the cursor onto one of them."""
        mark = (seen.number, self.view, self.sort[self.view], self.down[self.view], self.filter)
        if self._known[0] != mark:
            self._known = (mark, self._ordered(seen))
        keys = self._known[1]
        if self.chosen and keys[self.cursor : self.cursor + 1] != [self.chosen]:
            if self.chosen in keys:
                self.cursor = keys.index(self.chosen)
            else:
                self.chosen = ""
        self.cursor = max(0, min(self.cursor, len(keys) - 1))
        return keys

    def _ordered(self, seen: Seen) -> list[str]:
        found: Sequence[str] = list(getattr(seen, self.view))
        words = self.filter.lower().split()
        if words:
            texts = {key: words_of(seen, self.view, key) for key in found}
            found = [key for key in found if all(word in texts[key] for word in words)]
        keys = sorted(found, key=lambda key: _usual(seen, self.view, key))
        column = self.sort[self.view]
        if column is not None:
            items, order = getattr(seen, self.view), COLUMNS[self.view][column].order
            keys.sort(key=lambda key: _sortable(order(seen, items[key])))
        return keys[::-1] if self.down[self.view] else keys


def _usual(seen: Seen, view: str, key: str) -> tuple[Any, ...]:
    """Jobs that have nodes before those that wait; each in the order they were submitted."""
    if view == "jobs":
        return seen.jobs[key].state == "waiting", job_place(key)
    return tuple(natural(key))


def _sortable(value: float | str) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, value, "")


def detail(series: JobSeries | NodeSeries | ServiceSeries | None, width: int) -> str:
    """The most useful curve of the selected row, in one line."""
    room = max(8, width - 40)
    match series:
        case JobSeries(points=points) if points:
            losses = [point.loss for point in points if point.loss is not None]
            steps = [point.step_ms for point in points if point.step_ms is not None]
            parts = []
            if losses:
                parts.append(f"loss {spark(losses, room // 2)} {losses[-1]:.4g}")
            if steps:
                parts.append(f"step {spark(steps, room // 2)} {steps[-1]:.0f} ms")
            return "   ".join(parts)
        case NodeSeries(at_ms=[_, *_]):
            cpu = [value for value in series.cpu if value is not None]
            busy = [value for value in _mean_busy(series) if value is not None]
            parts = [f"CPU {spark(cpu, room // 2, 1.0)} {cpu[-1]:.0%}"] if cpu else []
            if busy:
                parts.append(f"GPUs {spark(busy, room // 2, 1.0)} {busy[-1]:.0%}")
            return "   ".join(parts)
        case ServiceSeries(at_ms=[_, *_]):
            rates = [value or 0.0 for value in series.requests_per_s]
            slow = [value for value in series.p99_ms if value is not None]
            text = f"rps {spark(rates, room // 2)} {rates[-1]:.1f}"
            return text + (f"   p99 {spark(slow, room // 2)} {slow[-1]:.0f} ms" if slow else "")
        case _:
            return ""


def spark(values: Sequence[float], width: int, most: float | None = None) -> str:
    """All values in `width` characters; each is the mean of its part."""
    if not values:
        return ""
    width = min(width, len(values))
    parts = []
    for place in range(width):
        first, last = place * len(values) // width, (place + 1) * len(values) // width
        parts.append(sum(values[first:last]) / (last - first))
    low = 0.0 if most is not None else min(parts)
    high = max(parts) if most is None else most
    span = high - low
    return "".join(
        SPARKS[min(7, max(0, int(8 * (part - low) / span)))] if span > 0 else SPARKS[3]
        for part in parts
    )


def _mean_busy(series: NodeSeries) -> list[float | None]:
    if not series.gpus:
        return []
    columns = zip(*(gpu.busy for gpu in series.gpus), strict=True)
    means = []
    for column in columns:
        known = [value for value in column if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means
