"""What is wrong with a request: one line for the user."""

from __future__ import annotations

REFUSED = 1
USAGE = 2


class Failure(Exception):
    """Ends a verb with one line for the user and an exit code."""

    def __init__(self, message: str, code: int = REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class BadField(ValueError):
    """A field is wrong. The message says why and what to write instead."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message
