"""The user's own terminal and pipes, joined to a process on a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shoal.client import Client
from shoal.model.session import Kind
from shoal.sessions.session import Session
from shoal.sessions.streams import PIECE_BYTES, Ended, Resize, Signal, Stream

LOST_CODE = 255
PIPE_CLOSED = 141  # 128 + SIGPIPE
INTERRUPTS_MAX = 3  # after so many, the client goes without waiting for the process
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM")
INPUT, OUTPUT, ERROR = 0, 1, 2


class Outcome:
    """`code` is the process's; `why` says why there is none, or that the user has detached."""

    def __init__(self, code: int, why: str = "", detached: bool = False) -> None:
        self.code, self.why, self.detached = code, why, detached


def converse(
    client: Client,
    kind: Kind,
    target: tuple[str, int],
    command: tuple[str, ...] = (),
    *,
    interactive: bool,
    terminal: bool,
    tell: Callable[[str], None],
) -> Outcome:
    """Runs until the process on the node has ended, or the user detaches from it. `tell` gets a
    line if the job has to be woken first."""
    size = shutil.get_terminal_size()
    wanted: dict[str, Any] = {"command": command}
    if terminal:
        kind_of_terminal = os.environ.get("TERM", "") or "xterm"
        wanted |= {"terminal": kind_of_terminal, "rows": size.lines, "columns": size.columns}
    session = Session(client, kind, tell=tell, **wanted)
    try:
        session.begin(*target)
        keys = Keys() if kind is Kind.ATTACH and interactive else None
        local = terminal and os.isatty(INPUT)
        with _raw(local), _signals(session, raw=local):
            return _join(session, interactive, keys)
    finally:
        session.close()


def relay(
    client: Client, target: tuple[str, int], tell: Callable[[str], None], **wanted: Any
) -> int:
    """Bytes between our input and output and an SSH server on the node."""
    session = Session(client, Kind.SSH, tell=tell, **wanted)
    try:
        session.begin(*target)
        outcome = _join(session, True, None)
        return outcome.code if outcome.why else 0
    finally:
        session.close()


def _join(session: Session, interactive: bool, keys: Keys | None) -> Outcome:
    first = session.fixed[0]
    gone, unread = threading.Event(), threading.Event()
    ways = zip(session.fixed, (OUTPUT, ERROR), strict=False)
    outputs = [_thread(_write, session, stream, number, unread) for stream, number in ways]
    if interactive:
        _thread(_read, session, first, keys, gone)
    else:
        session.loop.call_soon_threadsafe(first.end)
    for output in outputs:
        while output.is_alive() and not gone.is_set():
            output.join(0.1)
    if gone.is_set():
        return Outcome(0, "detached", detached=True)
    if unread.is_set():
        return Outcome(PIPE_CLOSED)
    session.over.wait()
    ended = session.ended or Ended(code=LOST_CODE, why="the connection was lost")
    return Outcome(ended.code, ended.why)


def _thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    made = threading.Thread(target=work, args=args, daemon=True)
    made.start()
    return made


def _write(session: Session, stream: Stream, number: int, unread: threading.Event) -> None:
    with contextlib.suppress(ConnectionResetError):
        while data := _ask(session, stream.read()):
            try:
                while data:
                    data = data[os.write(number, data) :]
            except OSError:  # nobody reads what we write
                unread.set()
                session.loop.call_soon_threadsafe(stream.reset)
                return


def _read(session: Session, stream: Stream, keys: Keys | None, gone: threading.Event) -> None:
    try:
        while data := os.read(INPUT, PIECE_BYTES):
            data = keys.take(data) if keys is not None else data
            if data:
                _ask(session, stream.write(data))
    except Detached:
        gone.set()
        return
    except (OSError, RuntimeError):
        return
    with contextlib.suppress(RuntimeError):
        session.loop.call_soon_threadsafe(stream.end)


def _ask(session: Session, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, session.loop).result()


@contextlib.contextmanager
def _raw(wanted: bool) -> Iterator[None]:
    """Every key goes to the other side. The terminal is as before afterwards, whatever happens."""
    if not wanted:
        yield
        return
    before = termios.tcgetattr(INPUT)
    try:
        tty.setraw(INPUT, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(INPUT, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals(session: Session, *, raw: bool) -> Iterator[None]:
    """Signals go to the process on the node. With a terminal, keys do that."""
    asked = 0

    def say(word: Resize | Signal) -> None:
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(session.streams.say, word)

    def resized(_number: int, _frame: FrameType | None) -> None:
        size = shutil.get_terminal_size()
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(INPUT)
            size = os.terminal_size((columns, rows))
        say(Resize(size.lines, size.columns))

    def passed_on(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if raw or asked >= INTERRUPTS_MAX:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        say(Signal(number))

    before: dict[int, Any] = {signal.SIGWINCH: signal.signal(signal.SIGWINCH, resized)}
    for name in PASSED_ON:
        number = getattr(signal, name)
        before[number] = signal.signal(number, passed_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()


# How a user detaches from a terminal: Ctrl-P Ctrl-Q, or ~. at the start of a line.


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
