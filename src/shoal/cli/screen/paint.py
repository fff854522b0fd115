"""A terminal as a screen: drawn again and again, read key by key, and given back as it was."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column, console, rich_line
from shoal.cli.screen.tables import cut, lay_out
from shoal.client import Unreachable

if TYPE_CHECKING:
    from rich.text import Text


# Its own screen, no cursor, no wrapping at the right edge; and all of it back.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J", "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
ENDS = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """`wake` can be read when something happened that the loop should look at."""

    def __init__(self) -> None:
        self.keys = Keys()
        self._console = console()
        self._shown: list[Text] = []
        self._size = (0, 0)
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return max(1, found.columns), max(1, found.lines)

    def rouse(self) -> None:
        """Ends the wait for a key; any thread may call it."""
        with contextlib.suppress(OSError):  # full: it is awake already
            os.write(self._waker, b".")

    def wait(self, seconds: float) -> str:
        """The next key, or "" when the time is over or somebody roused it."""
        key = self.keys.wait(seconds, (self.wake,))
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        return key

    def again(self) -> None:
        """Draw everything the next time."""
        self._shown = []

    def draw(self, lines: Sequence[Text]) -> None:
        if self.size != self._size:
            self._size = self.size
            self.again()
        out = [] if self._shown else ["\x1b[0m\x1b[H\x1b[2J"]
        for number, line in enumerate(lines):
            if number < len(self._shown) and _same(self._shown[number], line):
                continue
            out.append(f"\x1b[{number + 1};1H{self._rendered(line)}\x1b[0m\x1b[K")
        self._shown = list(lines)
        self._put("".join(out))

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as got:
            self._console.print(line, end="", soft_wrap=True)
        return got.get()

    def _put(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    @contextlib.contextmanager
    def open(self) -> Iterator[Screen]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.keys)
            for one in ENDS:
                stack.callback(signal.signal, one, signal.signal(one, _end))
            for one, act in ((signal.SIGWINCH, self._resized), (signal.SIGTSTP, self._pause)):
                stack.callback(signal.signal, one, signal.signal(one, act))
            stack.callback(self._put, LEAVE)
            self._put(ENTER)
            yield self

    def _resized(self, _number: int, _frame: FrameType | None) -> None:
        self.rouse()

    def _pause(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets a sane terminal, and `fg` draws everything again."""
        self._put(LEAVE)
        self.keys.__exit__()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.keys.__enter__()
        self._put(ENTER)
        self.again()
        self.rouse()


def _same(one: Text, other: Text) -> bool:
    return one == other and one.style == other.style


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# Reads single keys from the terminal, without Enter and without echo.


NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x15": "ctrl-u",
    b"\x03": "ctrl-c",
    b"\x0c": "ctrl-l",
}
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[A-Za-z]|\x1b|[\x00-\x1f\x7f]|[^\x00-\x1f\x7f]+")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?$")
# The rest of a sequence follows at once, even through ssh; a key that is pressed does not.
SEQUENCE_S = 0.05


class Keys:
    """Restores the terminal at the end. If stdin is not a terminal there are no keys."""

    def __init__(self) -> None:
        self._handle = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[object] = []
        self._typed: deque[str] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def __enter__(self) -> Keys:
        if self._handle >= 0:
            self._before = termios.tcgetattr(self._handle)
            tty.setcbreak(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            termios.tcsetattr(self._handle, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Whatever was typed until now."""
        self._typed.clear()
        if self._handle >= 0:
            with contextlib.suppress(termios.error):  # the terminal is closed
                termios.tcflush(self._handle, termios.TCIFLUSH)

    def wait(self, seconds: float, others: Sequence[int] = ()) -> str:
        """The next key; "" after `seconds`, or when one of the `others` can be read."""
        if self._typed:
            return self._typed.popleft()
        if self._handle < 0 and not others:
            time.sleep(seconds)
            return ""
        mine = [self._handle] if self._handle >= 0 else []
        ready, _, _ = select.select([*mine, *others], [], [], max(0.0, seconds))
        if self._handle not in ready:
            return ""
        data = os.read(self._handle, 1024)
        if not data:  # the terminal is closed
            return "ctrl-c"
        while _UNFINISHED.search(data) and select.select(mine, [], [], SEQUENCE_S)[0]:
            data += os.read(self._handle, 16)
        self._typed.extend(names_of(data, self._decoder))
        return self._typed.popleft() if self._typed else ""


def names_of(data: bytes, decoder: codecs.IncrementalDecoder | None = None) -> list[str]:
    """The keys in what a terminal sent; those that mean nothing here are left out."""
    decoder = decoder or codecs.getincrementaldecoder("utf-8")(errors="ignore")
    found = []
    for match in _KEY.finditer(data):
        if match[0] in NAMES:
            found.append(NAMES[match[0]])
        elif match[0][0] >= 0x20 and match[0] != b"\x7f":
            found.extend(one for one in decoder.decode(match[0]) if one.isprintable())
    return found


# `--watch`: a table that is drawn again every few seconds, in place.


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
        told = f"{clock}  {self._picture.told}  q to quit"
        if len(lines) > room:
            told += f"; lines {self._top + 1}-{self._top + room} of {len(lines)}; up/down to scroll"
        first = Text(cut(told, width), style="bold")
        if self._away:
            first = Text(cut(f"no answer since {clock}, trying again", width), style="bold red")
        body = [rich_line(line) for line in lines[self._top : self._top + room]]
        picture = [first, rich_line(head), *body, *[Text()] * (room - len(body))]
        self._screen.draw(picture[:height])
