"""One end of a gang's encrypted network: an interface of WireGuard on this node.

A process of its own for each attempt and node, run by the agent as `python -m
shoal.agent.tunnel.end`. It reads lines of JSON: what is wanted, then the other ends, each time that
they change. It prints its public key and port, then whether it is up. The private key is made here
and given to nobody but `wg`. When its input ends, so does the interface; what a kill leaves behind
is removed by name when the agent starts again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.machine.files import TUNNELS

IP_MTU, IPV6_MTU = 14, 24
OVERHEAD_BYTES = 80  # of WireGuard over IPv6
MTU_MIN, MTU_MAX = 1280, 8920  # the least that IPv6 allows; Ethernet's large frames
COMMAND_S = 10.0
UP_S = 10.0
LINE_BYTES_MAX = 1 << 20
PORT_TRIES = 20
TABLES_FROM = 0x5300_0000  # of routes; no other program counts from there
FIRST, THEN = "1420", "1421"  # rules: who may use the network, and that nobody else does
HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")
PR_SET_PDEATHSIG = 1
SOCKETS = Path("/var/run/wireguard")  # where a program that is WireGuard is asked


class Problem(Exception):
    """In words that follow "cannot encrypt its network: "."""


def name_of(node: Path, job: str, attempt: int) -> str:
    """Nodes may share a machine, so the node is in it. 14 characters of 15."""
    about = f"{node}\0{job}\0{attempt}".encode()
    return f"sw{hashlib.blake2b(about, digest_size=6).hexdigest()}"


class End:
    """`uid`: the tenant's user, who alone may use it beside root; 0: it is for everybody."""

    def __init__(self, name: str, note: str, uid: int = 0, ports: tuple[int, int] = (0, 0)) -> None:
        self.name, self.note, self.uid = name, Path(note), uid
        self.table = str(TABLES_FROM + int(hashlib.blake2b(name.encode()).hexdigest()[:5], 16))
        self.port = 0
        self.network = ""
        self.program: subprocess.Popen[bytes] | None = None
        self._ports = ports
        self._private = ""

    def make(self) -> str:
        """Returns its public key."""
        self._remember()
        if not _try("ip", "link", "add", self.name, "type", "wireguard"):
            self._run_program()
        self._private = _run("wg", "genkey").strip()
        self.port = _free_port(*self._ports)
        return _run("wg", "pubkey", text=self._private).strip()

    def _run_program(self) -> None:
        if not shutil.which("wireguard-go"):
            raise Problem("this kernel loads no WireGuard, and wireguard-go is not installed")
        self.program = subprocess.Popen(
            ("wireguard-go", "--foreground", self.name),
            env={**os.environ, "LOG_LEVEL": "error", "WG_PROCESS_FOREGROUND": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        deadline = time.monotonic() + UP_S
        while not _answers(SOCKETS / f"{self.name}.sock"):
            if self.program.poll() is not None or time.monotonic() > deadline:
                raise Problem("wireguard-go does not start on this node")
            time.sleep(0.02)

    def connect(self, tunnel: dict[str, Any], own: str) -> None:
        """To all ends but our own. The first time, it also gets its address and its routes."""
        ends = {one["node"]: one for one in tunnel["ends"]}
        others = [one for name, one in ends.items() if name != own]
        _run("wg", "syncconf", self.name, "/dev/stdin", text="".join(self._lines(others)))
        if self.network:
            return
        self.network, address = tunnel["network"], ends[own]["address"]
        self._remember()
        with contextlib.suppress(OSError):  # no address that nobody asked for
            Path(f"/proc/sys/net/ipv6/conf/{self.name}/disable_ipv6").write_text("0")
        _try("ip", "link", "set", self.name, "addrgenmode", "none")
        _run("ip", "link", "set", self.name, "mtu", str(_mtu(others)), "up")
        _run("ip", "-6", "address", "add", f"{address}/128", "dev", self.name, "nodad")
        route = (self.network, "dev", self.name, "src", address, "table", self.table)
        _run("ip", "-6", "route", "add", *route)
        for rule in self._rules():  # another node of this machine may have made the last one
            if not _try("ip", "-6", "rule", "add", *rule) and "unreachable" not in rule:
                raise Problem("no rule for its routes can be made on this node")
        if _run("wg", "show", self.name, "listen-port").strip() != str(self.port):
            raise Problem(f"UDP port {self.port} of this node is taken")

    def _lines(self, others: list[dict[str, Any]]) -> Iterator[str]:
        yield f"[Interface]\nPrivateKey = {self._private}\nListenPort = {self.port}\n"
        for one in others:
            host, public, address = one["host"], one["public"], one["address"]
            if not HOST.fullmatch(host):
                raise Problem(f"{one['node']} has no address")
            host = f"[{host}]" if ":" in host else host
            yield f"[Peer]\nPublicKey = {public}\nAllowedIPs = {address}/128\n"
            yield f"Endpoint = {host}:{one['port']}\n"

    def _rules(self) -> Iterator[tuple[str, ...]]:
        """Root answers for the kernel, too: refusals, and the ends of connections."""
        to = ("to", self.network)
        for user in (self.uid, 0) if self.uid else ():
            yield ("pref", FIRST, *to, "uidrange", f"{user}-{user}", "lookup", self.table)
        if not self.uid:
            yield ("pref", FIRST, *to, "lookup", self.table)
        yield ("pref", THEN, *to, "unreachable")

    def remove(self) -> None:
        """All of it, also if it was made by a process that is gone."""
        if self.program is not None:
            self.program.kill()
            self.program.wait()
        _try("ip", "link", "delete", self.name)
        for rule in self._rules() if self.network else ():
            _try("ip", "-6", "rule", "delete", *rule)
        self.note.unlink(missing_ok=True)

    def _remember(self) -> None:
        self.note.parent.mkdir(mode=0o700, exist_ok=True)
        self.note.write_text(json.dumps({"uid": self.uid, "network": self.network}))


def clear(node: Path) -> int:
    """Remove what an earlier life of the agent left. Returns how many interfaces that were."""
    notes = sorted((node / TUNNELS).iterdir())
    for note in notes:
        said: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(note.read_text())
        end = End(note.name, str(note), int(said.get("uid", 0)))
        end.network = str(said.get("network", ""))
        end.remove()
    return len(notes)


def main() -> int:
    heard = Lines(0)
    wanted = json.loads(next(heard))
    own = wanted.pop("own")
    end = End(**wanted)
    try:
        say(public=end.make(), port=end.port)
        heard.program = end.program
        for line in heard:
            end.connect(json.loads(line), own)
            say(up=True)
    except (Problem, OSError) as problem:
        say(problem=str(problem))
    finally:
        end.remove()
    return 0


def say(**what: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)


class Lines:
    """Those of a pipe, until its other side is closed. A Problem if `program` ends before."""

    def __init__(self, handle: int) -> None:
        self.program: subprocess.Popen[bytes] | None = None
        self._handle = handle
        self._kept = b""

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        while b"\n" not in self._kept:
            self._wait()
            data = os.read(self._handle, LINE_BYTES_MAX)
            if not data or len(self._kept) > LINE_BYTES_MAX:
                raise StopIteration
            self._kept += data
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode()

    def _wait(self) -> None:
        if self.program is None:
            return
        process = os.pidfd_open(self.program.pid)
        try:
            ready, _, _ = select.select([self._handle, process], [], [])
        finally:
            os.close(process)
        if process in ready:
            raise Problem("wireguard-go has ended on this node")


def _free_port(first: int, past: int) -> int:
    for _ in range(PORT_TRIES):
        port = first + secrets.randbelow(past - first) if first < past else 0
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise Problem("no UDP port is free on this node")


def _mtu(others: list[dict[str, Any]]) -> int:
    """What fits through the way to each of them."""
    least = MTU_MAX
    for one in others:
        with contextlib.suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(
                one["host"], one["port"], type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                version6 = family == socket.AF_INET6
                level = socket.IPPROTO_IPV6 if version6 else socket.IPPROTO_IP
                mtu = probe.getsockopt(level, IPV6_MTU if version6 else IP_MTU)
                least = min(least, mtu - OVERHEAD_BYTES)
    return max(MTU_MIN, least)


def _answers(path: Path) -> bool:
    """`wg` would remove a socket that exists and does not listen yet."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _try(*words: str) -> bool:
    with contextlib.suppress(Problem):
        _run(*words)
        return True
    return False


def _run(*words: str, text: str = "") -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Problem(f"{words[0]}: {error}") from None
    if done.returncode:
        raise Problem(f"{' '.join(words[:4])}: {done.stderr.strip()[-200:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
