"""A progress bar with rate and time left, on a terminal, for maps that take more than a moment."""

from __future__ import annotations

import os
import sys
import time

QUIET_S = 1.0
FRAME_S = 0.2
BAR_WIDTH = 24
RATE_WEIGHT = 0.3


class Progress:
    def __init__(
        self, total: int | None, *, quiet: bool = False, done: int = 0, lines_s: float = 0.0
    ) -> None:
        """`lines_s`: without a terminal, print a line every `lines_s` seconds; 0 for none."""
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._live = terminal and not quiet
        self._every_s = FRAME_S if self._live else lines_s
        self._silent = quiet or not self._every_s
        self._total = total
        self._done = done
        self._failed = 0
        self._rate: float | None = None
        self._began_s = time.monotonic()
        self._shown_s, self._shown_done = self._began_s, done
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn and self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def add(self, count: int, failed: bool = False) -> None:
        self._done += count
        self._failed += failed
        if self._silent:
            return
        now = time.monotonic()
        since = now - self._shown_s
        if since < self._every_s or now - self._began_s < QUIET_S:
            return
        rate = (self._done - self._shown_done) / since
        old = self._rate
        self._rate = rate if old is None else RATE_WEIGHT * rate + (1 - RATE_WEIGHT) * old
        self._shown_s, self._shown_done, self._drawn = now, self._done, True
        text = progress_text(self._done, self._total, self._rate, self._failed)
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def progress_text(done: int, total: int | None, rate: float, failed: int = 0) -> str:
    """'■■■□□□ 1,200 of 10,000, 310/s, 28s left, 2 failed'."""
    speed = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
    parts = [f"{done:,}", speed]
    if total:
        filled = min(BAR_WIDTH, BAR_WIDTH * done // total)
        bar = "■" * filled + "□" * (BAR_WIDTH - filled)
        parts[0] = f"{bar} {done:,} of {max(total, done):,}"
        if rate > 0:
            parts.append(f"{time_text((total - done) / rate)} left")
    if failed:
        parts.append(f"{failed:,} failed")
    return ", ".join(parts)


def time_text(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole}s"
    if whole < 6000:
        return f"{whole // 60}m {whole % 60:02}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m"
