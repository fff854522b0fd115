"""Shows the demo: a live picture on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from shoal.cli.demo.state import DemoNode, DemoState, Sights, curve
from shoal.cli.screen.show import STATE_STYLES, bar, console
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeLost, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobFinished,
    JobRequeued,
    JobRunning,
    JobStopping,
    MemberExited,
    MembersStarted,
)
from shoal.model.ids import number_of
from shoal.model.job import Outcome

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

EVENTS_SHOWN = 6
QUEUE_SHOWN = 6
CURVE_WIDTH, CURVE_HEIGHT = 46, 4
WORDS_WIDTH = 38  # beside the curve, which is left out where it would be narrower than CURVE_LEAST
CURVE_LEAST = 12
CURVE_S = 20.0  # the time that fills the curve's width, at least
PROGRESS_WIDTH = 24
PROGRESS_LINES_S = 2.0
# Backgrounds on which black digits are readable.
COLORS = (39, 208, 118, 213, 226, 81, 203, 156, 177, 220, 44, 216)


class Screen(Protocol):
    def caption(self, text: str) -> None:
        """What happens now."""

    def page(self, link: str) -> None:
        """The link to the page."""

    def happened(self, event: Event) -> None: ...

    def refresh(self) -> None: ...

    def __enter__(self) -> Screen: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Quiet:
    """For --json."""

    def caption(self, text: str) -> None:
        pass

    def page(self, link: str) -> None:
        pass

    def happened(self, event: Event) -> None:
        pass

    def refresh(self) -> None:
        pass

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Plain(Quiet):
    """Lines with the time since the start, only for the main events."""

    def __init__(self, state: DemoState, sights: Sights | None = None) -> None:
        self._state = state
        self._sights = sights or Sights()
        self._begun = time.monotonic()
        self._progress_due = 0.0
        self._progress = ""

    def caption(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:5.1f} s  {text}", flush=True)

    def page(self, link: str) -> None:
        self.caption(f"see it in a browser: {link}")

    def happened(self, event: Event) -> None:
        match event:
            case NodeLost() | JobRequeued():
                self.caption(event.sentence())
            case NodeReady() if self._state.kills:
                self.caption(event.sentence())
            case JobRunning() if event.attempt > 1:
                self.caption(event.sentence())
            case JobFinished() if event.outcome is not Outcome.SUCCEEDED:
                self.caption(event.sentence())
            case _:
                pass

    def refresh(self) -> None:
        now = time.monotonic()
        text = ", ".join(f"{count} {state}" for state, count in self._state.counts().items())
        if now >= self._progress_due and text != self._progress and self._state.jobs:
            seen = self._sights
            if seen.training.points:
                text += f"; training: {seen.training.words}; service: {seen.serving.words}"
            self.caption(f"jobs: {text}")
            self._progress, self._progress_due = text, now + PROGRESS_LINES_S


class Picture(Quiet):
    """Nodes with a cell per GPU, colored by job; the queue; the last events."""

    def __init__(self, state: DemoState, sights: Sights | None = None) -> None:
        self._state = state
        self._sights = sights or Sights()
        self._begun = time.monotonic()
        self._caption = ""
        self._page = ""
        self._last: deque[tuple[float, Event]] = deque(maxlen=EVENTS_SHOWN)
        self._live: Live | None = None
        self._keys = sys.stdin.isatty()

    def __enter__(self) -> Picture:
        from rich.live import Live

        self._live = Live(console=console(), auto_refresh=False, transient=True)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def caption(self, text: str) -> None:
        self._caption = text
        self.refresh()

    def page(self, link: str) -> None:
        self._page = link
        self.refresh()

    def happened(self, event: Event) -> None:
        dull = isinstance(event, MembersStarted | MemberExited | JobStopping | JobSubmitted)
        if dull or (isinstance(event, JobRunning) and event.attempt == 1):
            return
        self._last.append((time.monotonic() - self._begun, event))

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)

    def _render(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        clock = f"{time.monotonic() - self._begun:5.1f} s"
        head = Text.assemble(("Shoal demo ", "bold"), (clock, "dim"), "  ", (self._caption, "cyan"))
        head.no_wrap, head.overflow = True, "ellipsis"
        # All of it, so that it can be copied: with the words it has 75 characters.
        page = Text.assemble(("in a browser: ", "dim"), self._page) if self._page else Text()
        page.overflow = "fold"
        return Group(
            head,
            page,
            Text(),
            self._nodes(),
            Text(),
            self._sight(),
            Text(),
            self._queue(),
            Text(),
            self._events(),
        )

    def _sight(self) -> Table:
        """The loss of the training run, with the service beside it."""
        from rich.table import Table
        from rich.text import Text

        seen, now_s = self._sights, time.monotonic()
        first_s = seen.training.points[0].at_s if seen.training.points else now_s
        until_s = max(now_s, first_s + CURVE_S)
        width = min(CURVE_WIDTH, console().width - WORDS_WIDTH - 2)
        rows = curve(seen.training.points, max(width, CURVE_LEAST), CURVE_HEIGHT, until_s)
        picture = Text("\n".join(rows), style="cyan", no_wrap=True)
        picture.highlight_regex(r"\|", "bold yellow")
        resumed = list(seen.training.resumed.values())
        again = f"went on from step {resumed[-1]}" if resumed else ""
        words = Text.assemble(
            ("training  ", "bold"), seen.training.words, "\n",
            (again, "yellow"), "\n",
            *((("service   ", "bold"), seen.serving.words, "\n") if seen.serving.job else ()),
            ("press 1-4 to kill a node" if self._keys else "", "dim"),
        )  # fmt: skip
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        words.no_wrap, words.overflow = True, "ellipsis"
        grid.add_row(*((picture, words) if width >= CURVE_LEAST else (words,)))
        return grid

    def _nodes(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for node_id, node in sorted(self._state.nodes.items()):
            state = Text(node.state, style=STATE_STYLES.get(node.state, ""))
            name = Text(node_id, style="bold")
            grid.add_row(name, state, gpu_cells(node), Text(node.place, style="dim"))
        return grid

    def _queue(self) -> Text:
        from rich.text import Text

        counts = self._state.counts()
        total = sum(counts.values())
        numbers = ", ".join(f"{count} {state}" for state, count in counts.items())
        text = Text.assemble(
            (bar(counts["finished"], total, PROGRESS_WIDTH), "green"),
            f"  {total} jobs: {numbers}\n",
        )
        jobs = self._state.jobs.items()
        waiting = [f"{number} {job.name}" for number, job in jobs if job.state == "waiting"]
        more = f" and {len(waiting) - QUEUE_SHOWN} more" if len(waiting) > QUEUE_SHOWN else ""
        queue = ", ".join(waiting[:QUEUE_SHOWN]) + more
        text.append(f"queue: {queue or 'empty'}", style="yellow dim")
        text.no_wrap, text.overflow = True, "ellipsis"
        return text

    def _events(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        from shoal.cli.verbs.explain import event_style

        lines = []
        for elapsed, event in self._last:
            more = getattr(event, "outcome", ""), getattr(event, "code", 0)
            style = event_style(type(event).__name__, *more)
            line = Text.assemble((f"{elapsed:5.1f} s  ", "dim"), (event.sentence(), style))
            line.no_wrap, line.overflow = True, "ellipsis"
            lines.append(line)
        return Group(*lines, *[Text()] * (EVENTS_SHOWN - len(lines)))


def gpu_cells(node: DemoNode) -> Text:
    """One cell per GPU, with the number of its job on that job's color."""
    from rich.text import Text

    text = Text()
    for job in node.cells:
        if node.state == "lost":
            text.append(" xx ", style="white on red")
        elif job:
            number = number_of(job)
            color = COLORS[number % len(COLORS)]
            text.append(f" {number:>2} ", style=f"black on color({color})")
        else:
            text.append("  . ", style="dim")
        text.append(" ")
    return text


def choose(state: DemoState, sights: Sights, *, quiet: bool, terminal: bool) -> Screen:
    if quiet:
        return Quiet()
    return Picture(state, sights) if terminal else Plain(state, sights)
