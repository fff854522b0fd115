"""The loop of `shoal top`: keys, the stream of changes, and what is read of the chosen row."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from shoal.cli import cluster
from shoal.cli.screen.live import Live
from shoal.cli.screen.log_pane import LogPane
from shoal.cli.screen.paint import Screen
from shoal.cli.screen.top_board import Board, detail
from shoal.cli.screen.top_rows import Seen, places_of
from shoal.cli.screen.top_screen import Around, draw
from shoal.client import Client, ShoalError
from shoal.client.connections import Interrupt, Interrupted
from shoal.model.series import JobSeries, NodeSample, NodeSeries, ServiceSeries
from shoal.model.views import ServiceView

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
