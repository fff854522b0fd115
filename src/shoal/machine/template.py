"""A process that has loaded what others run, and forks them: a start without the imports.

A fork stands for `python -m MODULE WORD...` of this interpreter. Others see what an exec would have
made: its command line, environment, session, files and signals. Where a fork would not be the same
(a file of the loaded code has changed, a thread runs, the kernel does not let a process name its
own command line), the process executes the command instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from shoal.machine.leave import end_as

PR_SET_MM = 35
PR_SET_MM_MAP = 14
# What the kernel takes for PR_SET_MM_MAP: eleven addresses, the auxiliary vector, and a file.
MEMORY_MAP = struct.Struct("=11QQIi")
# Fields of /proc/self/stat, counted from the state: code, data, heap and stack.
START_CODE, END_CODE, START_STACK = 23, 24, 25
START_DATA, END_DATA, START_BRK = 42, 43, 44
TEMPLATE_ENV = "SHOAL_TEMPLATE"  # descriptor at which a controller asks for its agents
ORDER_BYTES_MAX = 64 * 1024
ANSWER_S = 5.0

Version = tuple[int, int, int]


class Becoming(BaseException):
    """Raised in a fork: its main program has to let go of all it was, and call `run`."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        kept: Sequence[int],
        files: Mapping[str, Version],
    ) -> None:
        super().__init__()
        self._words = list(words)
        self._env = dict(env)
        self._kept = kept
        self._files = files

    def run(self) -> NoReturn:
        """Run the module as the interpreter would, to the end of the process."""
        try:
            _close_all_but(self._kept)
            if not self._files or any(_version(path) != one for path, one in self._files.items()):
                self._execute()
            show_as(self._words, self._env)
        except OSError:
            self._execute()
        os.environ.clear()
        os.environ.update(self._env)
        import runpy

        sys.orig_argv = self._words
        sys.argv = ["-m", *self._words[3:]]
        end_as(lambda: runpy._run_module_as_main(self._words[2]))  # type: ignore[attr-defined]

    def _execute(self) -> NoReturn:
        for handle in self._kept:
            os.set_inheritable(handle, True)
        os.execve(self._words[0], self._words, self._env)


class Template:
    """Nothing in it may have started a thread or opened what a fork cannot share."""

    def __init__(self) -> None:
        self._files: dict[str, Version] = {}  # of the loaded code; without them, forks execute

    def load(self, modules: Iterable[str]) -> None:
        """A module that cannot be loaded is reported by the process that needs it."""
        gc.disable()
        try:
            for module in modules:
                importlib.import_module(module)
        except Exception:
            return
        finally:
            gc.freeze()  # memory shared with the forks stays shared
            gc.enable()
        if len(os.listdir("/proc/self/task")) == 1:
            self._files = _files()

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        kept: Sequence[int] = (),
        output: int | None = None,
    ) -> int:
        """The process of `words`, in a session of its own and with no other files than `kept` and
        the standard ones. OSError if there can be none now. Raises Becoming in that process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _forget_signals()
                os.setsid()
                if output is not None:
                    _write_to(output)
                raise Becoming(words, env, kept, self._files)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _files() -> dict[str, Version]:
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _version(path) for path in paths if path is not None and os.path.exists(path)}


def _version(path: str) -> Version:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _write_to(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, handle in enumerate((nothing, output, output)):
        os.dup2(handle, number)
    os.close(nothing)


def _close_all_but(kept: Sequence[int]) -> None:
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2 and handle not in kept:
            with contextlib.suppress(OSError):  # one was of the listing itself
                os.close(handle)


def show_as(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Let /proc show this command line and environment, as of a process that was started with them.
    OSError if the kernel does not take them."""
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    room = mmap.mmap(-1, len(line) + len(block), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(line + block)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))  # which keeps the room forever
    middle, end = begin + len(line), begin + len(line) + len(block)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    code, data = fields[START_CODE:START_STACK], fields[START_DATA:START_BRK]
    here = [*map(int, (*code, *data, fields[START_BRK])), libc.sbrk(0), int(fields[START_STACK])]
    layout = MEMORY_MAP.pack(*here, begin, middle, middle, end, 0, 0, -1)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({PR_SET_MM}): {os.strerror(number)}")
    ROOMS.append(room)


ROOMS: list[mmap.mmap] = []  # the kernel reads them for as long as the process lives


class Asking:
    """The end of a process that lets a template start others. A template that does not answer is
    not asked again: then whoever asked has to execute the command."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.settimeout(ANSWER_S)

    @classmethod
    def inherited(cls) -> Asking | None:
        descriptor = os.environ.pop(TEMPLATE_ENV, "")
        return cls(int(descriptor)) if descriptor else None

    def start(self, words: Sequence[str], env: Mapping[str, str], output: str) -> Forked | None:
        """None: it does not answer. OSError: it could not start it now."""
        order = {"words": list(words), "env": dict(env), "output": output}
        try:
            self._socket.send(json.dumps(order).encode())
            answer = json.loads(self._socket.recv(ORDER_BYTES_MAX) or b"{}")
        except (OSError, ValueError):
            answer = {}
        if not answer:
            self._socket.close()
            return None
        if "pid" not in answer:
            raise OSError(answer["errno"], answer["why"])
        return Forked(answer["pid"])


class Forked(NamedTuple):
    """A child of the template, which waits for it."""

    pid: int

    def poll(self) -> int | None:
        """None while it lives; its exit code is not known here."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None
