"""Hosts made of network namespaces, each with an address, processes and a home of its own, on a
switch that they can be unplugged from. Needs root and iproute2; `missing()` says what is not there.

A host that is cut off lives on, unheard. A host that is powered off is gone with all its
processes. Whatever happens to the process that made them, nothing of its hosts stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.waiting import WAIT_S

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
CLONE_NEWNET = 0x40000000

_counter = itertools.count(1)

# A web server on a host: of this folder, at this port. It gives ranges, and needs aiohttp.
SERVE = """
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1])
web.run_app(app, port=int(sys.argv[2]), print=None)
"""
# Process 1 of a host: it takes care of orphans, and the host ends with it.
INIT = """
import os, sys, time
os.write(1, b"up\\n")
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
# Ends when the test's process does, however that ends, and clears up behind it.
SWEEPER = """
cat >/dev/null
for name in $(ip netns list | cut -d' ' -f1 | grep "^$1"); do
    ip netns pids "$name" | xargs -r kill -KILL
    ip netns delete "$name"
done
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts out of network namespaces need root"
    absent = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if absent:
        return f"hosts out of network namespaces need {' and '.join(absent)}"
    name = f"shoal-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextlib.contextmanager
def switched() -> Iterator[Net]:
    """A switch to plug hosts into, and a folder for their files. Nothing of it stays."""
    # Short, so that Ray keeps its sockets inside.
    scratch = Path(tempfile.mkdtemp(prefix="sn-"))
    made = Net(scratch)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(scratch, ignore_errors=True)


class Net:
    """A switch and the hosts on it: 10.77.0.1, 10.77.0.2, ... It is apart from every other one, so
    that tests beside each other may use the same addresses."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.hosts: list[Host] = []
        self._prefix = f"shoal-{os.getpid()}-{next(_counter)}-"
        self.switch = self._prefix + "switch"
        self._sweeper = subprocess.Popen(
            ["sh", "-c", SWEEPER, "sh", self._prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _call("ip", "netns", "add", self.switch)
        _call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self.switch, "address", "add", "10.77.0.254/24", "dev", "bridge")
        _call("ip", "-n", self.switch, "link", "set", "bridge", "up")
        _call("ip", "-n", self.switch, "link", "set", "lo", "up")

    def add(self, name: str) -> Host:
        """One more host, on and plugged in."""
        host = Host(self, name, len(self.hosts) + 1, self._prefix + name)
        self.hosts.append(host)
        host.power_on()
        return host

    def network(self) -> contextlib.AbstractContextManager[None]:
        """As of a host: the switch has an address, too, 10.77.0.254."""
        return _inside(self.switch)

    def close(self) -> None:
        for host in self.hosts:
            host.power_off()
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        self._sweeper.wait(WAIT_S)


class Host:
    def __init__(self, net: Net, name: str, number: int, namespace: str) -> None:
        self.name = name
        self.address = f"10.77.0.{number}"
        self.home = net.scratch / name  # of its only user, root
        self.work = self.home / "work"  # where its user is when commands are given
        self.work.mkdir(parents=True, exist_ok=True)
        self.namespace = namespace
        self._switch = net.switch
        self._port = f"port{number}"
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._started: list[subprocess.Popen[bytes]] = []
        _call("ip", "netns", "add", namespace)
        peer = ("peer", "name", "eth0", "netns", namespace)
        _call("ip", "-n", net.switch, "link", "add", self._port, "type", "veth", *peer)
        _call("ip", "-n", net.switch, "link", "set", self._port, "master", "bridge", "up")
        _call("ip", "-n", namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        _call("ip", "-n", namespace, "link", "set", "lo", "up")
        _call("ip", "-n", namespace, "link", "set", "eth0", "up")
        _call("ip", "-n", namespace, "route", "add", "default", "via", "10.77.0.254")
        (self.home / ".passwd").write_text(f"root:x:0:0:root:{self.home}:/bin/sh\n" + _others())

    # -- power -----------------------------------------------------------------------------

    def power_on(self) -> None:
        assert self._init is None, f"{self.name} is on"
        boot = f"hostname {self.name}; mount --bind {self.home}/.passwd /etc/passwd; exec "
        space = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")
        init = (*space, "sh", "-c", boot + '"$@"', "sh", sys.executable, "-S", "-E", "-c", INIT)
        self._init = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "nsenter",
                f"--net=/run/netns/{self.namespace}",
                *init,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # when it is powered off, unshare complains of that
            start_new_session=True,
            env=self.environment(),
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"up\n", f"{self.name} does not come up"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        (self._pid,) = map(int, children.split())

    def power_off(self) -> None:
        """At once. Returns when none of its processes is left."""
        if self._init is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        self._init.wait(WAIT_S)
        assert self._init.stdout is not None
        self._init.stdout.close()
        self._init = None
        while self._started:
            self._started.pop().wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while _output("ip", "netns", "pids", self.namespace).strip():
            assert time.monotonic() < deadline, f"{self.name} does not go down"
            time.sleep(0.01)

    # -- processes -------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """Where its files can be seen from outside, also those on mounts of its own."""
        return f"/proc/{self._pid}/root"

    def environment(self) -> dict[str, str]:
        """What its processes find; whose home it is decides where Shoal keeps its files."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.home),
            "SHOAL_HOME": str(self.home / ".shoal"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }

    def command(self, *argv: str) -> list[str]:
        """The same command, on this host."""
        assert self._init is not None, f"{self.name} is off"
        return [
            "nsenter",
            f"--target={self._pid}",
            "--net",
            "--pid",
            "--mount",
            "--uts",
            f"--wd={self.work}",
            *argv,
        ]

    def run(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = WAIT_S * 2,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv),
            env={**self.environment(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Runs on until it ends or the host does, whatever becomes of the process returned here,
        which only waits for it. Its output is in `NAME.log` beside the host's home."""
        with (self.home.parent / f"{self.name}.log").open("ab") as output:
            process = subprocess.Popen(
                self.command(*argv),
                env={**self.environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread makes meanwhile are sockets of the host."""
        return _inside(self.namespace)

    # -- its cable -------------------------------------------------------------------------

    def cut(self) -> None:
        """Unplugged: its processes live on, and nobody hears of them."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "down")

    def slow(self, rate: str) -> None:
        """No more than this in either direction, as `tc` writes it: 2mbit."""
        limit = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        _call("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port, *limit)
        _call("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *limit)

    def lose(self, share: float) -> None:
        """This share of the packets that come in and that go out is lost. Each of them is one: the
        kernel does not pass on many in one piece."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "gso_max_segs", "1")
        _call("ip", "-n", self.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        loss = ("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        self._iptables("-A", "INPUT", "-i", "eth0", *loss)
        self._iptables("-A", "OUTPUT", "-o", "eth0", *loss)

    def mend(self) -> None:
        """Plugged in again, and as good as new."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "up")
        self._iptables("-F")
        for namespace, device in ((self._switch, self._port), (self.namespace, "eth0")):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"],
                stderr=subprocess.DEVNULL,
            )

    def lost_packets(self) -> int:
        """Dropped on purpose so far."""
        table = _output(
            "nsenter", f"--net=/run/netns/{self.namespace}", "iptables", "-nvxL"
        ).splitlines()
        return sum(int(line.split()[0]) for line in table if "DROP" in line and "statistic" in line)

    def sent_bytes(self) -> int:
        """That have left its card so far."""
        words = ("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        (link,) = json.loads(_output(*words))
        return int(link["stats64"]["tx"]["bytes"])

    def held_up(self) -> int:
        """How often a packet had to wait for its turn on the slow link."""
        words = _output("tc", "-s", "-n", self.namespace, "qdisc", "show", "dev", "eth0").split()
        return int(words[words.index("overlimits") + 1])

    def _iptables(self, *arguments: str) -> None:
        _call("nsenter", f"--net=/run/netns/{self.namespace}", "iptables", "-w", *arguments)


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(here.fileno(), CLONE_NEWNET) == 0


def _others() -> str:
    lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("root:"))


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
