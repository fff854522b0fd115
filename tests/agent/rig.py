"""A real keeper and agent, with the test in the place of the controller."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from harness.waiting import WAIT_S

from shoal.link.sealing import seal
from shoal.link.wire import (
    CHECKPOINT_ROOT,
    PIECE_BYTES,
    Ask,
    Commands,
    FromAgent,
    Handed,
    Heard,
    Kept,
    Log,
    Need,
    Piece,
    ToAgent,
    Wants,
)
from shoal.model.commands import Command, Envelope, Launch, Stop
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import LogChunk, MemberExit, NodeReport, PackagePiece
from shoal.model.secret import SecretsOf

LENGTH = struct.Struct("!I")
# An agent waits for a warm interpreter's fork only while that is quicker than a cold start.
# On a busy machine that decides about nothing but the load.
# What starts a real one leaves two signals ignored that only the C library may name.
PATIENT = f"""
import ctypes, platform, struct, sys
rt_sigaction = {{"aarch64": 134, "x86_64": 13}}.get(platform.machine())
for signal in (32, 33) if rt_sigaction else ():
    ctypes.CDLL(None).syscall(rt_sigaction, signal, struct.pack("4Q", 1, 0, 0, 0), None, 8)
from shoal.agent.__main__ import main
from shoal.agent.warm import pool
pool.FORK_S_MAX = {WAIT_S}
sys.exit(main())
"""


# As on a machine for which join.c is not built.
WITHOUT_JOIN = """
import sys
from shoal.agent.confine import limits
limits.JOIN, limits.DYING = "", limits._dying()
from shoal.agent.__main__ import main
sys.exit(main())
"""


class Rig:
    def __init__(
        self,
        directory: Path,
        env: dict[str, str],
        user: int = 0,
        *,
        script: str = "",
        gpus: int = 0,
    ) -> None:
        self.directory = directory
        self._program = ("-c", script) if script else ("-m", "shoal.agent")
        self._prefix = []
        if user:  # who may read where Python is, if that is in root's home
            os.chown(directory, user, user)
            right = "+dac_read_search"
            self._prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            self._prefix += [f"--inh-caps={right}", f"--ambient-caps={right}"]
        spec = NodeSpec(id="n1", gpus=gpus, cpu_milli=16_000, memory_mb=4_000)
        (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
        self.log_path = directory / "agent.log"
        self._env = env
        self.keeper = self._start()
        self._decode = msgspec.msgpack.Decoder(FromAgent).decode
        self._buffer = b""
        self._number = 0
        self.report: NodeReport | None = None
        self.output: dict[MemberRef, bytes] = {}
        self.packages: dict[str, bytes] = {}
        self.needs: list[Need] = []
        self.secrets: dict[MemberRef, SecretsOf] = {}
        self.wants: list[MemberRef] = []
        self.pieces_left = 1_000_000  # so many are sent; the rest is left unanswered
        self._socket = self._connect()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                [*self._prefix, sys.executable, *self._program, str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, CHECKPOINT_ROOT: str(self.directory / "kept"), **self._env},
            )

    def agent_pid(self) -> int:
        return int(msgspec.json.decode((self.directory / "agent.json").read_bytes())["pid"])

    def restart(self, number: int = signal.SIGTERM) -> None:
        """Another life of the node."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.agent_pid(), number)
        self.keeper.wait(WAIT_S)
        self.report = None
        # What the last agent forked may hold its socket for a moment longer.
        (self.directory / "agent.sock").unlink(missing_ok=True)
        self.keeper = self._start()
        self.reconnect()
        self.until(lambda: self.report is not None)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + WAIT_S
        while True:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.connect(str(self.directory / "agent.sock"))
            except OSError:
                link.close()
                assert self.keeper.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.02)
                continue
            return link

    def log(self) -> str:
        return self.log_path.read_text()

    def send(self, message: ToAgent) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def order(self, *commands: Command) -> None:
        self._number += 1
        self.send(Commands(Envelope(1, self._number, commands)))

    def launch(
        self,
        ref: MemberRef,
        *argv: str,
        env: dict[str, str] | None = None,
        workdir: str = "",
        package: str = "",
        requirements: str = "",
        secrets: tuple[str, ...] = (),
        uid: int = 0,
        **more: Any,
    ) -> None:
        assert self.report is not None or self.until(lambda: self.report is not None)
        if "image" in more:  # its registry may want a password
            self.secrets.setdefault(ref, SecretsOf(ref))
        self.order(
            Launch(
                node="n1",
                incarnation=self._incarnation(),
                ref=ref,
                argv=argv,
                env=env or {},
                workdir=workdir,
                stop_grace_ms=1_000,
                package=package,
                requirements=requirements,
                secrets=secrets,
                uid=uid,
                **more,
            )
        )

    def stop(self, ref: MemberRef, *, grace_ms: int = 1_000, dump: bool = False) -> None:
        incarnation = self._incarnation()
        why = "a test wants it"
        self.order(
            Stop(node="n1", incarnation=incarnation, ref=ref, grace_ms=grace_ms, why=why, dump=dump)
        )

    def _incarnation(self) -> int:
        assert self.report is not None
        return self.report.incarnation

    def until(self, condition: Callable[[], bool], wait_s: float = WAIT_S) -> bool:
        """Hear what the agent says until it is so."""
        deadline = time.monotonic() + wait_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not so after {wait_s} s\n{self.report}\n{self.output}\n{self.log()}"
            self._socket.settimeout(min(left, 0.1))
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            assert data, f"the agent is gone\n{self.log()}"
            self._buffer += data
            self._take()
        return True

    def _take(self) -> None:
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = self._decode(self._buffer[LENGTH.size : end])
            self._buffer = self._buffer[end:]
            match message:
                case Heard(report):
                    self.report = report
                case Log(chunk):
                    self._keep(chunk)
                case Need():
                    self._give(message)
                case Wants(wanted):
                    self.wants.append(wanted.ref)
                    if wanted.ref in self.secrets:
                        sealed = seal(self.secrets[wanted.ref], wanted.public)
                        assert sealed is not None
                        self.send(Handed(sealed))

    def _keep(self, chunk: LogChunk) -> None:
        kept = self.output.setdefault(chunk.ref, b"")
        if chunk.offset - chunk.dropped == len(kept):
            self.output[chunk.ref] = kept + bytes(chunk.dropped) + chunk.data
        self.send(Kept(chunk.ref, len(self.output[chunk.ref])))

    def _give(self, need: Need) -> None:
        self.needs.append(need)
        data = self.packages.get(need.package)
        if self.pieces_left <= 0:
            return
        self.pieces_left -= 1
        if data is None:
            problem = "there is no such package"
            self.send(Piece(PackagePiece(need.package, need.offset, problem=problem)))
            return
        part = data[need.offset : need.offset + PIECE_BYTES]
        self.send(Piece(PackagePiece(need.package, need.offset, part, len(data))))

    def hang_up(self) -> None:
        """As when a controller died and no other is there."""
        self._socket.close()

    def wait(self, condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        """Until it is so, without listening to the agent."""
        deadline = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def reconnect(self) -> None:
        """As when a controller died and another took over."""
        self._socket.close()
        self._buffer = b""
        self._socket = self._connect()

    def ask(self) -> NodeReport:
        """A report made after now."""
        assert self.report is not None or self.until(lambda: self.report is not None)
        assert self.report is not None
        before = self.report.sequence
        self.send(Ask())
        assert self.until(lambda: self.report is not None and self.report.sequence > before)
        return self.report

    def exit(self, ref: MemberRef, wait_s: float = WAIT_S) -> MemberExit:
        def found() -> list[MemberExit]:
            exits = self.report.exits if self.report is not None else ()
            return [one for one in exits if one.ref == ref]

        self.until(lambda: bool(found()), wait_s)
        return found()[0]

    def text(self, ref: MemberRef) -> str:
        return self.output.get(ref, b"").decode()

    def says(self, ref: MemberRef, words: str, wait_s: float = WAIT_S) -> bool:
        return self.until(lambda: words in self.text(ref), wait_s)

    def logs(self, words: str, wait_s: float = WAIT_S) -> bool:
        return self.until(lambda: words in self.log(), wait_s)

    def end(self) -> None:
        self._socket.close()
        self.keeper.send_signal(signal.SIGTERM)
        self.keeper.wait(WAIT_S)


@contextmanager
def rig(**env: str) -> Iterator[Rig]:
    """A node that comes up and goes down; nothing of it may stay."""
    with rig_of(0, env) as made:
        yield made


@contextmanager
def patient_rig(**env: str) -> Iterator[Rig]:
    """A node that waits for its warm interpreters, however busy the machine is."""
    with rig_of(0, env, script=PATIENT) as made:
        yield made


@contextmanager
def rig_of(
    user: int,
    env: dict[str, str],
    *,
    script: str = "",
    below: str | None = None,
    gpus: int = 0,
) -> Iterator[Rig]:
    """As another user; 0: as this one."""
    path = Path(tempfile.mkdtemp(prefix="shoal-agent-", dir=below))
    made = None
    try:
        made = Rig(path, env, user, script=script, gpus=gpus)
        made.until(lambda: made is not None and made.report is not None)
        yield made
    finally:
        if made is not None:
            made.end()
        left = marked(path)
        shutil.rmtree(path, ignore_errors=True)
    assert not left, f"processes were left behind: {left}"


def marked(path: Path) -> list[int]:
    """Processes that carry the node's mark in their environment."""
    needle = b"SHOAL_NODE_DIR=" + os.fsencode(path) + b"\0"
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if needle in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found
