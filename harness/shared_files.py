"""A real parallel file system on hosts of a test: MooseFS or GlusterFS, mounted by FUSE.

Three hosts of its own serve it, two or three of them with copies of every file. Whoever mounts it
has it at the same path. All of it is gone with the hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from harness.hosts import Host, Net
from harness.waiting import WAIT_S, until

PROGRAMS = {"mfsmaster": "moosefs-master", "mfschunkserver": "moosefs-chunkserver"}
PROGRAMS |= {"mfsmount": "moosefs-client"}
EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")  # the file system that a new master begins with
GLUSTER_PROGRAMS = {"glusterfsd": "glusterfs-server", "glusterfs": "glusterfs-client"}


def missing(programs: Mapping[str, str]) -> str:
    """Why it cannot be mounted here; empty if it can, as far as one can tell."""
    absent = sorted({package for tool, package in programs.items() if shutil.which(tool) is None})
    if absent:
        return f"a parallel file system is not installed: apt-get install {' '.join(absent)}"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"cannot mount a file system here: {error}"
    return ""


class Place(Protocol):
    """Where a program runs."""

    name: str
    home: Path

    def start(self, *argv: str) -> subprocess.Popen[bytes]: ...
    def run(self, *argv: str) -> subprocess.CompletedProcess[str]: ...


class Here:
    """This machine itself, plugged into the switch: processes outside of hosts see what it mounts.
    What runs there ends with the switch."""

    def __init__(self, net: Net, name: str) -> None:
        self.name, self.home = name, net.scratch / name
        self.home.mkdir()
        self._inside = ("nsenter", f"--net=/run/netns/{net.switch}", "--pid=/proc/self/ns/pid")

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen([*self._inside, *argv], stdout=log, stderr=log)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)


class Daemon:
    """A program that can be killed, held and started again."""

    def __init__(self, host: Place, *argv: str) -> None:
        self.host = host
        self._argv = argv
        self._outer: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._outer = self.host.start(*self._argv)

    def alive(self) -> bool:
        return self._outer is not None and self._outer.poll() is None

    def kill(self) -> None:
        """At once; returns when it is gone."""
        assert self._outer is not None
        os.kill(self._pid(), signal.SIGKILL)
        self._outer.wait(WAIT_S)

    def stop(self) -> None:
        """Held: it does nothing, and its connections stay."""
        os.kill(self._pid(), signal.SIGSTOP)

    def go_on(self) -> None:
        if self.alive():
            assert self._outer is not None
            os.kill(self._pid(), signal.SIGCONT)
            os.kill(self._outer.pid, signal.SIGCONT)  # nsenter stops with what it started

    def _pid(self) -> int:
        assert self._outer is not None
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        return int(
            until(lambda: children.read_text().split(), f"{self._argv[0]} does not start")[0]
        )


class SharedFiles:
    """`stores` hold the bytes; while `answers` are held, nothing on it answers."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.path = net.scratch / "sea"
        self.path.mkdir()
        self.stores: list[Daemon] = []
        self.answers: list[Daemon] = []
        self.clients: dict[str, Daemon] = {}

    def mount(self, host: Place, path: Path | None = None) -> None:
        """Returns when files can be written there."""
        path = path or self.path
        client = self.clients[host.name] = Daemon(host, *self._client(host.home, path))
        mounted = ("mountpoint", "-q", str(path))
        until(
            lambda: not client.alive() or host.run(*mounted).returncode == 0,
            f"{host.name} cannot mount {path}",
        )
        assert client.alive(), f"{host.name} cannot mount {path}: see its log"
        trial = f"echo {host.name} > {path}/.{host.name} && cat {path}/.{host.name}"
        until(
            lambda: host.run("sh", "-c", trial).stdout == f"{host.name}\n",
            f"{host.name} cannot write to {path}",
            lambda: host.run("sh", "-c", trial).stderr,
        )

    def unmount(self, host: Place, path: Path | None = None) -> None:
        """By force, as one does with a mount whose daemon is gone."""
        done = host.run("umount", "-l", str(path or self.path))
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def held(self, *daemons: Daemon) -> Iterator[None]:
        for daemon in daemons:
            daemon.stop()
        try:
            yield
        finally:
            for daemon in daemons:
                daemon.go_on()

    def _client(self, home: Path, path: Path) -> tuple[str, ...]:
        """The command that mounts it, and stays."""
        raise NotImplementedError


class Moose(SharedFiles):
    """One master that knows all names, and two chunk servers; each chunk is on both."""

    programs = PROGRAMS

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self._meta = net.add("meta")
        data = _folder(self._meta, "data")
        shutil.copy(EMPTY, data / "metadata.mfs")
        exports = _file(self._meta.home, "exports.cfg", "* / rw,alldirs,admin,maproot=0:0")
        topology = _file(self._meta.home, "topology.cfg", "")
        own = (
            f"EXPORTS_FILENAME = {exports}",
            f"TOPOLOGY_FILENAME = {topology}",
            "CHUNKS_LOOP_MIN_TIME = 60",
            "REPLICATIONS_DELAY_INIT = 5",
        )
        self.answers = [self._server(self._meta, "mfsmaster", data, *own)]
        port = ("bash", "-c", f"exec 3<>/dev/tcp/{self._meta.address}/9420")
        until(lambda: self._meta.run(*port).returncode == 0, "the master does not listen")
        for name in ("store1", "store2"):
            host = net.add(name)
            disk = _folder(host, "disk")
            disks = (
                f"HDD_CONF_FILENAME = {_file(host.home, 'hdd.cfg', str(disk))}",
                f"MASTER_HOST = {self._meta.address}",
                "MASTER_RECONNECTION_DELAY = 1",
            )
            self.stores.append(self._server(host, "mfschunkserver", _folder(host, "data"), *disks))

    @staticmethod
    def _server(host: Host, program: str, data: Path, *own: str) -> Daemon:
        common = ("WORKING_USER = root", "WORKING_GROUP = root", "NICE_LEVEL = 0")
        lines = (*common, "DISABLE_OOM_KILLER = 0", f"DATA_PATH = {data}", *own)
        config = _file(host.home, f"{program}.cfg", "\n".join(lines))
        # After it was killed its lock is free: -a replays what it had not saved.
        more = ("-a",) if program == "mfsmaster" else ()
        return Daemon(host, program, "-f", *more, "-c", str(config), "start")

    def _client(self, _home: Path, path: Path) -> tuple[str, ...]:
        # As `mount` does: what fell into the empty folder meanwhile is no reason not to.
        options = f"mfsmaster={self._meta.address},mfsnice=0,mfsallowoomkiller,nonempty"
        return "mfsmount", "-f", str(path), "-o", options


class Gluster(SharedFiles):
    """Three bricks with a copy each; two of them decide. Its volume files are our own, so that no
    glusterd is needed."""

    programs = GLUSTER_PROGRAMS

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self._hosts = [net.add(f"store{number}") for number in (1, 2, 3)]
        for host in self._hosts:
            brick = _folder(host, "brick")
            volume = _file(host.home, "brick.vol", BRICK.format(brick=brick))
            words = ("-N", "-f", str(volume), "-l", str(host.home / "brick.log"))
            own = ("-p", str(host.home / "brick.pid"))
            self.stores.append(Daemon(host, "glusterfsd", *words, *own))
            port = ("bash", "-c", f"exec 3<>/dev/tcp/{host.address}/{GLUSTER_PORT}")
            until(lambda: host.run(*port).returncode == 0, f"{host.name} does not listen")  # noqa: B023
        self.answers = list(self.stores)

    def _client(self, home: Path, path: Path) -> tuple[str, ...]:
        parts = [STORE.format(host=one) for one in self._hosts]
        names = [one.name for one in self._hosts]
        together = TOGETHER.format(stores=" ".join(names), keys=",".join(names))
        volume = _file(home, "sea.vol", "".join([*parts, together]))
        words = ("-N", "-f", str(volume), "-l", str(home / "sea.log"))
        return "glusterfs", *words, "-p", str(home / "sea.pid"), str(path)


GLUSTER_PORT = 24007
BRICK = f"""
volume posix
  type storage/posix
  option directory {{brick}}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume brick
  type performance/io-threads
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.listen-port {GLUSTER_PORT}
  option auth.addr.brick.allow *
  subvolumes brick
end-volume
"""
STORE = f"""
volume {{host.name}}
  type protocol/client
  option transport-type tcp
  option remote-host {{host.address}}
  option remote-port {GLUSTER_PORT}
  option remote-subvolume brick
end-volume
"""
TOGETHER = """
volume all
  type cluster/replicate
  option quorum-type auto
  option afr-pending-xattr {keys}
  subvolumes {stores}
end-volume
"""


def _folder(host: Host, name: str) -> Path:
    path = host.home / name
    path.mkdir()
    return path


def _file(home: Path, name: str, text: str) -> Path:
    path = home / name
    path.write_text(text + "\n")
    return path
