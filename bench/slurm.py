"""A private, real Slurm on this machine, and how many short jobs it runs per second.

Run as root with `python -m bench.slurm`. Everything lives in one temporary directory and listens
on the loopback address only. All daemons are stopped at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from bench.figures import machine, percentile, table

NODES = 4
GPUS = 8
JOBS = 1_000
LATENCY_REPEATS = 50
SUBMITTERS = 4
POLL_S = 0.2
READY_TIMEOUT_S = 60.0
DONE_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
# These signals must not leave daemons behind.
ENDINGS = (signal.SIGINT, signal.SIGTERM)
NULL_DEVICE = os.makedev(1, 3)

# Debian keeps the daemons where the path of an ordinary user does not look.
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel")

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
MessageTimeout=30
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldDebug=error
SlurmdDebug=error
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=10000,sched_interval=5,batch_sched_delay=0,bf_interval=5,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MaxArraySize=100001
MaxJobCount=100000
MinJobAge=3600
# Without a default a job takes all the memory of its node, and so one job runs there at a time.
DefMemPerCPU=100
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=64 RealMemory=512000 Gres=gpu:h100:{gpus} State=UNKNOWN"
)


class Burst(msgspec.Struct, frozen=True):
    """One way to submit many jobs, and its result."""

    jobs_per_s: float
    submissions_per_s: float


def available() -> str | None:
    """Why no private Slurm can run here, in one line; None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "a private Slurm needs root, for its daemons and its device files"
    return None


def measure(jobs: int = JOBS) -> dict[str, object]:
    """Jobs that run `true` on one node each, by every way to submit them; the best one counts."""
    with slurm() as cluster:
        latency = measure_latency(cluster)
        in_turn = _burst(cluster, jobs, _submit_in_turn)
        together = _burst(cluster, jobs, _submit_together)
        array = _burst(cluster, jobs, _submit_array)
    bursts = {
        "sbatch, one after the other": in_turn,
        f"sbatch, {SUBMITTERS} submitters": together,
        "sbatch, one job array": array,
    }
    best = max(bursts, key=lambda name: bursts[name].jobs_per_s)
    return {
        "machine": machine(),
        "version": cluster.version,
        "jobs": jobs,
        "best": best,
        "jobs_per_s": bursts[best].jobs_per_s,
        # An array is one submission, whatever its size.
        "submissions_per_s": max(in_turn.submissions_per_s, together.submissions_per_s),
        "bursts": msgspec.to_builtins(bursts),
        "latency_ms": latency,
    }


class Slurm:
    """A running Slurm. `root` holds all of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": PATH, "SLURM_CONF": str(root / "slurm.conf"), "LANG": "C"}
        self.version = ""

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

    def logs(self) -> str:
        """The daemons' last messages, for an error message."""
        lines = []
        for path in sorted(self.root.glob("*.log")):
            for line in path.read_text(errors="replace").splitlines()[-5:]:
                lines.append(f"{path.name}: {line}")
        return "\n".join(lines)


@contextmanager
def slurm() -> Iterator[Slurm]:
    """munged, slurmctld and NODES slurmd, up and idle; all gone when the block is left."""
    reason = available()
    if reason is not None:
        raise RuntimeError(reason)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-slurm-")))
        cluster = Slurm(root)
        _write_files(root)
        for ending in ENDINGS:
            stack.callback(signal.signal, ending, signal.signal(ending, signal.default_int_handler))
        stack.callback(_end_leftovers, root)
        for name, argv in _daemons(root):
            stack.callback(_stop, _start(cluster, name, argv))
            if name == "munged":
                _wait(cluster, "munged", (root / "munge.sock").exists, READY_TIMEOUT_S)
        _wait(cluster, "all nodes", lambda: _idle_nodes(cluster) == NODES, READY_TIMEOUT_S)
        stack.callback(_cancel_all, cluster)
        for ending in ENDINGS:  # a second one must not interrupt the cleanup
            stack.callback(signal.signal, ending, signal.SIG_IGN)
        cluster.version = cluster.run("sinfo", "--version").strip()
        yield cluster


def measure_latency(cluster: Slurm) -> dict[str, float]:
    """The time from calling sbatch to the job's first line, and `srun true` from start to end."""
    to_running, srun = [], []
    mark = cluster.root / "started"
    for _ in range(LATENCY_REPEATS):
        mark.unlink(missing_ok=True)
        before_s = time.time()
        cluster.sbatch(script=f"date +%s.%N > {mark}.new && mv {mark}.new {mark}")
        while not mark.exists():
            time.sleep(0.001)
        to_running.append(float(mark.read_text()) - before_s)
        before_s = time.time()
        cluster.run("srun", "--nodes=1", "true")
        srun.append(time.time() - before_s)
    return {
        "submit_to_running_p50": round(percentile(to_running, 50) * 1000, 1),
        "submit_to_running_p99": round(percentile(to_running, 99) * 1000, 1),
        "srun_true_p50": round(percentile(srun, 50) * 1000, 1),
        "srun_true_p99": round(percentile(srun, 99) * 1000, 1),
    }


def _burst(cluster: Slurm, jobs: int, submit: Callable[[Slurm, int], None]) -> Burst:
    completed = cluster.completed()
    start_s = time.monotonic()
    submit(cluster, jobs)
    submitted_s = time.monotonic()
    _wait(cluster, "an empty queue", cluster.idle, DONE_TIMEOUT_S)
    end_s = time.monotonic()
    completed = cluster.completed() - completed
    if completed != jobs:
        raise RuntimeError(f"{completed} of {jobs} jobs succeeded\n{cluster.logs()}")
    return Burst(round(jobs / (end_s - start_s), 1), round(jobs / (submitted_s - start_s), 1))


def _submit_in_turn(cluster: Slurm, jobs: int) -> None:
    for _ in range(jobs):
        cluster.sbatch()


def _submit_together(cluster: Slurm, jobs: int) -> None:
    with ThreadPoolExecutor(SUBMITTERS) as pool:
        for _ in pool.map(lambda _: cluster.sbatch(), range(jobs)):
            pass


def _submit_array(cluster: Slurm, jobs: int) -> None:
    cluster.sbatch(f"--array=1-{jobs}")


def _write_files(root: Path) -> None:
    host = socket.gethostname().split(".")[0]
    port, *node_ports = _free_ports(1 + NODES)
    nodes = [
        NODE.format(name=f"n{number}", host=host, port=node_port, gpus=GPUS)
        for number, node_port in enumerate(node_ports, 1)
    ]
    conf = CONF.format(host=host, port=port, root=root, nodes="\n".join(nodes))
    (root / "slurm.conf").write_text(conf)
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


def _daemons(root: Path) -> list[tuple[str, list[str]]]:
    """All in the foreground, so that the process we start is the one we stop."""
    files = [f"--{kind}-file={root}/munge.{end}" for kind, end in MUNGE_FILES]
    munged = ["munged", "--foreground", "--force", f"--socket={root}/munge.sock", *files]
    return [
        ("munged", munged),
        ("slurmctld", ["slurmctld", "-D", "-c"]),
        *((f"slurmd-n{n}", ["slurmd", "-D", "-N", f"n{n}"]) for n in range(1, NODES + 1)),
    ]


MUNGE_FILES = (("key", "key"), ("pid", "pid"), ("log", "munge.log"), ("seed", "seed"))


def _start(cluster: Slurm, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches us alone, and we stop the daemons in order."""
    with (cluster.root / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            argv,
            env=cluster.env,
            cwd=cluster.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(cluster: Slurm, what: str, true: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {timeout_s:.0f} s for {what} in vain\n{cluster.logs()}")
        time.sleep(POLL_S)


def _idle_nodes(cluster: Slurm) -> int:
    try:
        return cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except RuntimeError:
        return 0  # slurmctld does not answer yet


def _cancel_all(cluster: Slurm) -> None:
    """Jobs that a failure or Ctrl-C left behind must not start while the daemons stop."""
    cluster.run("scancel", "--user=root")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _end_leftovers(root: Path) -> None:
    """Job steps outlive their slurmd; the directory in their environment identifies them."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while pids := _pids_of(root):
        if time.monotonic() > deadline_s:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _pids_of(root: Path) -> list[int]:
    mark = f"SLURM_CONF={root}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found


def main() -> None:
    reason = available()
    if reason is not None:
        print(reason)
        print(msgspec.json.encode({"skipped": reason}).decode())
        return
    figures = measure()
    bursts = msgspec.convert(figures["bursts"], dict[str, Burst])
    print(figures["machine"])
    print(f"{figures['version']}, {NODES} nodes, {JOBS} jobs that run `true`")
    rows = [(name, burst.jobs_per_s, burst.submissions_per_s) for name, burst in bursts.items()]
    print(table(("submitted by", "jobs/s", "submissions/s"), rows))
    print(
        table(("latency", "ms"), msgspec.convert(figures["latency_ms"], dict[str, float]).items())
    )
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
