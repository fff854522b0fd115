"""Runs workers on the cluster: one elastic job whose members connect to the map's client."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shoal.client import Client, ShoalError, Unreachable
from shoal.client.keepalive import keep_alive
from shoal.client.transport import Endpoint
from shoal.link.packing import PackError, pack
from shoal.model.job import JobSpec, Restart
from shoal.model.views import JobView
from shoal.tasks import frames
from shoal.tasks.errors import InitFailed
from shoal.tasks.frames import parcel
from shoal.tasks.host import INVITATION, MEETING, SECRET
from shoal.tasks.pool import START_FAILURES_MAX, WORKERS_MAX, Pool
from shoal.tasks.process import SOURCE, THREADS
from shoal.tasks.stream import HandshakeFailed, Remote, greet

if TYPE_CHECKING:
    from shoal.link.meeting import Host, Way

log = logging.getLogger("shoal.tasks")

# As in `shoal run`: the same Python and the same imports there as here, if it is the same machine.
CARRIED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LANG")
HANDSHAKES_MAX = 32  # at a time
MEETING_HANDSHAKES_MAX = 256  # as many as one meeting has guests
BACKLOG = 1024
LOOK_S = 2.0
WARN_AFTER_S = 5.0  # if there are no workers yet
LEAVE_S_MAX = 3.0
PLACED_S_MAX = 3.0
GROW_S_MAX = 60.0
MORE_JOBS_MAX = 16
AWAY_S_MAX = 120.0  # without a controller or workers
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from shoal.tasks.host import main; sys.exit(main(sys.argv[1:]))"
)
_START_THERE = 'exec "$SHOAL_PYTHON" -m shoal.tasks.host "$@"'


class Cluster(NamedTuple):
    """What each worker gets. `home` or `context`: as for `shoal.Client`. `pack`: send the working
    directory to the nodes; None: only if they are other machines."""

    gpus: int = 0
    cpus: float = 1
    memory_mb: int = 0
    env: dict[str, str] = {}
    requirements: str = ""
    pack: bool | None = None
    home: Path | None = None
    name: str = "map"
    context: str = ""
    endpoint: Endpoint | None = None  # of a client: `Client.map` sets it


def default_cluster_workers(cluster: Cluster) -> int:
    """As many as fit the whole cluster. The job gets as many as there is room for."""
    with _connect(cluster) as client:
        status = client.status()
    if cluster.gpus:
        count = status.gpus // cluster.gpus
    else:
        count = int(status.cpu_milli // max(1, cluster.cpus * 1000))
    return max(1, min(WORKERS_MAX, count))


def _connect(cluster: Cluster) -> Client:
    if cluster.endpoint is not None:
        return Client.to(cluster.endpoint, patience_s=10)
    return Client(home=cluster.home, context=cluster.context, patience_s=10)


class ClusterPool(Pool):
    """A pool whose workers connect by themselves when their job is placed."""

    def __init__(self, size: int, init: bytes | None, cluster: Cluster) -> None:
        super().__init__(size, init)
        self._cluster = cluster
        self._secret = secrets.token_bytes(32)
        self._root = ""  # the packed directory
        self._listener: socket.socket | None = None
        self._meeting: Host | None = None  # if workers come through the head
        self._places = threading.Semaphore(HANDSHAKES_MAX)
        self._job_thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.joined = 0

    # -- the pool's thread ---------------------------------------------------------------------

    def _hire(self, wanted: int) -> None:  # noqa: ARG002 - the scheduler decides the number
        if self._job_thread is None:
            self._job_thread = threading.Thread(
                target=self._run_job, name="shoal-tasks-job", daemon=True
            )
            self._job_thread.start()

    def _full(self) -> bool:
        return bool(self._busy)

    def _join(
        self, connection: socket.socket, about: dict[str, Any], way: Way | None = None
    ) -> None:
        here = list(sys.version_info[:2])
        if self._closing or self.broken is not None:
            connection.close()
            return
        if about.get("python") != here:
            theirs = ".".join(map(str, about.get("python", [])))
            message = f"{about.get('node')} has Python {theirs}, this is {here[0]}.{here[1]}"
            connection.close()
            self._break(InitFailed(f"{message}: functions cannot be sent between them"))
            return
        worker = Remote(connection, about, way)
        self.joined += 1
        self._add(worker)
        body = pickle.dumps((sys.path, self._script, self._init, self._root))
        worker.send(parcel(frames.HELLO, body=body))
        self._watch(worker)

    def _end(self) -> None:
        self._ending.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            self._listener.close()
        super()._end()
        if self._meeting is not None:
            self._meeting.close()

    def join(self, timeout_s: float | None) -> None:
        super().join(timeout_s)
        if self._job_thread is not None:
            self._job_thread.join(timeout_s)

    # -- the listener's threads ----------------------------------------------------------------

    def _listen(self, address: str) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(BACKLOG)
        self._listener = listener
        threading.Thread(target=self._accept, name="shoal-tasks-listen", daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def _accept(self) -> None:
        assert self._listener is not None
        with self._listener as listener:  # the map may already be over
            while not self._ending.is_set():
                self._places.acquire()
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                self._welcome(connection, None)

    def _meet(self, client: Client) -> str:
        """Workers come through the head; what they have to know for that."""
        from shoal.link.meeting import Host

        self._places = threading.Semaphore(MEETING_HANDSHAKES_MAX)
        self._meeting = Host(client.endpoint, self._admit)
        return msgspec.json.encode(self._meeting.open()).decode()

    def _admit(self, connection: socket.socket, way: Way) -> None:
        if self._places.acquire(blocking=False):
            self._welcome(connection, way)
        else:
            connection.close()  # its host tries again

    def _welcome(self, connection: socket.socket, way: Way | None) -> None:
        greeting = threading.Thread(target=self._greet, args=(connection, way), daemon=True)
        greeting.start()

    def _greet(self, connection: socket.socket, way: Way | None) -> None:
        try:
            if way is None:
                keep_alive(connection)
            about = greet(connection, self._secret)
            self._call(lambda: self._join(connection, about, way))
        except (OSError, HandshakeFailed, ValueError, RuntimeError) as error:
            log.debug("refused a connection: %s", error)
            connection.close()
        finally:
            self._places.release()

    # -- the job's thread ----------------------------------------------------------------------

    def _run_job(self) -> None:
        """Submit the job, watch it, and end it with the map."""
        try:
            with _connect(self._cluster) as client:
                spec = self._job(client)
                if not self._ending.is_set():
                    _Watch(self, client, spec).until(self._ending)
        except (ShoalError, PackError, OSError) as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            error = InitFailed(f"no workers from the cluster: {why}")
            self._call(lambda: self._break(error))

    def _job(self, client: Client) -> JobSpec:
        cluster, local = self._cluster, client.status().engine == "local"
        env = {name: os.environ[name] for name in CARRIED if os.environ.get(name)}
        where: tuple[str, ...] = (MEETING,)
        if client.remote:
            env = {INVITATION: self._meet(client)}
        else:
            address = "127.0.0.1" if local else _own_address(client)
            where = (address, str(self._listen(address)))
        env |= dict.fromkeys(THREADS, str(max(1, int(cluster.cpus)))) | cluster.env
        words, workdir, package = [sys.executable, "-c", _START, SOURCE], os.getcwd(), ""
        if (client.remote or not local) if cluster.pack is None else cluster.pack:
            made = pack(Path(workdir))
            if made.ignored is not None:
                log.warning("%s", made.ignored.text)
            with made.file as file:
                client.send_package(made.sha256, made.size, file)
            words = ["sh", "-c", _START_THERE, "sh"]
            workdir, package, self._root = made.folder, made.sha256, str(made.root)
            env.pop("PYTHONPATH", None)  # the worker gets the client's whole sys.path instead
        env[SECRET] = self._secret.hex()
        return JobSpec(
            command=(*words, *where),
            name=cluster.name,
            members=1,
            members_max=self.size if self.size > 1 else 0,
            gpus=cluster.gpus,
            cpu_milli=round(cluster.cpus * 1000),
            memory_mb=cluster.memory_mb,
            env=env,
            workdir=workdir,
            package=package,
            requirements=cluster.requirements,
            restart=Restart.ON_FAILURE,
            retries=100,
            backoff_ms=0,
            stop_grace_ms=1000,
        )


class _Watch:
    """Watches the job. If it ends while there is work, it is submitted again, a few times. If there
    is free room and no other job waits, another job adds workers."""

    def __init__(self, pool: ClusterPool, client: Client, spec: JobSpec) -> None:
        self._pool = pool
        self._client = client
        self._spec = spec
        self._job = ""
        self._more: list[str] = []  # jobs that added workers
        self._grow_s = LOOK_S
        self._grow_at = 0.0
        self._joined = 0
        self._failures = 0
        self._warned = False

    def until(self, ending: threading.Event) -> None:
        self._submit()
        since = heard = time.monotonic()
        self._grow_at = since + LOOK_S
        while not ending.wait(LOOK_S if self._pool.joined else LOOK_S / 8):
            try:
                self._look(self._client.job(self._job), since)
                if time.monotonic() > self._grow_at and not ending.is_set():
                    self._grow()
                heard = time.monotonic()
            except Unreachable as error:  # connected workers do not need a controller
                if time.monotonic() - heard > AWAY_S_MAX and not self._pool.processes():
                    self._pool._give_up(str(error))
                    return
                self._reconnect()
        for job in (self._job, *self._more):
            with contextlib.suppress(ShoalError, OSError):
                self._end_job(job)

    def _end_job(self, job: str) -> None:
        """Dismissed members end by themselves; the rest is cancelled."""
        if self._client.job(job).state == "running":
            self._client.job(job, wait_for="finished", wait_s=LEAVE_S_MAX)
        self._client.cancel(job)

    def _submit(self) -> None:
        self._joined = self._pool.joined
        self._job = self._client.submit(self._spec).id
        log.info("job %s runs the workers", self._job)

    def _look(self, view: JobView, since: float) -> None:
        some = self._pool.joined > self._joined
        if view.finished_ms is not None or (view.failures >= START_FAILURES_MAX and not some):
            self._failures = 0 if some else self._failures + 1
            if view.finished_ms is None or self._failures >= START_FAILURES_MAX:
                with contextlib.suppress(ShoalError):
                    self._client.cancel(self._job)
                self._pool._give_up(f"job {view.id} {view.state}: {view.why}")
                self._pool._ending.wait()
                return
            self._submit()
        elif not self._warned and not some and time.monotonic() - since > WARN_AFTER_S:
            self._warned = True
            log.warning("no workers yet: job %s is %s: %s", view.id, view.state, view.why)

    def _grow(self) -> None:
        """Add workers only where room is free now; a job that has to wait is cancelled. A gang
        without checkpoints does not grow by itself, because that would restart it."""
        missing = self._pool.size - len(self._pool.processes())
        self._grow_at = time.monotonic() + self._grow_s
        if not missing or not self._pool.joined or len(self._more) >= MORE_JOBS_MAX:
            return
        status, spec = self._client.status(), self._spec
        free = (status.cpu_milli - status.cpu_milli_held) // max(1, spec.cpu_milli)
        if spec.gpus:
            free = min(free, (status.gpus - status.gpus_held) // spec.gpus)
        if free < 1 or status.jobs.get("waiting") or status.jobs.get("starting"):
            return
        most = min(missing, free)
        more = msgspec.structs.replace(spec, members_max=most if most > 1 else 0)
        job = self._client.submit(more).id
        if self._client.job(job, wait_for="running", wait_s=PLACED_S_MAX).state == "waiting":
            self._client.cancel(job)  # no free room fits a worker
            self._grow_s = min(GROW_S_MAX, 2 * self._grow_s)
        else:
            self._more.append(job)
            self._grow_s = LOOK_S

    def _reconnect(self) -> None:
        with contextlib.suppress(Unreachable):
            fresh = _connect(self._pool._cluster)
            self._client.close()
            self._client = fresh


def _own_address(client: Client) -> str:
    """Where the nodes reach this machine: its address on the route to them. Nodes on this machine
    can use that address too."""
    for node in client.nodes():
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((node.address, 9))
                found: str = probe.getsockname()[0]
            if not found.startswith("127.") and found != "::1":
                return found
    return "127.0.0.1"
