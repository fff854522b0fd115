"""A private, real Slurm on this machine: munged, slurmctld and some slurmd, as root, in one
temporary directory and on the loopback address only. At the end all of it is stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NODES = 4
GPUS = 8
POLL_S = 0.2
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
# These signals must not leave daemons behind.
ENDINGS = (signal.SIGINT, signal.SIGTERM)
NULL_DEVICE = os.makedev(1, 3)

# Debian keeps the daemons where the path of an ordinary user does not look.
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel")
MUNGE_FILES = (("key", "key"), ("pid", "pid"), ("log", "munge.log"), ("seed", "seed"))

CONF = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldDebug=error
SlurmdDebug=error
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without a default a job takes all the memory of its node, and so one job runs there at a time.
DefMemPerCPU=100
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=64 RealMemory=512000 Gres=gpu:h100:{gpus} State=UNKNOWN Feature=rack{rack},{name}"
)


def available() -> str | None:
    """Why no private Slurm can run here, in one line; None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "a private Slurm needs root, for its daemons and its device files"
    return None


class Slurm:
    """A running Slurm. `root` holds all of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": PATH, "SLURM_CONF": str(root / "slurm.conf"), "LANG": "C"}
        self.version = ""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self.env, cwd=self.root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{argv[0]} failed: {done.stderr.strip()}\n{self.logs()}")
        return done.stdout

    def sbatch(self, *options: str, script: str = "true") -> str:
        return self.run(
            "sbatch", "--parsable", "--nodes=1", "--output=/dev/null", *options, "--wrap", script
        ).strip()

    def idle(self) -> bool:
        """Whether nothing waits or runs. A short query, because long answers would slow Slurm
        down."""
        return not self.run("squeue", "--noheader", "--format=%i")

    def completed(self) -> int:
        """How many jobs have succeeded since Slurm was started."""
        every = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%T")
        return every.split().count("COMPLETED")

    def idle_nodes(self) -> int:
        try:
            lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except RuntimeError:
            return 0  # slurmctld does not answer yet
        return sum(line.endswith(" idle") for line in set(lines))  # one for each partition

    def start(self, name: str) -> None:
        """A daemon: "slurmctld", "n1", ... in a session of its own, so that Ctrl-C reaches us alone
        and we stop them in order."""
        with (self.root / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                _argv(self.root, name),
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def kill(self, name: str) -> None:
        """As if the machine had lost its power: the daemon and all that it ran."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for pid in self._pids(f"SLURMD_NODENAME={name}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop_all(self) -> None:
        for name in reversed(list(self._daemons)):
            self.stop(name)

    def wait(self, what: str, true: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {timeout_s:.0f} s for {what} in vain\n{self.logs()}")
            time.sleep(POLL_S)

    def logs(self) -> str:
        """The daemons' last messages, for an error message."""
        lines = []
        for path in sorted(self.root.glob("*.log")):
            for line in path.read_text(errors="replace").splitlines()[-5:]:
                lines.append(f"{path.name}: {line}")
        return "\n".join(lines)

    def cancel_all(self) -> None:
        """Jobs that a failure or Ctrl-C left behind must not start while the daemons stop."""
        users = set(self.run("squeue", "--noheader", "--format=%u").split())
        for user in users:
            self.run("scancel", f"--user={user}")

    def clear(self) -> None:
        """Cancels until nothing is left. A lost message about a job's end is sent again by Slurm
        after a minute."""

        def emptied() -> bool:
            try:
                self.cancel_all()
                return self.idle()
            except RuntimeError:
                return False  # it does not answer while it is busy

        self.wait("an empty queue", emptied, timeout_s=150)

    def end_leftovers(self) -> None:
        """Job steps outlive their slurmd; the directory in their environment identifies them."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while pids := self._pids():
            if time.monotonic() > deadline_s:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def _pids(self, also: str = "") -> list[int]:
        mark = f"SLURM_CONF={self.root}/".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = path.read_bytes()
            except OSError:
                continue  # it ended while we looked
            if mark in environ and (not also or also.encode() in environ.split(b"\0")):
                found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]


@contextmanager
def slurm(more: Sequence[str] = ()) -> Iterator[Slurm]:
    """munged, slurmctld and NODES slurmd, up and idle; all gone when the block is left. `more`:
    lines of slurm.conf."""
    reason = available()
    if reason is not None:
        raise RuntimeError(reason)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-slurm-")))
        root.chmod(0o755)  # for commands of other users
        cluster = Slurm(root)
        _write_files(root, more)
        if threading.current_thread() is threading.main_thread():
            for ending in ENDINGS:
                before = signal.signal(ending, signal.default_int_handler)
                stack.callback(signal.signal, ending, before)
        stack.callback(cluster.end_leftovers)
        stack.callback(cluster.stop_all)
        cluster.start("munged")
        cluster.wait("munged", (root / "munge.sock").exists)
        cluster.start("slurmctld")
        for number in range(1, NODES + 1):
            cluster.start(f"n{number}")
        cluster.wait("all nodes", lambda: cluster.idle_nodes() == NODES)
        stack.callback(cluster.cancel_all)
        if threading.current_thread() is threading.main_thread():
            for ending in ENDINGS:  # a second one must not interrupt the cleanup
                stack.callback(signal.signal, ending, signal.SIG_IGN)
        cluster.version = cluster.run("sinfo", "--version").strip()
        yield cluster


def _argv(root: Path, name: str) -> list[str]:
    """All in the foreground, so that the process we start is the one we stop."""
    if name == "munged":
        files = [f"--{kind}-file={root}/munge.{end}" for kind, end in MUNGE_FILES]
        return ["munged", "--foreground", "--force", f"--socket={root}/munge.sock", *files]
    if name == "slurmctld":
        return ["slurmctld", "-D"]
    return ["slurmd", "-D", "-N", name]


def _write_files(root: Path, more: Sequence[str]) -> None:
    host = socket.gethostname().split(".")[0]
    port, *node_ports = _free_ports(1 + NODES)
    nodes = [
        NODE.format(name=f"n{number}", host=host, port=node_port, gpus=GPUS, rack=(number + 1) // 2)
        for number, node_port in enumerate(node_ports, 1)
    ]
    conf = CONF.format(host=host, port=port, root=root, nodes="\n".join(nodes))
    (root / "slurm.conf").write_text(conf + "".join(f"{line}\n" for line in more))
    (root / "gres.conf").write_text(
        f"NodeName=n[1-{NODES}] Name=gpu Type=h100 File={root}/dev/gpu[0-{GPUS - 1}]\n"
    )
    for folder in ("dev", "state", *(f"spool/n{number}" for number in range(1, NODES + 1))):
        (root / folder).mkdir(parents=True)
    for gpu in range(GPUS):
        os.mknod(root / f"dev/gpu{gpu}", stat.S_IFCHR | 0o666, NULL_DEVICE)
    key = root / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held until the last is found."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
    return ports
