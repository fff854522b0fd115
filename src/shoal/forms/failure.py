"""What ends a verb: one line for the user and the exit code."""

from __future__ import annotations

REFUSED = 1
USAGE = 2


class Failure(Exception):
    """A verb ends here: one line for the user, and the exit code."""

    def __init__(self, message: str, code: int = REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
