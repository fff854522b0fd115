"""How a user detaches from a terminal: Ctrl-P Ctrl-Q, or ~. at the start of a line."""

from __future__ import annotations

CTRL_P, CTRL_Q, TILDE, DOT = 0x10, 0x11, ord("~"), ord(".")
LINE_ENDS = (0x0A, 0x0D)


class Detached(Exception):
    """The user wants to leave; the job goes on."""


class Keys:
    """A key that may begin such a pair is held back until the next one decides."""

    def __init__(self) -> None:
        self._held = b""
        self._line_begins = True

    def take(self, data: bytes) -> bytes:
        """What goes to the other side."""
        passed = bytearray()
        for key in data:
            pair = (self._held[0] if self._held else -1, key)
            if pair in ((CTRL_P, CTRL_Q), (TILDE, DOT)):
                raise Detached
            passed += self._held
            self._held = b""
            if key == CTRL_P or (key == TILDE and self._line_begins):
                self._held = bytes([key])
            else:
                passed.append(key)
            self._line_begins = key in LINE_ENDS
        return bytes(passed)
