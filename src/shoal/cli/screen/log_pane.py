"""A job's output on a screen of its own, in `shoal top`: it follows, and can be scrolled."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shoal.cli.screen.follow import OUTCOMES, Reader
from shoal.cli.screen.output import TerminalText
from shoal.cli.screen.tables import whole_parts
from shoal.client import Client, ShoalError
from shoal.client.connections import Interrupt, Interrupted

if TYPE_CHECKING:
    from rich.text import Text

Answer = TypeVar("Answer")
LINES_MAX = 20_000  # older ones are dropped
TAIL = 1000  # lines of the past, of all members together
TAIL_LEAST = 20
LINE_MAX = 4096
WAIT_S = 5.0
PAUSE_S = 0.5
AGAIN_S = 1.0
KEYS = ("q back", "up/down page-up/page-down home scroll", "end follow")


class LogPane:
    """A thread reads; `lines` is what was read. `top`: the first line shown, or None to follow."""

    def __init__(self, client: Client, job: str, roused: Callable[[], None]) -> None:
        self.job = job
        self.top: int | None = None
        self.over = False
        self.lines: deque[bytes] = deque(maxlen=LINES_MAX)
        self.dropped = 0
        self.state = "reading"
        self._partial: dict[int, bytes] = {}
        self._several = False
        self._interrupt = Interrupt()
        self._client = client.lent(interrupt=self._interrupt)
        self._roused = roused
        self._ended = threading.Event()
        self._first = 0  # as it was drawn
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._interrupt.ask()
        self._thread.join(timeout=2)

    # -- reading ---------------------------------------------------------------------------

    def write(self, attempt: int, member: int, data: bytes) -> None:  # noqa: ARG002
        *whole, rest = (self._partial.get(member, b"") + data).split(b"\n")
        if len(rest) > LINE_MAX:
            whole, rest = [*whole, rest], b""
        self._partial[member] = rest
        for line in whole:
            self._add(line, member)
        self._roused()

    def end(self) -> None:
        for member, rest in sorted(self._partial.items()):
            if rest:
                self._add(rest, member)
        self._partial = {}
        self._roused()

    def _add(self, line: bytes, member: int | None = None) -> None:
        # A progress bar writes its line again and again: the last version counts.
        text = line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_MAX]
        if len(self.lines) == LINES_MAX:
            self.dropped += 1
        self.lines.append(
            b"[%d] %s" % (member, text) if self._several and member is not None else text
        )

    def _run(self) -> None:
        attempt = 0
        while not self._ended.is_set():
            try:
                attempt = self._read_next(attempt)
                if attempt < 0:
                    return
            except Interrupted:
                return
            except ShoalError as error:
                self.state = f"{error.message if error.status else error}; trying again"
                self._roused()
                self._ended.wait(AGAIN_S)

    def _read_next(self, attempt: int) -> int:
        """Reads the attempt after this one when it begins; -1: there will be none."""
        view = self._client.job(self.job)
        self.state = view.state if view.state != "waiting" else f"waiting: {view.why}"
        if view.attempt <= attempt:
            if view.state in OUTCOMES:
                self._roused()
                return -1
            self._ended.wait(AGAIN_S)
            self._roused()
            return attempt
        newest = view.attempt if not attempt else attempt + 1
        members = list(range(max(view.members, view.members_max)))
        self._several = len(members) > 1
        reader = Reader(self._now, self.job, newest, members, self)  # type: ignore[arg-type]
        if not attempt:
            reader.skip_to_tail(max(TAIL_LEAST, TAIL // len(members)))
        else:
            self._add(f"[{self.job}: attempt {newest}]".encode())
        self._roused()
        while reader.open and not self._ended.is_set():
            if not reader.read(wait_s=WAIT_S):
                self.state = self._client.job(self.job).state
                self._ended.wait(PAUSE_S)
        self.end()
        return newest

    def _now(self, act: Callable[[Client], Answer]) -> Answer:
        """In place of `Retry`: while nobody answers, the pane says so and asks again."""
        while True:
            try:
                return act(self._client)
            except ShoalError as error:
                if error.status or self._ended.is_set():
                    raise
                self.state = f"no answer since {time.strftime('%H:%M:%S')}; trying again"
                self._roused()
                self._ended.wait(AGAIN_S)

    # -- showing ---------------------------------------------------------------------------

    def press(self, key: str, height: int) -> None:
        page = max(1, height - 3)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -page, "page-down": page}
        moves |= {" ": page, "b": -page}
        if key in ("q", "escape", "left"):
            self.over = True
        elif key in ("end", "G", "f"):
            self.top = None
        elif key in ("home", "g"):
            self.top = 0
        elif key in moves:
            start = self._first if self.top is None else self.top
            to = start + moves[key]
            last = max(0, len(self.lines) - (height - 2))
            self.top = None if to >= last and moves[key] > 0 else max(0, to)

    def draw(self, size: tuple[int, int]) -> list[Text]:
        from rich.text import Text

        width, height = size
        room = max(1, height - 2)
        lines = list(self.lines)
        shown: list[Text] = []
        if self.top is None:
            first = len(lines)
            while first > 0 and len(shown) < room:
                first -= 1
                shown = [*_folded(lines[first], width), *shown]
            shown = shown[-room:]
        else:
            first = at = min(self.top, max(0, len(lines) - 1))
            while at < len(lines) and len(shown) < room:
                shown += _folded(lines[at], width)
                at += 1
            shown = shown[:room]
        self._first = first
        what = "following" if self.top is None else f"line {first + 1 + self.dropped}"
        total = len(lines) + self.dropped
        head = Text(f"{self.job}  {self.state}  {what}, {total} lines", style="bold")
        empty = [] if lines else [Text("no output yet", style="dim")]
        body = [*shown, *empty][:room]
        picture = [
            head,
            *body,
            *[Text()] * (room - len(body)),
            Text(whole_parts(KEYS, width), style="reverse"),
        ]
        for line in picture:
            line.truncate(width, overflow="ellipsis")
        return picture[:height]


def _folded(line: bytes, width: int) -> list[Text]:
    """As many lines as it takes; colours stay, other sequences are dropped."""
    from rich.text import Text

    cleaner = TerminalText()
    text = Text.from_ansi(cleaner.feed(line, final=True).expandtabs().replace("\n", " "))
    if text.cell_len <= width:
        return [text]
    return list(text.divide(range(width, len(text), width))) if width > 1 else [text]
