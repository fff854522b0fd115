"""Real gangs for the tests of `shoal.train`: processes with the torchrun environment, over gloo."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from harness.ports import free_port

from shoal.model.progress import Beat

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
END_S = 500.0


class Ended(msgspec.Struct, frozen=True):
    """What is left of a member."""

    code: int
    out: str
    err: str


class Zygote:
    """The process that members are forked from."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line = ours
        self._line.settimeout(END_S)
        handle = theirs.fileno()
        command = [sys.executable, str(Path(__file__).parent / "zygote.py"), str(handle)]
        self._process = subprocess.Popen(command, pass_fds=[handle], env=clean_environment())
        theirs.close()

    def preload(self, *modules: str) -> None:
        """Imports what only some members use, once for all that follow."""
        self._line.send(json.dumps({"preload": modules}).encode())
        self._line.recv(1024)

    def fork(self, argv: Sequence[str], env: Mapping[str, str], out: int, err: int) -> int:
        request = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
        socket.send_fds(self._line, [request], [out, err])
        return int(json.loads(self._line.recv(1024)))

    def code(self, pid: int) -> int:
        """Waits for a member to end."""
        self._line.send(json.dumps({"wait": pid}).encode())
        return int(json.loads(self._line.recv(1024)))

    def close(self) -> None:
        self._line.close()
        self._process.wait(timeout=END_S)


class Member:
    """One process: its output is read as it comes, its end is waited for."""

    def __init__(self, zygote: Zygote, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._zygote = zygote
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        self.pid = zygote.fork(argv, env, out_write, err_write)
        os.close(out_write)
        os.close(err_write)
        self.out = os.fdopen(out, encoding="utf-8", errors="replace")
        self._err_text = ""
        self._err = threading.Thread(target=self._read_errors, args=(err,), daemon=True)
        self._err.start()
        self._ended: Ended | None = None

    def _read_errors(self, handle: int) -> None:
        with os.fdopen(handle, encoding="utf-8", errors="replace") as stream:
            self._err_text = stream.read()

    def signal(self, number: int) -> None:
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> Ended:
        if self._ended is None:
            killer = threading.Timer(END_S, self.signal, (signal.SIGKILL,))
            killer.start()
            out = self.out.read()
            self._err.join()
            self._ended = Ended(self._zygote.code(self.pid), out, self._err_text)
            killer.cancel()
            self.out.close()
        return self._ended


class Gang:
    """Members of one attempt, on one machine. A context: nothing of it outlives the test."""

    def __init__(
        self,
        script: str,
        *arguments: object,
        world: int = 2,
        env: Mapping[str, str] | None = None,
        each: Sequence[Mapping[str, str]] = (),
    ) -> None:
        port = str(free_port())
        argv = [str(SCRIPTS / script), *(str(argument) for argument in arguments)]
        self.members: list[Member] = []
        for rank in range(max(1, world)):
            member_env = clean_environment()
            if world:  # 0: one process, without the environment of torchrun
                member_env |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            member_env |= dict(env or {}) | dict(each[rank] if each else {})
            self.members.append(Member(zygote(), argv, member_env))

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.signal(signal.SIGKILL)
        for member in self.members:
            member.end()

    def signal(self, number: int) -> None:
        for member in self.members:
            member.signal(number)

    def read_until(self, beginning: str, rank: int = 0) -> str:
        """Reads a member's output up to a line that begins so, and returns that line."""
        for line in self.members[rank].out:
            if line.startswith(beginning):
                return line.strip()
        raise AssertionError(f"no {beginning!r}: {self.members[rank].end().err}")

    def end(self) -> list[Ended]:
        return [member.end() for member in self.members]

    def succeed(self) -> list[Ended]:
        ended = self.end()
        assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.err for one in ended)
        return ended


@functools.cache
def zygote() -> Zygote:
    made = Zygote()
    atexit.register(made.close)
    return made


class Listener:
    """Stands in for an agent: hears the beats of members, as they come (a socket holds few)."""

    def __init__(self, name: str) -> None:
        self.name = f"shoal-test-{os.getpid()}-{name}"
        self._beats: list[Beat] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name)
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def env(self, ref: str) -> dict[str, str]:
        return {"SHOAL_BEATS": self.name, "SHOAL_REF": ref}

    def listen(self) -> None:
        self._thread.start()

    def _listen(self) -> None:
        while data := self._socket.recv(65536):
            self._beats.append(msgspec.msgpack.decode(data, type=Beat))

    def heard(self) -> dict[str, list[Beat]]:
        """All there were, by member. An empty datagram is the end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", "\0" + self.name)
        self._thread.join(END_S)
        members: dict[str, list[Beat]] = {}
        for beat in self._beats:
            members.setdefault(beat.ref, []).append(beat)
        return members

    def close(self) -> None:
        self._socket.close()


def clean_environment() -> dict[str, str]:
    """Ours, without what a cluster around the tests would have set."""
    left_out = ("SHOAL_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
    # Two small processes on few cores: threads of each would only be in each other's way.
    return env | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1] if lines else ""
