"""The loop of `shoal top`: keys, the stream of changes, and what is read of the chosen row."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shoal.cli import cluster
from shoal.cli.screen.follow import OUTCOMES, Reader
from shoal.cli.screen.output import TerminalText
from shoal.cli.screen.paint import Screen
from shoal.cli.screen.tables import whole_parts
from shoal.cli.screen.top_board import Around, Board, detail, draw
from shoal.cli.screen.top_rows import Seen, places_of
from shoal.client import Client, ShoalError
from shoal.client.connections import Interrupt, Interrupted
from shoal.model.feed import Change, JobLine, NodeLine, Snapshot
from shoal.model.series import JobSeries, NodeSample, NodeSeries, ServiceSeries
from shoal.model.views import ServiceView, StatusView

if TYPE_CHECKING:
    from rich.text import Text


REFRESH_S = 1.0  # clocks go on, and the chosen row is read again
PAINT_S = 0.2  # between two pictures that nobody asked for by a key
PAINT_FACTOR = 10  # ... and this many times what a picture takes: at most a tenth of a CPU


class Details:
    """Reads what the stream does not have, in a thread, so that keys never wait for it."""

    def __init__(self, client: Client, screen: Screen) -> None:
        self._interrupt = Interrupt()
        self._client = client.lent(patience_s=0, interrupt=self._interrupt)
        self._screen = screen
        self._wanted = ("", "")
        self._told = ("", "")
        self._look, self._over = threading.Event(), False
        self._why = ""
        self._series: JobSeries | NodeSeries | ServiceSeries | None = None
        self.samples: dict[str, NodeSample] = {}
        self.services: dict[str, ServiceView] = {}
        self.number = 0
        self._thread = threading.Thread(target=self._run, name="details", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over = True
        self._look.set()
        self._interrupt.ask()
        self._thread.join(timeout=2)

    def of(self, view: str, key: str, width: int) -> tuple[str, str]:
        """Why, and a curve, of this row, as far as they are known."""
        if (view, key) != self._wanted:
            self._wanted = (view, key)
            self._look.set()
        return (self._why, detail(self._series, width)) if self._told == (view, key) else ("", "")

    def _run(self) -> None:
        while not self._over:
            view, key = self._wanted
            try:
                self._read(view, key)
            except Interrupted:
                return
            except ShoalError:
                pass  # it is gone, or nobody answers: the head of the screen says so
            self._screen.rouse()
            self._look.wait(REFRESH_S)
            self._look.clear()

    def _read(self, view: str, key: str) -> None:
        client = self._client
        why = ""
        series: JobSeries | NodeSeries | ServiceSeries | None = None
        if view == "nodes":
            self.samples = client.samples()
            series = client.node_series(key) if key else None
        elif view == "services":
            self.services = {one.name: one for one in client.services()}
            self.number += 1
            series = client.service_series(key) if key in self.services else None
            why = self.services[key].why if key in self.services else ""
        elif key:
            job = client.job(key)
            bound = job.progress.bound if job.progress else None
            why = job.why or (f"limited by {bound.kind.value}" if bound else "")
            series = client.job_series(key)
        self._why, self._series, self._told = why, series, (view, key)


def watch(home: Path, board: Board) -> None:
    with cluster.connect(home) as client:
        screen = Screen()
        live = Live(lambda: cluster.connect(home), screen.rouse)
        live.read(client)  # so that an error is one line, on a terminal as it was
        details = Details(client, screen)
        live.start()
        details.start()
        try:
            with screen.open():
                Top(client, screen, live, details, board).run()
        finally:
            details.stop()
            live.stop()


class Top:
    def __init__(
        self, client: Client, screen: Screen, live: Live, details: Details, board: Board
    ) -> None:
        self._client, self._screen, self._live = client, screen, live
        self._details, self._board = details, board
        self._seen: Seen | None = None

    def run(self) -> None:
        board = self._board
        while not board.over:
            began_s = time.monotonic()
            self._draw()
            drawn_s = time.monotonic()
            pause_s = max(PAINT_S, PAINT_FACTOR * (drawn_s - began_s))
            key = self._screen.wait(max(REFRESH_S, pause_s))
            while not key and (left := drawn_s + pause_s - time.monotonic()) > 0:
                key = self._screen.wait(left)
            while key:  # all that were typed, then one picture
                if key == "ctrl-l":
                    self._screen.again()
                act = board.press(key)
                if act == "logs" and board.key:
                    self._show_logs(board.key)
                elif act == "cancel":
                    self._cancel(board.asked)
                if board.over:
                    return
                self._look()
                key = self._screen.keys.wait(0)

    def _look(self) -> Seen:
        """The cluster now; the cursor is on one of its rows afterwards."""
        live, details = self._live, self._details
        if live.refused is not None:
            raise live.refused
        with live.lock:
            number = live.number + (details.number if self._board.view == "services" else 0)
            if self._seen is None or number != self._seen.number:
                assert live.status is not None, "it was read before the screen was opened"
                self._seen = Seen(
                    status=live.status,
                    now_ms=live.now_ms,
                    number=number,
                    jobs=dict(live.jobs),
                    nodes=dict(live.nodes),
                    services=details.services,
                    places=places_of(live.nodes),
                )
        seen = self._seen
        seen.now_ms, seen.samples = live.now_ms, details.samples
        self._board.keys(seen)
        return seen

    def _draw(self) -> None:
        size, board, live = self._screen.size, self._board, self._live
        seen = self._look()
        why, curve = self._details.of(board.view, board.key, size[0])
        told = board.asked if board.mode == "ask" else board.key
        job = seen.jobs.get(told) if board.view == "jobs" else None
        name = job.name if job is not None else ""
        around = Around(self._client.url, name, why, curve, live.since_s, live.trouble)
        self._screen.draw(draw(board, seen, around, size))

    def _cancel(self, job: str) -> None:
        self._board.message = f"cancelling {job}"
        self._draw()  # an answer may take long
        try:
            done = self._client.cancel(job)
            self._board.message = done.note or f"{job} is being cancelled"
        except ShoalError as error:
            self._board.message = f"{job} is not cancelled: {error.message or error}"

    def _show_logs(self, job: str) -> None:
        pane = LogPane(self._client, job, self._screen.rouse)
        pane.start()
        self._screen.again()
        try:
            while not pane.over:
                size = self._screen.size
                self._screen.draw(pane.draw(size))
                key = self._screen.wait(REFRESH_S)
                if key == "ctrl-c":
                    self._board.over = pane.over = True
                elif key:
                    pane.press(key, size[1])
        finally:
            pane.stop()
            self._screen.again()


# A job's output on a screen of its own, in `shoal top`: it follows, and can be scrolled.


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
    """As many lines as it takes; colors stay, other sequences are dropped."""
    from rich.text import Text

    cleaner = TerminalText()
    text = Text.from_ansi(cleaner.feed(line, final=True).expandtabs().replace("\n", " "))
    if text.cell_len <= width:
        return [text]
    return list(text.divide(range(width, len(text), width))) if width > 1 else [text]


# The cluster as the stream of changes shows it, kept current by a thread.


_SNAPSHOT = msgspec.json.Decoder(Snapshot)
_CHANGE = msgspec.json.Decoder(Change)
_BEAT = msgspec.json.Decoder(dict[str, int])


class Live:
    """`lock` is held while it changes. `since_s`: when it was last heard of, if it is away now."""

    def __init__(self, connect: Callable[[], Client], roused: Callable[[], None]) -> None:
        self._connect, self._roused = connect, roused
        self._interrupt = Interrupt()
        self._over = threading.Event()
        self._heard_s = time.time()
        self._last_id = ""
        self.lock = threading.Lock()
        self.status: StatusView | None = None
        self.nodes: dict[str, NodeLine] = {}
        self.jobs: dict[str, JobLine] = {}
        self.busy: dict[str, tuple[int, ...]] = {}
        self.number = 0  # grows with every change
        self.skew_ms = 0
        self.since_s: float | None = None
        self.trouble = ""
        self.refused: ShoalError | None = None  # the token is void: to ask again does not help
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    @property
    def now_ms(self) -> int:
        """The controller's time."""
        return int(time.time() * 1000) + self.skew_ms

    def read(self, client: Client) -> None:
        """Once: all of it, and the time now: that of a snapshot is when something last changed."""
        for told in client.stream():
            self._take(told.kind, told.id, told.data)
            if self.status is not None and told.kind == "beat":
                return
        raise ShoalError("the controller ended while it answered; try again")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._interrupt.ask()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._over.is_set():
            trouble = "the controller ended"
            try:
                with self._connect() as client:
                    lent = client.lent(patience_s=0, interrupt=self._interrupt)
                    for told in lent.stream(self._last_id):
                        with self.lock:
                            self._take(told.kind, told.id, told.data)
                        if told.kind != "beat" or self.since_s is not None:
                            self._roused()
                        self.since_s, self.trouble, self._heard_s = None, "", time.time()
            except Interrupted:
                return
            except ShoalError as error:
                if error.status == HTTPStatus.UNAUTHORIZED:
                    self.refused = error
                    self._roused()
                    return
                trouble = error.message if error.status else str(error)
            except Exception as error:  # such as a message that this version cannot read
                trouble = f"cannot read the stream: {error}"
            self.since_s, self.trouble = self._heard_s, trouble
            self._roused()
            self._over.wait(AGAIN_S)

    def _take(self, kind: str, name: str, data: bytes) -> None:
        if kind == "beat":
            self.skew_ms = _BEAT.decode(data)["now_ms"] - int(time.time() * 1000)
            return
        if kind == "snapshot":
            whole = _SNAPSHOT.decode(data)
            self.nodes, self.jobs, self.busy = {}, {}, {}
            change = Change(
                status=whole.status, nodes=whole.nodes, jobs=whole.jobs, busy=whole.busy
            )
            self.skew_ms = whole.status.now_ms - int(time.time() * 1000)
        elif kind == "change":
            change = _CHANGE.decode(data)
        else:
            return
        self._last_id, self.number = name, self.number + 1
        self.status = change.status or self.status
        self.nodes |= {one.id: one for one in change.nodes}
        self.jobs |= {one.id: one for one in change.jobs}
        self.busy |= change.busy
        for job in [*(one.id for one in change.ended), *change.gone_jobs]:
            self.jobs.pop(job, None)
        for node in change.gone_nodes:
            self.nodes.pop(node, None)
            self.busy.pop(node, None)
