"""Runs in each member of a job with `launcher`: the command in member 0, and its processes in the
others. It is copied to where the member is, so it uses nothing but Python's standard library.

Member 0 is the leader. The others listen on a port, and say which to the leader at the gang's
meeting point. Each then gets a connection from the leader, and ends with it. The command finds an
`ssh` in front of its PATH that starts processes in the members instead of on the machines; `rsh`
and `pdsh` are the same. All prove to each other that they know the key of the attempt. Nothing is
encrypted: it is as private as the network between the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from shoal.agent.launch.ways import (
    HANDSHAKE_S,
    KEY,
    PIECE_BYTES,
    PLAN,
    Wrong,
    address_of,
    answer,
    ask,
    listen,
    receive,
    send,
    shell,
    shell_code,
    write,
)

SCRATCH, HOSTFILE = "SHOAL_SCRATCH", "SHOAL_HOSTFILE"
WAYS = ("ssh", "rsh", "pdsh")  # programs with which launchers start processes on other hosts
PAUSE_S = (0.1, 2.0)  # between attempts to reach the leader: the first and the longest
REMIND_S = 60.0  # how often the leader says whom it waits for
STARTS_MAX = 256  # at a time, in one member
DRAIN_S = 1.0  # for output after the end of a command; a process in the background may hold it
END_S = 5.0  # from SIGTERM to SIGKILL for a command whose starter is gone
WRONG = 255  # the exit code of ssh when it cannot do what it is asked for

Plan = dict[str, Any]  # the key, where the other hosts' members listen, and the name of our own


def main(arguments: list[str]) -> int:
    from shoal.agent.launch.ways import pdsh, ssh

    way, rest = arguments[0], arguments[1:]
    try:
        if way in ("--ssh", "--rsh"):
            return ssh(way[2:], rest)
        return pdsh(rest) if way == "--pdsh" else run(arguments)
    except Wrong as error:
        print(f"shoal: {error}", file=sys.stderr)
        return WRONG


def run(command: list[str]) -> int:
    member, members = int(os.environ["SHOAL_MEMBER"]), int(os.environ["SHOAL_MEMBERS"])
    key = os.environ.pop(KEY, "").encode()
    if not key:
        raise Wrong(f"{KEY} is missing")
    plan: Plan = {"key": key.decode(), "hosts": {}, "own": own_host(member)}
    folder = os.path.join(os.environ[SCRATCH], ".launch")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name in WAYS:
        write(os.path.join(folder, "bin", name), shim(name), 0o700)
    os.environ[PLAN] = os.path.join(folder, "plan.json")
    os.environ.update(settings(folder))
    if member:
        return Follower(member, key, plan).wait()
    if members > 1:
        return lead(command, key, plan, members)
    write(os.environ[PLAN], json.dumps(plan), 0o600)
    return call(command)


def hosts() -> list[str]:
    listed = [word for word in os.environ.get("SHOAL_HOSTS", "").split(",") if word]
    return [word.rpartition(":")[0] for word in listed]


def own_host(member: int) -> str:
    """One member on each node, in the order of the members. A large gang's list is known to member
    0 only, which tells the others."""
    known = hosts()
    return known[member] if member < len(known) else ""


def settings(folder: str) -> dict[str, str]:
    """So that `mpirun PROGRAM` alone uses all hosts. What the job has set stays as it is. A job
    that runs as root does so because its cluster does; mpirun would refuse that."""
    path = os.environ.get("PATH", os.defpath)
    listed = os.environ.get(HOSTFILE, "")
    found = {
        "OMPI_MCA_orte_default_hostfile": listed,
        "PRTE_MCA_prte_default_hostfile": listed,
        "HYDRA_HOST_FILE": f"{listed}.hydra",
        "I_MPI_HYDRA_HOST_FILE": f"{listed}.hydra",
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
    }
    if any(not is_address(host) for host in hosts()):
        # Nodes that share a machine: two of Open MPI's daemons would use the same files in memory.
        found["OMPI_MCA_btl"] = "^vader,sm"
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            found[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            found[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    kept = {name: value for name, value in found.items() if name not in os.environ}
    return {**kept, "PATH": f"{folder}/bin:{path}"}


def is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def shim(name: str) -> str:
    words = " ".join(f"'{word}'" for word in (sys.executable, "-I", "-S", sys.argv[0], f"--{name}"))
    return f'#!/bin/sh\nexec {words} "$@"\n'


def call(command: list[str]) -> int:
    """Runs it in our own process group, which gets the signals that end the member."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    return shell_code(process.wait())


def lead(command: list[str], key: bytes, plan: Plan, members: int) -> int:
    known = hosts()
    places = gather(key, members)
    for member, place in places.items():
        plan["hosts"][known[member]] = place
    write(os.environ[PLAN], json.dumps(plan), 0o600)
    links = []
    for member, place in places.items():
        link = socket.create_connection(tuple(place), timeout=HANDSHAKE_S)
        table = {host: at for host, at in plan["hosts"].items() if host != known[member]}
        ask(link, key, {"do": "follow", "hosts": table, "own": known[member]})
        links.append(link)
    code = call(command)
    for link in links:
        with contextlib.suppress(OSError):
            send(link, b"D")  # the command has ended by itself
            link.close()
    return code


def gather(key: bytes, members: int) -> dict[int, list[Any]]:
    """Where the others listen. Shoal starts all of them or ends the job, so this waits for as long
    as it takes."""
    places: dict[int, list[Any]] = {}
    remind_at = time.monotonic() + REMIND_S
    with listen(int(os.environ["MASTER_PORT"])) as server:
        server.settimeout(1.0)
        while len(places) < members - 1:
            try:
                link, _ = server.accept()
                with link:
                    about = answer(link, key)
                    places[int(about["member"])] = [address_of(link), int(about["port"])]
                    link.settimeout(HANDSHAKE_S)
                    link.recv(1)  # the other end closes first, so that the port is free again
            except (OSError, Wrong, ValueError, KeyError):
                pass  # a stranger, or one that will come again
            if time.monotonic() > remind_at:
                missing = [str(n) for n in range(1, members) if n not in places]
                line = f"waiting for {len(missing)} members: {', '.join(missing[:8])}"
                print(f"shoal: {line}", file=sys.stderr)
                remind_at += REMIND_S
    return places


class Follower:
    """Waits for starts, until the leader has ended."""

    def __init__(self, member: int, key: bytes, plan: Plan) -> None:
        self._member, self._key, self._plan = member, key, plan
        self._server = listen(0)
        self._groups: set[int] = set()  # of processes that were started here
        self._places = threading.Semaphore(STARTS_MAX)
        self._code: list[int] = []
        self._over = threading.Event()

    def wait(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self._end(128 + signal.SIGTERM, signal.SIGTERM))
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._announce, daemon=True).start()
        while not self._over.wait(1.0):
            pass  # a wait without a limit would keep signals away
        deadline = time.monotonic() + END_S
        while self._groups and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._code[0]

    def _end(self, code: int, number: int = 0) -> None:
        """The agent ends whatever is left when we are gone."""
        for group in list(self._groups) if number else ():
            with contextlib.suppress(OSError):
                os.killpg(group, number)
        self._code.append(code)
        self._over.set()

    def _announce(self) -> None:
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        about = {"member": self._member, "port": self._server.getsockname()[1]}
        pause_s = PAUSE_S[0]
        while True:
            try:
                with socket.create_connection(place, timeout=HANDSHAKE_S) as link:
                    ask(link, self._key, about)
                    return
            except (OSError, Wrong):
                time.sleep(pause_s)
                pause_s = min(PAUSE_S[1], 1.5 * pause_s)

    def _accept(self) -> None:
        while True:
            link, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link, self._places:
                asked = answer(link, self._key)
                if asked["do"] == "follow":
                    self._follow(link, asked)
                else:
                    self._start(link, asked["command"])
        except (OSError, Wrong, ValueError, KeyError):
            return  # the other end is gone, or has no business here

    def _follow(self, link: socket.socket, asked: dict[str, Any]) -> None:
        self._plan.update(hosts=asked["hosts"], own=asked["own"])
        write(os.environ[PLAN], json.dumps(self._plan), 0o600)
        try:
            kind, _ = receive(link)
        except OSError:
            kind = b""
        if kind == b"D":
            self._end(0)
        elif not self._over.is_set():
            print("shoal: member 0 is gone", file=sys.stderr)
            self._end(1, signal.SIGTERM)

    def _start(self, link: socket.socket, command: str) -> None:
        process = subprocess.Popen(
            [shell(), "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._groups.add(process.pid)
        lock = threading.Lock()

        def outward(kind: bytes, pipe: IO[bytes] | None) -> None:
            assert pipe is not None
            with contextlib.suppress(OSError, ValueError):
                while data := os.read(pipe.fileno(), PIECE_BYTES):
                    with lock:
                        send(link, kind, data)

        def inward() -> None:
            assert process.stdin is not None
            try:
                while True:
                    kind, data = receive(link)
                    with contextlib.suppress(OSError, ValueError):
                        if kind == b"I" and data:
                            os.write(process.stdin.fileno(), data)
                        elif kind == b"I":
                            process.stdin.close()
                        elif kind == b"S":
                            os.killpg(process.pid, int(data))
            except OSError:  # its starter is gone
                end_group(process)

        pumps = [
            threading.Thread(target=outward, args=pair, daemon=True)
            for pair in ((b"O", process.stdout), (b"E", process.stderr))
        ]
        reader = threading.Thread(target=inward, daemon=True)
        for thread in (*pumps, reader):
            thread.start()
        code = shell_code(process.wait())
        for thread in pumps:
            thread.join(DRAIN_S)
        self._groups.discard(process.pid)
        with lock:
            send(link, b"X", str(code).encode())
            link.shutdown(socket.SHUT_WR)
        # The other end closes first: if we did while something of it is unread, the kernel would
        # reset the connection, and the code could be lost.
        reader.join(DRAIN_S)


def end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
