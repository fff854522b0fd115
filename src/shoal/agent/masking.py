"""Which bytes of a member's output belong to its secrets: they are replaced by asterisks.

A byte is hidden if and only if it is part of a secret, in one of its usual encodings, in the whole
output. So it does not matter in which pieces output is written, read or sent again, and every byte
stays where it is.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

LEAST_BYTES = 4  # shorter values would hide half of any output
LINE_LEAST_BYTES = 8  # of a value with several lines: "true" or "}" alone is not a secret
ENCODED_LEAST_BYTES = 6
# Long values are hidden in pieces, so that what has to be looked at around a piece stays small.
PIECE_BYTES = 1024
PIECES_MAX = 256  # of all secrets of a member: the agent looks for each of them


class Mask:
    """`reach`: how far before and after a byte one has to look to know whether it is hidden."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._pieces = [Piece(piece) for piece in pieces_of(list(values))]
        self.reach = max((len(piece.text) for piece in self._pieces), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def hide(self, data: bytes, *, cut_before: bool = False, cut_after: bool = False) -> bytes:
        """`cut_before`, `cut_after`: output is missing there, so that the rest of a secret at that
        edge is hidden, too."""
        spans = [span for piece in self._pieces for span in piece.spans(data)]
        if cut_before:
            spans.append((0, max((piece.rest_at(data) for piece in self._pieces), default=0)))
        if cut_after:
            spans.append((len(data) - self.begun(data, LEAST_BYTES), len(data)))
        hidden = bytearray(data) if any(begin < end for begin, end in spans) else None
        if hidden is None:
            return data
        for begin, end in spans:
            hidden[begin:end] = b"*" * (end - begin)
        return bytes(hidden)

    def begun(self, data: bytes, least: int = 1) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret."""
        longest = max((piece.begun(data) for piece in self._pieces), default=0)
        return longest if longest >= least else 0

    def hide_text(self, text: str) -> str:
        """A short text, which may have been cut."""
        data = text.encode("utf-8", "surrogatepass")
        return self.hide(data, cut_before=True, cut_after=True).decode("utf-8", "replace")


class Piece:
    """One text to look for. If it repeats itself with a period, as `aaaa` does, its occurrences
    may overlap, and a regular expression finds a whole run of them."""

    __slots__ = ("_run", "period", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.period = _period(text)
        self._run: re.Pattern[bytes] | None = None
        if 2 * self.period <= len(text):
            unit, rest = text[: self.period], text[: len(text) % self.period]
            run = b"(?:%s){%d,}" % (re.escape(unit), len(text) // self.period)
            self._run = re.compile(run + re.escape(rest), re.DOTALL)

    def spans(self, data: bytes) -> Iterable[tuple[int, int]]:
        at = 0
        while True:
            if self._run is None:
                begin = data.find(self.text, at)
                if begin < 0:
                    return
                end, at = begin + len(self.text), begin + self.period
            else:
                found = self._run.search(data, at)
                if found is None:
                    return
                begin, end = found.span()
                at = max(begin + 1, end - self.period + 1)
            yield begin, end

    def rest_at(self, data: bytes) -> int:
        """How many bytes at the beginning of `data` are the end of this text."""
        at = self.text.find(data[:1], 1) if data else -1
        while 0 <= at <= len(self.text) - LEAST_BYTES:
            if data.startswith(self.text[at:]):
                return len(self.text) - at
            at = self.text.find(data[:1], at + 1)
        return 0

    def begun(self, data: bytes) -> int:
        """How many bytes at the end of `data` are the beginning of this text."""
        end = data[max(0, len(data) - len(self.text) + 1) :]
        at = end.find(self.text[:1])
        while at >= 0:
            if self.text.startswith(end[at:]):
                return len(end) - at
            at = end.find(self.text[:1], at + 1)
        return 0


def pieces_of(values: list[bytes]) -> list[bytes]:
    """What to look for: the values first, then their lines, then their encodings."""
    stripped = [value.strip() for value in values]
    found: dict[bytes, None] = {}
    for value in stripped:
        found.update(dict.fromkeys(_cut(value, LEAST_BYTES)))
    for value in stripped:
        lines = value.splitlines() if b"\n" in value else []
        for line in lines:
            found.update(dict.fromkeys(_cut(line.strip(), LINE_LEAST_BYTES)))
    for value in stripped:
        for encoded in _encodings(value) if len(value) >= LEAST_BYTES else ():
            found.update(dict.fromkeys(_cut(encoded, ENCODED_LEAST_BYTES)))
    return list(found)[:PIECES_MAX]


def _cut(text: bytes, least: int) -> list[bytes]:
    if len(text) < least:
        return []
    parts = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
    if len(parts) > 1:
        parts[-1] = text[-PIECE_BYTES:]  # none is short
    return parts


def _encodings(value: bytes) -> Iterable[bytes]:
    """As programs print it: quoted for a URL or in JSON, in hexadecimal, in base64."""
    yield quote(value, safe="").encode()
    yield quote_plus(value).encode()
    yield quote(value).encode()
    text = value.decode("utf-8", "replace")
    yield json.dumps(text)[1:-1].encode()
    yield json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")
    yield repr(value)[2:-1].encode()
    yield value.hex().encode()
    yield value.hex().upper().encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(value).rstrip(b"=")
        # Inside a longer text, `user:VALUE` for example, it looks different: three ways, of which
        # the characters that also depend on the neighbours are left out.
        for shift, lost in ((0, 0), (1, 2), (2, 3)):
            whole = (shift + len(value)) // 3 * 4 + ((shift + len(value)) % 3 * 8) // 6
            yield encode(bytes(shift) + value)[lost:whole]


def _period(text: bytes) -> int:
    """The smallest shift by which it can overlap itself."""
    border = [0] * len(text)
    for index in range(1, len(text)):
        length = border[index - 1]
        while length and text[index] != text[length]:
            length = border[length - 1]
        border[index] = length + 1 if text[index] == text[length] else 0
    return len(text) - border[-1]
