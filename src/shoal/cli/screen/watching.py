"""`--watch`: a table that is drawn again every few seconds, in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from shoal.cli.screen import show
from shoal.cli.screen.paint import Screen
from shoal.cli.screen.show import Cell, Column, rich_line
from shoal.cli.screen.tables import cut, lay_out
from shoal.client import Unreachable

GONE_S = 60.0  # a controller that was killed is back in seconds; after this it will not come back
AGAIN_S = 1.0
SLOW_S = 3.0  # a look that takes longer is told


class Picture(NamedTuple):
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    told: str  # one line above the table


def watch(look: Callable[[], Picture], every_s: float) -> None:
    """Until q or Ctrl-C. Raises `Unreachable` when nobody has answered for a minute."""
    picture = look()
    if not show.at_terminal():
        _print(look, picture, every_s)
        return
    screen = Screen()
    with screen.open():
        picture = _Watched(screen, look, picture, every_s).run()
    show.table(picture.columns, picture.rows)


def _print(look: Callable[[], Picture], picture: Picture, every_s: float) -> None:
    """Into a pipe: one table after the other."""
    heard_s = time.monotonic()
    while True:
        show.table(picture.columns, picture.rows)
        print(flush=True)
        time.sleep(every_s)
        while True:
            try:
                picture, heard_s = look(), time.monotonic()
                break
            except Unreachable:
                if time.monotonic() - heard_s > GONE_S:
                    raise
                time.sleep(AGAIN_S)


class _Watched:
    def __init__(
        self, screen: Screen, look: Callable[[], Picture], picture: Picture, every_s: float
    ) -> None:
        self._screen, self._look, self._every_s = screen, look, every_s
        self._picture, self._heard_s = picture, time.time()
        self._away = False
        self._asked_s: float | None = None  # when a look began that has not ended
        self._answers: SimpleQueue[Picture | Exception] = SimpleQueue()
        self._top = 0

    def run(self) -> Picture:
        due = time.monotonic() + self._every_s
        while True:
            self._draw()
            pause_s = AGAIN_S if self._asked_s is not None else max(0.0, due - time.monotonic())
            key = self._screen.wait(pause_s)
            if key in ("q", "escape", "ctrl-c"):
                return self._picture
            if key:
                self._move(key)
            if not self._answers.empty():
                self._take(self._answers.get())
                due = time.monotonic() + (AGAIN_S if self._away else self._every_s)
            elif self._asked_s is None and time.monotonic() >= due:
                self._asked_s = time.monotonic()
                threading.Thread(target=self._ask, name="look", daemon=True).start()
            elif self._asked_s is not None and time.monotonic() - self._asked_s > SLOW_S:
                self._away = True

    def _ask(self) -> None:
        """In a thread: q must work while a controller that hangs does not answer."""
        try:
            self._answers.put(self._look())
        except Exception as error:
            self._answers.put(error)
        self._screen.rouse()

    def _take(self, answer: Picture | Exception) -> None:
        self._asked_s = None
        if isinstance(answer, Picture):
            self._picture, self._heard_s, self._away = answer, time.time(), False
        elif isinstance(answer, Unreachable) and time.time() - self._heard_s <= GONE_S:
            self._away = True
        else:
            raise answer

    def _move(self, key: str) -> None:
        page = max(1, self._screen.size[1] - 3)
        moves = {"up": -1, "down": 1, "page-up": -page, "page-down": page, " ": page}
        if key in ("home", "end"):
            self._top = 0 if key == "home" else 10**9
        self._top = max(0, self._top + moves.get(key, 0))

    def _draw(self) -> None:
        from rich.text import Text

        width, height = self._screen.size
        head, *lines = lay_out(self._picture.columns, self._picture.rows, width)
        room = max(1, height - 2)
        self._top = max(0, min(self._top, len(lines) - room))
        clock = time.strftime("%H:%M:%S", time.localtime(self._heard_s))
        told = f"{clock}  {self._picture.told}  q quits"
        if len(lines) > room:
            told += f"; lines {self._top + 1}-{self._top + room} of {len(lines)}, up and down move"
        first = Text(cut(told, width), style="bold")
        if self._away:
            first = Text(cut(f"no answer since {clock}, trying again", width), style="bold red")
        body = [rich_line(line) for line in lines[self._top : self._top + room]]
        picture = [first, rich_line(head), *body, *[Text()] * (room - len(body))]
        self._screen.draw(picture[:height])
