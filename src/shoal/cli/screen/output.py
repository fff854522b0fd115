"""Writes a job's output: unchanged bytes to a pipe, safe text to a terminal, or JSON."""

from __future__ import annotations

import codecs
import re
import sys
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol

# A longer line is written in pieces of this size.
LINE_BYTES_MAX = 64 * 1024

# Colors may pass. Sequences that move the cursor, set the title or make the terminal answer are
# dropped: a job's log must not change what the user sees elsewhere.
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC with their text
    r"|\x1b[ -/]*[0-~]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}\x1b?|[ -/]*)?$")
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_RESET = "\x1b[0m"
COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Output(Protocol):
    def write(self, attempt: int, member: int, data: bytes) -> None: ...

    def end(self) -> None:
        """An attempt is over: write what was held back."""


class TerminalText:
    """Turns bytes into text that is safe on a terminal. A sequence may be split over two calls."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.colored = False

    def feed(self, data: bytes, final: bool = False) -> str:
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        if not final and (match := _UNFINISHED.search(text)):
            text, self._held = text[: match.start()], text[match.start() :]
        return self._clean(text)

    def _clean(self, text: str) -> str:
        if not _CONTROLS.search(text):
            return text
        self.colored = self.colored or bool(_COLOR.search(text))
        kept = _ESCAPE.sub(lambda m: m[0] if _COLOR.fullmatch(m[0]) else "", text)
        # An ESC that is left now begins a color or is stray.
        kept = re.sub(r"\x1b(?!\[[0-9;:]*m)", "", kept)
        return _CONTROLS.sub(lambda m: m[0] if m[0] == "\x1b" else "\ufffd", kept)


class TextOutput:
    """The output of all members of a job. With `prefixed`, whole lines are written as '[3] ...'."""

    def __init__(
        self,
        *,
        prefixed: bool,
        terminal: bool,
        out: BinaryIO | None = None,
        name: Callable[[int], str] | None = None,
    ) -> None:
        self._name = name
        self._prefixed = prefixed
        self._terminal = terminal
        self._out = out if out is not None else sys.stdout.buffer
        self._partial: dict[int, bytes] = {}
        self._texts: dict[int, TerminalText] = {}

    def write(self, attempt: int, member: int, data: bytes) -> None:  # noqa: ARG002
        if not self._prefixed:
            self._emit(member, data)
        else:
            *lines, rest = (self._partial.get(member, b"") + data).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            self._partial[member] = rest
            for one in lines:
                self._emit_line(member, one)
        self._out.flush()

    def end(self) -> None:
        """An attempt is over: write what was held back, and reset the terminal's colors."""
        for member, rest in sorted(self._partial.items()):
            if rest:
                self._emit_line(member, rest)
        for text in self._texts.values():
            self._put(text.feed(b"", final=True))
        if any(text.colored for text in self._texts.values()):
            self._put(_RESET)
        self._partial, self._texts = {}, {}
        self._out.flush()

    def _emit_line(self, member: int, data: bytes) -> None:
        self._out.write(self._prefix(member))
        if self._terminal:
            text = TerminalText()
            self._put(text.feed(data.rstrip(b"\r").replace(b"\r", b" "), final=True))
            self._put(_RESET if text.colored else "")
        else:
            self._out.write(data)
        self._out.write(b"\n")

    def _prefix(self, member: int) -> bytes:
        """With names of its own, each source has a color of its own."""
        if self._name is None:
            return b"[%d] " % member
        name = self._name(member)
        if not self._terminal:
            return f"[{name}] ".encode()
        color = COLORS[zlib.crc32(name.encode()) % len(COLORS)]
        return f"\x1b[{color}m[{name}]{_RESET} ".encode()

    def _emit(self, member: int, data: bytes) -> None:
        if self._terminal:
            text = self._texts.setdefault(member, TerminalText())
            self._put(text.feed(data))
        else:
            self._out.write(data)

    def _put(self, text: str) -> None:
        self._out.write(text.encode("utf-8", "replace"))


class JsonOutput:
    """One object per line of output, for scripts. `job`: to name it in each."""

    def __init__(self, job: str = "") -> None:
        self._job = {"job": job} if job else {}
        self._partial: dict[tuple[int, int], bytes] = {}

    def write(self, attempt: int, member: int, data: bytes) -> None:
        *lines, rest = (self._partial.get((attempt, member), b"") + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        self._partial[attempt, member] = rest
        for one in lines:
            self._emit(attempt, member, one)

    def end(self) -> None:
        for (attempt, member), rest in sorted(self._partial.items()):
            if rest:
                self._emit(attempt, member, rest)
        self._partial = {}

    def _emit(self, attempt: int, member: int, line: bytes) -> None:
        from shoal.cli.screen.show import as_json

        text = line.decode("utf-8", "replace")
        as_json({**self._job, "attempt": attempt, "member": member, "line": text}, lines=True)
