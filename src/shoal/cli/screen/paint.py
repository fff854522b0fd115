"""A whole screen that is drawn again and again: only lines that changed are sent, and the terminal
is given back as it was, however the program ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli.screen.keys import Keys
from shoal.cli.screen.show import console

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
