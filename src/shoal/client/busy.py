"""How a client waits for a controller that answers "later": 429 or 503, with Retry-After."""

from __future__ import annotations

import http.client
import secrets
import sys
import time
from collections.abc import Callable

import msgspec

from shoal.model.views import Problem

STATUSES = (429, 503)
WAIT_S = 10.0  # a controller that answers "later" is waited for this much longer than a silent one
SAY_S = 2.0
DIGITS_MAX = 5


def retry_s(response: http.client.HTTPResponse) -> int:
    """After how many seconds the same request may be accepted; 0: the answer is final."""
    after = response.headers.get("Retry-After", "") if response.status in STATUSES else ""
    return int(after) if after.isdigit() and len(after) <= DIGITS_MAX else 0


class Patience:
    """Of one call. Waits for as long as the controller says, up to a bound."""

    def __init__(self, patience_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._began = time.monotonic()
        self._until = self._began + patience_s + WAIT_S
        self._said = False

    def wait(self, seconds: float, answer: bytes) -> bool:
        """False: it would take too long, so the answer is final."""
        now = time.monotonic()
        if not seconds or now + seconds > self._until:
            return False
        if now + seconds - self._began >= SAY_S and not self._said:
            self._said = True
            print(f"shoal: {_reason(answer)}; waiting", file=sys.stderr, flush=True)
        # Clients that were refused at the same moment must not all come back at the same moment.
        self._sleep(seconds * (1 + secrets.randbelow(256) / 1024))
        return True


def _reason(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=Problem).message.partition("; try again")[0]
    except msgspec.DecodeError:
        return "the controller is busy"
