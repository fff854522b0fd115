"""A worker process: runs chunks of tasks, one after another, until its client is gone."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from shoal.machine.kernel import die_with_parent
from shoal.tasks import frames
from shoal.tasks.errors import portable
from shoal.tasks.frames import Frame, Reader, parcel, send
from shoal.tasks.functions import offer_main

WORKER_MARK = "SHOAL_TASKS_WORKER"  # set in the environment of workers and their children
CURSOR_BYTES = 8
# A chunk that takes longer is handed back unfinished. Its duration is only estimated from earlier
# tasks, and a wrong estimate must not keep many tasks at one worker.
CHUNK_S_MAX = 0.3
NOT_BEGUN = -1

Function = Callable[[Any], Any]

_context: Any = None


def context() -> Any:
    """What `init` returned in this worker; None outside of workers."""
    return _context


def main(arguments: list[str]) -> None:
    """The worker's entry point. Arguments: socket, cursor, the client's process id."""
    descriptor, cursor_descriptor, client = map(int, arguments)
    if sys.platform == "linux":  # elsewhere it ends when its socket is closed
        die_with_parent()
    if os.getppid() != client:
        os._exit(1)
    # Ctrl-C reaches every process at the terminal; the client decides what it means. A handler
    # instead of SIG_IGN, because programs that a task starts would inherit the latter.
    signal.signal(signal.SIGINT, lambda *_: None)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    os.set_inheritable(descriptor, False)
    shared = mmap.mmap(cursor_descriptor, CURSOR_BYTES)
    os.close(cursor_descriptor)
    with contextlib.suppress(ConnectionError):  # the client is gone
        Worker(connection, memoryview(shared).cast("q")).serve()


class Worker:
    def __init__(self, connection: socket.socket, cursor: memoryview[int]) -> None:
        self._connection = connection
        self._cursor = cursor
        self._reader = Reader()
        self._sources: dict[int, bytes] = {}
        self._functions: dict[int, Function] = {}

    def serve(self) -> None:
        while (arrived := self._reader.receive(self._connection)) is not None:
            for frame in arrived:
                if not self._handle(frame):
                    return

    def _handle(self, frame: Frame) -> bool:
        match frame.kind:
            case frames.HELLO:
                return self._begin(frame)
            case frames.FUNCTION:
                self._sources[frame.number] = bytes(frame.body)
            case frames.FORGET:
                self._sources.pop(frame.number, None)
                self._functions.pop(frame.number, None)
            case frames.CHUNK:
                self._run(frame)
        return True

    def _begin(self, frame: Frame) -> bool:
        global _context
        path, script, init = pickle.loads(frame.body)
        sys.path[:] = path
        offer_main(script)
        try:
            if init is not None:
                _context = pickle.loads(init)()
        except BaseException as error:
            body = pickle.dumps(portable(error))
            send(self._connection, parcel(frames.INIT_FAILED, body=body))
            return False
        send(self._connection, parcel(frames.READY))
        return True

    def _run(self, frame: Frame) -> None:
        try:
            function = self._function(frame.extra)
        except BaseException as error:
            body = pickle.dumps(portable(error))
            send(self._connection, parcel(frames.UNLOADABLE, frame.number, body=body))
            return
        try:
            items = pickle.loads(frame.body)
        except BaseException as error:  # the chunk does not load, so not even its length is known
            body = pickle.dumps(portable(error))
            send(self._connection, parcel(frames.UNLOADABLE, frame.number, body=body))
            return
        began = time.perf_counter()
        values, errors = run(function, items, self._cursor)
        took_us = int((time.perf_counter() - began) * 1e6)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        send(self._connection, _result(frame.number, took_us, values, errors))
        self._cursor[0] = NOT_BEGUN  # the next chunk may have arrived, but has not begun

    def _function(self, number: int) -> Function:
        function = self._functions.get(number)
        if function is None:
            function = self._functions[number] = pickle.loads(self._sources[number])
        return function


Failure = tuple[int, bytes, str]  # position in the chunk, exception, traceback


def run(
    function: Function, items: list[Any], cursor: memoryview[int]
) -> tuple[list[Any], list[Failure]]:
    """The results of a chunk, or of its first part when time is up, with None for failed tasks. If
    this process dies, the cursor shows the client the current task."""
    values: list[Any] = []
    errors: list[Failure] = []
    position, numbered, add, clock = 0, enumerate(items), values.append, time.perf_counter
    until = clock() + CHUNK_S_MAX
    while True:
        try:
            for position, item in numbered:
                cursor[0] = position
                add(function(item))
                if clock() > until:
                    break
            return values, errors
        except BaseException as error:  # also SystemExit: a task must not end its worker
            errors.append((position, *portable(error)))
            add(None)
            if clock() > until:
                return values, errors


def _result(number: int, took_us: int, values: list[Any], errors: list[Failure]) -> frames.Parcel:
    try:
        return parcel(frames.RESULT, number, took_us, _dump((values, errors)))
    except Exception:
        body = _dump(_each_alone(values, errors))
        return parcel(frames.RESULT, number, took_us, body)


def _dump(value: Any) -> bytes:
    """Values of the client's script came here by value, and go back the same way."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        data: bytes = cloudpickle.dumps(value)
        return data


def _each_alone(values: list[Any], errors: list[Failure]) -> tuple[list[Any], list[Failure]]:
    """One result that cannot be sent must not lose the others."""
    failed = {failure[0] for failure in errors}
    kept: list[Any] = []
    for position, value in enumerate(values):
        try:
            if position not in failed:
                _dump(value)
            kept.append(value)
        except Exception as error:
            kept.append(None)
            what = TypeError(f"the result, a {type(value).__name__}, cannot be sent: {error}")
            errors.append((position, *portable(what)))
    return kept, errors


def call(item: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    """The function of an Executor's tasks, each of which brings its own."""
    function, arguments, keywords = item
    return function(*arguments, **keywords)


def apply(function: Callable[..., Any], item: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The same for a function that was sent before."""
    arguments, keywords = item
    return function(*arguments, **keywords)
