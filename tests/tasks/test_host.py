"""The host of a map's worker: what it sends when Shoal asks it to leave at a bad moment."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from typing import Any

import pytest

from shoal.tasks import frames, pool
from shoal.tasks.frames import Frame, parcel
from shoal.tasks.host import Leave, Leaving, _Host
from shoal.tasks.pool import Pool, Result, Work, function_of
from shoal.tasks.process import Process
from shoal.tasks.stream import INNOCENT, Incoming


class Interrupted:
    """A connection on which SIGTERM arrives just after the first result has been sent."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, data: bytes) -> int:
        sent = self._real.send(data)
        self._sent += 1
        if self._sent == 2:  # READY was the first
            os.kill(os.getpid(), signal.SIGTERM)
        return sent


def test_a_host_that_leaves_in_the_middle_of_sending_sends_each_result_once() -> None:
    ours, theirs = socket.socketpair()
    heard: list[Frame] = []

    def client() -> None:
        body = pickle.dumps((sys.path, "", None, ""))
        ours.sendall(parcel(frames.HELLO, body=body).data)
        ours.sendall(parcel(frames.FUNCTION, 1, body=pickle.dumps(abs)).data)
        ours.sendall(parcel(frames.CHUNK, 7, 1, pickle.dumps([-1, -2])).data)
        incoming = Incoming()
        while (some := incoming.receive(ours)) is not None:
            heard.extend(some)

    leave = Leave()
    before = signal.signal(signal.SIGTERM, leave)
    thread = threading.Thread(target=client)
    thread.start()
    try:
        with pytest.raises(Leaving):
            _Host(Interrupted(theirs), leave).serve()  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(leave.bell)
        theirs.close()
        thread.join(120)
        ours.close()
    assert [(one.kind, one.number) for one in heard] == [
        (frames.READY, 0),
        (frames.RESULT, 7),
        (frames.DIED, INNOCENT),
    ]


def test_a_host_that_is_not_serving_leaves_at_once() -> None:
    leave = Leave()
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(Leaving):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(leave.bell)


def test_a_result_is_never_taken_for_that_of_another_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sends a result twice is not believed any more; its chunks run elsewhere."""
    honest = Process.receive
    repeated: list[int] = []

    def twice(self: Process) -> list[Frame] | None:
        heard = honest(self)
        results = [frame for frame in heard or () if frame.kind == frames.RESULT]
        if results and not repeated:
            repeated.append(self.pid)
            return [*(heard or ()), results[-1]]
        return heard

    monkeypatch.setattr(Process, "receive", twice)
    found: dict[int, Any] = {}
    done = threading.Event()

    def report(work: Work, outcome: pool.Outcome) -> None:
        found[work.number] = (
            pickle.loads(outcome.body)[0] if isinstance(outcome, Result) else outcome
        )
        if len(found) == 3:
            done.set()

    workers = Pool(1)
    function = function_of(pickle.dumps(abs))
    works = [Work(function, pickle.dumps([-number]), report, ahead=True) for number in range(1, 4)]
    for work in works:
        workers.submit(work)
    assert done.wait(120)
    workers.close(finish=True)
    workers.join(120)
    assert repeated
    for number, work in enumerate(works, 1):
        outcome = found[work.number]
        # Blamed for its worker's end, or right: never another chunk's value.
        assert outcome == [number] or isinstance(outcome, pool.Died)
