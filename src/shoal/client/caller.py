"""How a client calls the API: over kept connections, again and again while nobody answers."""

from __future__ import annotations

import copy
import functools
import http.client
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, Self, TypeVar

import msgspec

from shoal.calls.call import Call, Request
from shoal.client import contexts, transport
from shoal.client.connections import Connections, Interrupt, Taken
from shoal.client.exchange import Answer as Answered
from shoal.client.exchange import exchange
from shoal.client.reaching import HEADS, SEQ, STANDBY, Reaching
from shoal.client.transport import Endpoint, ShoalError, Unreachable, WrongCertificate
from shoal.model.views import Problem

Answer = TypeVar("Answer")
Body = bytes | IO[bytes] | None
Headers = dict[str, str] | None

RETRY_PAUSE_S = 0.1
LEADERLESS_S = 0.25  # between two rounds of asking heads that have no leader
STREAM_SILENT_S = 10.0  # the controller beats every two seconds
NO_TOKEN, NO_ANSWER = 401, 502


# Two threads that decode a type for the first time at once can crash msgspec, and so the process.
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()


def _new_lock() -> None:
    """In a forked child: the thread that held the lock may not be there any more."""
    global _building
    _building = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _decoder(kind: type[Answer]) -> msgspec.json.Decoder[Answer]:
    found = _decoders.get(kind)
    if found is None:
        with _building:
            found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


class Told(NamedTuple):
    """One of a stream's messages."""

    kind: str
    id: str
    data: bytes


def _told(lines: IO[bytes]) -> Iterator[Told]:
    kind, name, data = "", "", b""
    for line in lines:
        field, _, value = line.rstrip(b"\r\n").partition(b": ")
        if field == b"event":
            kind = value.decode()
        elif field == b"id":
            name = value.decode()
        elif field == b"data":
            data = value
        elif not field and data:
            yield Told(kind, name, data)
            kind, data = "", b""


class Caller:
    """Threads may share it, and a forked child may go on using it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, patience_s: float) -> None:
        self._given = endpoint
        self._reaching = Reaching(endpoint, functools.partial(contexts.remember, endpoint.context))
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}
        self._patience_s = patience_s
        self._connections = Connections(self._reaching, timeout_s)
        self._interrupt = Interrupt()

    @property
    def endpoint(self) -> Endpoint:
        """The head that answers at present, and the others."""
        return self._reaching.current

    @property
    def url(self) -> str:
        return self._reaching.current.url

    @property
    def remote(self) -> bool:
        """Whether the head may be another machine, so that paths here mean nothing there."""
        return self._given.socket is None

    def close(self) -> None:
        """Closes the connections. The next call opens another."""
        self._connections.close()

    def lent(self, *, patience_s: float | None = None, interrupt: Interrupt | None = None) -> Self:
        """The same client over the same connections, with another patience, or for calls that
        another thread can interrupt."""
        other = copy.copy(self)
        if patience_s is not None:
            other._patience_s = patience_s
        if interrupt is not None:
            other._interrupt = interrupt
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call, request: Request) -> Any:
        return self.request(call.method, request.path, call.answer, request.body, request.headers)

    def request(
        self, method: str, path: str, kind: type[Answer], body: Body = None, headers: Headers = None
    ) -> Answer:
        """Any request to the API, also one that no method here is for. `path` has its query."""
        interrupt, patience = self._interrupt, Patience(self._patience_s, self._interrupt.sleep)
        deadline, tries = time.monotonic() + self._patience_s, 0
        while True:
            interrupt.check()
            taken = self._connections.take()
            try:
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
                status, data, again_s = self._exchange(taken, method, path, body, headers)
            except (OSError, http.client.HTTPException, WrongCertificate, Unreachable) as error:
                taken.connection.close()
                interrupt.check()
                if taken.kept:  # it may have been closed long ago: try another
                    continue
                tries += 1
                whole = self._next_head(taken.to.url, tries)
                if isinstance(error, ShoalError) and (whole or not self._reaching.several):
                    raise
                if whole and time.monotonic() >= deadline:
                    raise Unreachable(self._silence(error)) from None
                if whole:
                    interrupt.sleep(RETRY_PAUSE_S)
                continue
            except BaseException:  # Ctrl-C: the answer may still be under way on it
                taken.connection.close()
                raise
            self._connections.give(taken)
            if again_s == LEADERLESS_S:
                tries += 1
                if not self._next_head(taken.to.url, tries):
                    continue
            if not patience.wait(again_s, data):
                break
        if status >= 300:
            raise self._problem(status, data)
        try:
            return _decoder(kind).decode(data)
        except msgspec.DecodeError as error:
            message = f"{self.url} runs another version of shoal, or is not shoal: {error}"
            raise ShoalError(message) from None

    def stream(self, last_id: str = "") -> Iterator[Told]:
        """What changes in the cluster, beginning with all of it, or with what changed since
        `last_id`. It ends with the controller, or when that is silent."""
        to = self._reaching.current
        connection = transport.connection_to(to, STREAM_SILENT_S)
        seen = {"Last-Event-ID": last_id} if last_id else {}
        try:
            self._interrupt.hold(connection)
            connection.request("GET", "/v1/stream", headers={**self._headers, **seen})
            with connection.getresponse() as response:
                if STANDBY in response.headers:
                    raise ConnectionResetError("no head leads")
                if response.status >= 300:
                    raise self._problem(response.status, response.read())
                yield from _told(response)
        except (OSError, http.client.HTTPException) as error:
            self._interrupt.check()
            self._reaching.next(to.url)
            raise Unreachable(self._silence(error)) from None
        finally:
            connection.close()

    def _next_head(self, failed: str, tries: int) -> bool:
        """Whether all heads were tried, so that a pause is due."""
        self._reaching.next(failed)
        return tries % self._reaching.count == 0

    def _exchange(
        self, taken: Taken, method: str, path: str, body: Body, more: Headers
    ) -> tuple[int, bytes, float]:
        connection = taken.connection
        if connection.sock is None:
            self._connections.open(taken)
        headers = self._headers
        if self._reaching.seq:
            headers = {**headers, SEQ: str(self._reaching.seq)}
        if body is not None:
            headers = {**headers, "Content-Type": "application/json", **(more or {})}
        self._interrupt.hold(connection)
        try:
            answer = exchange(connection.sock, method, path, taken.host, headers, body)
        finally:
            self._interrupt.hold(None)
        status, data, known = answer.status, answer.body, answer.headers
        if answer.last:
            connection.close()
        if STANDBY in known:
            if status == NO_ANSWER:
                raise ConnectionResetError("the head that leads ended while it answered")
            return status, data, LEADERLESS_S
        self._reaching.answered(taken.to.url, known.get(SEQ, ""), known.get(HEADS, ""))
        return status, data, retry_s(answer)

    def _silence(self, error: Exception) -> str:
        where = self._given.socket or " or ".join(self.endpoint.all_urls[:3])
        advice = "shoal up, on the head" if self._given.context else "shoal up"
        return f"no controller answers at {where} ({error}); try: {advice}"

    def _problem(self, status: int, data: bytes) -> ShoalError:
        if status == NO_TOKEN and self._given.context:
            name = self._given.context
            message = f"{name} does not accept your token: it was removed, or it has expired"
            message += f"; get another, then: shoal login --context {name}"
            return ShoalError(message, status=status)
        try:
            problem = msgspec.json.decode(data, type=Problem)
        except msgspec.DecodeError:
            problem = Problem(message=f"the controller answered with status {status}")
        return ShoalError(problem.message, problem.field, status)


# A controller that answers "later": 429 or 503, with Retry-After.


STATUSES = (429, 503)
WAIT_S = 10.0  # a controller that answers "later" is waited for this much longer than a silent one
SAY_S = 2.0
DIGITS_MAX = 5


def retry_s(answer: Answered) -> int:
    """After how many seconds the same request may be accepted; 0: the answer is final."""
    after = answer.headers.get("retry-after", "") if answer.status in STATUSES else ""
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
