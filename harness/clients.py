"""Clients that submit, cancel, requeue, retry and read at random, each in a thread of its own, and
write down what they did and heard (`harness/history.py`)."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from harness.history import FAIL, OK, UNKNOWN, Op, Seen, checksum
from shoal.client import Client, ShoalError
from shoal.core.state.events.log import Recorded
from shoal.model.job import JobSpec
from shoal.model.views import JobRow

SERVER_ERROR = 500
LIST_MAX = 10_000
PAGE = 1_000
REPEAT = 0.7  # of the submissions without an answer that are sent again, with the same key
# What a client does, and how often.
DEEDS = {"submit": 8, "cancel": 2, "requeue": 1, "retry": 1, "job": 5, "list": 1, "events": 3}

Spec = Callable[[random.Random], JobSpec]


class Recorder(threading.Thread):
    """One client. `open_client` gives its connection, with little patience: an answer that does not
    come is what is interesting. `spec` makes a job; those with an array are retried, too."""

    def __init__(
        self, number: int, open_client: Callable[[], Client], spec: Spec, seed: int, pause_s: float
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.number = number
        self.ops: list[Op] = []
        self.error: BaseException | None = None
        self._open = open_client
        self._spec = spec
        self._dice = random.Random(seed)
        self._pause_s = pause_s
        self._own: list[str] = []
        self._arrays: list[str] = []
        self._after = 0
        self._end = threading.Event()

    def end(self) -> None:
        self._end.set()

    def run(self) -> None:
        try:
            with self._open() as client:
                while not self._end.wait(self._dice.uniform(0, 2 * self._pause_s)):
                    self._act(client)
        except BaseException as error:
            self.error = error

    def _act(self, client: Client) -> None:
        dice = self._dice
        kind = dice.choices(list(DEEDS), list(DEEDS.values()))[0]
        if kind == "submit" or not self._own:
            self._submit(client, self._spec(dice), secrets.token_hex(8))
        elif kind == "list":
            self._list(client)
        elif kind == "events":
            self._events(client)
        elif kind == "retry":
            if self._arrays:
                self._change(client, kind, dice.choice(self._arrays[-5:]))
        else:
            job = dice.choice(self._own[-10:])
            if kind == "job":
                self._job(client, job)
            else:
                self._change(client, kind, job)

    def _submit(self, client: Client, spec: JobSpec, key: str) -> None:
        for _ in range(20):
            began = time.time()
            try:
                made = client.submit(spec, key).id
            except ShoalError as error:
                self._note("submit", began, _result(error), key=key, note=str(error))
                if _result(error) == FAIL or self._dice.random() > REPEAT:
                    return
                continue
            self._note("submit", began, OK, key=key, made=made)
            self._own.append(made)
            if spec.sweep is not None:
                self._arrays.append(made)
            return

    def _change(self, client: Client, kind: str, job: str) -> None:
        began, key = time.time(), secrets.token_hex(8)
        try:
            if kind == "cancel":
                done = client.cancel(job)
            elif kind == "requeue":
                done = client.requeue(job, key)
            else:
                done = client.retry(job)
        except ShoalError as error:
            self._note(kind, began, _result(error), job=job, key=key, note=str(error))
            return
        made = done.id if kind == "requeue" and done.id != job else ""
        self._note(kind, began, OK, job=job, key=key, made=made, note=done.note)
        if made:
            self._own.append(made)

    def _job(self, client: Client, job: str) -> None:
        began = time.time()
        try:
            row = client.job(job)
        except ShoalError as error:
            self._note("job", began, _result(error), job=job, note=str(error))
            return
        self._note("job", began, OK, job=job, seen=_seen([row]))

    def _list(self, client: Client) -> None:
        began = time.time()
        try:
            rows = client.jobs(finished=True, limit=LIST_MAX)
        except ShoalError as error:
            self._note("list", began, _result(error), note=str(error))
            return
        listed = tuple(row.id for row in rows) if len(rows) < LIST_MAX else ()
        self._note("list", began, OK, seen=_seen(rows), listed=listed)

    def _events(self, client: Client) -> None:
        began = time.time()
        try:
            view = client.events(after=self._after, limit=PAGE)
        except ShoalError as error:
            self._note("events", began, _result(error), note=str(error))
            return
        self._after = max(self._after, view.next_after)
        shown = tuple((one.seq, checksum(one)) for one in view.events)
        self._note("events", began, OK, shown=shown)

    def _note(self, kind: str, began: float, result: str, **more: Any) -> None:
        ended = time.time()
        self.ops.append(
            Op(client=self.number, kind=kind, began=began, ended=ended, result=result, **more)
        )


def whole_log(client: Client) -> list[Recorded]:
    log: list[Recorded] = []
    while True:
        view = client.events(after=log[-1].seq if log else 0, limit=5_000)
        if not view.events:
            return log
        log += view.events


def _result(error: ShoalError) -> str:
    """Refused by the cluster, or without an answer that says so."""
    return FAIL if 0 < error.status < SERVER_ERROR else UNKNOWN


def _seen(rows: list[JobRow]) -> tuple[Seen, ...]:
    """Arrays are left out: their state is a sum over elements."""
    rows = [row for row in rows if row.array is None]
    return tuple(Seen(row.id, row.state, row.attempt) for row in rows)
