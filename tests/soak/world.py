"""The cluster that a soak hurts: hosts of their own on a switch, with one head and SQLite, or with
two heads, a PostgreSQL and its replica. Every head and every node is a host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from harness import clocks
from harness.clocks import SteppedClock
from harness.hosts import Host, Net
from harness.postgres import Postgres, folder
from harness.relay import Relay, to_file

from shoal.client import Client, transport
from shoal.model.policy import Policy

SHOAL = (sys.executable, "-m", "shoal.main")
SWITCH = "10.77.0.254"
NODES = ("h1", "h2", "h3")
GPUS = 2  # of each node
SMALL = "h3"  # its home is on a small disk
SMALL_MB = 400
FILLER = "filler"
COMMAND_S = 120.0
# Quick to give a silent node up, so that there are many losses in few minutes.
POLICY = Policy(silent_after_ms=3_000, grace_ms=8_000)


class World:
    """`heads` 1: SQLite. `say` prints a line with the time."""

    def __init__(self, heads: int, say: Callable[[str], None]) -> None:
        self.say = say
        self.scratch = Path(tempfile.mkdtemp(prefix="soak-"))
        self.shared = self.scratch / "shared"  # members write here what they want us to see
        for name in ("gpus", "requests", "heads"):
            (self.shared / name).mkdir(parents=True)
            (self.shared / name).chmod(0o777)
        self.shared.chmod(0o777)
        self._ending = contextlib.ExitStack()
        self.net = Net(self.scratch)
        self.image = self.scratch / "disk.img"
        self.servers: list[Postgres] = []  # the first can be written
        self.relays: dict[str, list[Relay]] = {}  # of a head, to each server
        self.heads = [self.net.add(f"head{number}") for number in range(1, heads + 1)]
        self.nodes = {name: self.net.add(name) for name in NODES}
        self._make_small()
        self.clock = None
        if heads > 1 and not clocks.missing():
            self.clock = SteppedClock(self.scratch, self.heads[-1].name)
        self.token = self.certificate = self.join_token = ""

    # -- up --------------------------------------------------------------------------------

    def start(self) -> None:
        first = self.heads[0]
        shape = ("--nodes", "1", "--gpus", str(GPUS), "--host", first.address)
        if len(self.heads) > 1:
            self._start_servers()
            place = ("--database", self.database(first), "--shared", str(self.shared / "heads"))
            self.shoal(first, "up", *shape, *place)
            (self.scratch / "head.json").write_text(self.shoal(first, "heads", "invite"))
        else:
            self.shoal(first, "up", *shape)
        for other in self.heads[1:]:
            place = ("--database", self.database(other), "--host", other.address)
            self.shoal(other, "up", "--head", str(self.scratch / "head.json"), *place)
        self.token = (first.home / ".shoal" / "token").read_text().strip()
        self.certificate = (first.home / ".shoal" / "tls" / "ca.pem").read_text()
        self.join_token = (first.home / ".shoal" / "join-token").read_text().strip()
        with self.asking() as client:
            client.set_policy(POLICY)
        for name in NODES:
            self.join(self.nodes[name])

    def join(self, host: Host) -> None:
        """For the first time, or again after its power was off."""
        words = ("join", self.urls()[0], "--name", host.name, "--gpus", str(GPUS))
        self.shoal(host, *words, env={"SHOAL_JOIN_TOKEN": self.join_token})

    def shoal(self, host: Host, *words: str, env: dict[str, str] | None = None) -> str:
        done = host.run(*SHOAL, *words, env={**self.clock_of(host), **(env or {})})
        if done.returncode != 0:
            raise RuntimeError(f"{host.name}: shoal {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def clock_of(self, host: Host) -> dict[str, str]:
        """The last head's clock can be set."""
        return self.clock.environment() if self.clock and host is self.heads[-1] else {}

    # -- the database ----------------------------------------------------------------------

    def _start_servers(self) -> None:
        self.servers = [Postgres(self._ending.enter_context(folder()))]
        self.servers[0].create()
        self.servers[0].database("soak")
        self.add_replica()
        with self.net.network():
            for head in self.heads:
                self.relays[head.name] = [self._relay(number) for number in range(2)]

    def add_replica(self) -> None:
        self.servers.append(self.servers[0].replica(self._ending.enter_context(folder())))

    def _relay(self, number: int) -> Relay:
        """To the server that is in this place now."""
        listening = socket.create_server((SWITCH, 0), backlog=64)

        def target() -> socket.socket:
            server = self.servers[min(number, len(self.servers) - 1)]
            return to_file(f"{server.root}/.s.PGSQL.{server.port}")()

        return Relay(listening, target)

    def database(self, head: Host) -> str:
        places = ",".join(f"{SWITCH}:{relay.port}" for relay in self.relays[head.name])
        return f"postgresql://shoal@{places}/soak"

    # -- asking ----------------------------------------------------------------------------

    def urls(self) -> list[str]:
        return [f"https://{head.address}:7700" for head in self.heads]

    def client(self, patience_s: float = 60, timeout_s: float = 30) -> Client:
        """Its sockets are in the network of the thread that calls."""
        first, *others = self.urls()
        endpoint = transport.at(first, self.token, self.certificate)
        if others:
            endpoint = msgspec.structs.replace(endpoint, urls=tuple(others))
        return Client.to(endpoint, timeout_s=timeout_s, patience_s=patience_s)

    @contextlib.contextmanager
    def asking(self, patience_s: float = 60) -> Iterator[Client]:
        with self.net.network(), self.client(patience_s) as client:
            yield client

    # -- disks -----------------------------------------------------------------------------

    def _make_small(self) -> None:
        with self.image.open("wb") as image:
            image.truncate(SMALL_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self.image)], check=True)
        self._mount_small()

    def _mount_small(self) -> None:
        """Only its host sees it: as a mount of this machine it would be copied by whatever makes a
        namespace, and stay."""
        self.on_small("mount", "-o", "loop", str(self.image), str(self.nodes[SMALL].home))
        self.on_small("mkdir", "-p", str(self.nodes[SMALL].work))
        # Its removal may not have been on the disk when that broke.
        self.on_small("rm", "-f", str(self.nodes[SMALL].home / FILLER))

    def on_small(self, *words: str) -> None:
        done = self.nodes[SMALL].run(*words)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

    def power_on(self, host: Host) -> None:
        host.power_on()
        if host.name == SMALL:
            self._mount_small()

    def repair_small(self) -> None:
        """Its host is off."""
        mended = subprocess.run(["fsck.ext4", "-p", "-f", str(self.image)], capture_output=True)
        if mended.returncode > 1:
            raise RuntimeError(f"the small disk is damaged: {mended.stdout.decode()}")

    def node_folders(self, host: Host) -> Path:
        """As the host sees them."""
        return Path(f"{host.root}{host.home}/.shoal/nodes")

    # -- processes -------------------------------------------------------------------------

    def processes(self, host: Host) -> dict[int, str]:
        """What runs on a host: the part of Shoal, "member", or "" for what is none of it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True
        )
        words = {int(pid): _words(int(pid)) for pid in listed.stdout.split()}
        return {pid: _part(pid, own, words) for pid, own in words.items()}

    def find(self, host: Host, part: str) -> list[int]:
        return [pid for pid, name in self.processes(host).items() if name == part]

    # -- down ------------------------------------------------------------------------------

    def close(self) -> None:
        for relays in self.relays.values():
            for relay in relays:
                relay.close()
        self.net.close()
        for server in self.servers:
            server.kill()
        self._ending.close()
        if os.environ.get("SOAK_KEEP"):
            self.say(f"kept: {self.scratch}")
        else:
            shutil.rmtree(self.scratch, ignore_errors=True)


PARTS = {
    "shoal.control.supervise": "supervisor",
    "shoal.agent.starter": "starter",
    "haproxy": "haproxy",
}


def _part(pid: int, words: list[str], all_words: dict[int, list[str]]) -> str:
    if "shoal.main" in words and "controller" in words:
        return "controller"
    if "shoal.agent" in words:
        return "agent" if all_words.get(_parent(pid)) == words else "keeper"
    for word in words[:4]:
        for name, part in PARTS.items():
            if word.endswith(name):
                return part
    return "member" if _of_member(pid) else ""


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _of_member(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0SHOAL_REF=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
