"""Starts the load balancers that `bench/gateway.py` compares, each in front of given ports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from harness import ports

from shoal.gateway.binary import GatewayError, find_binary
from shoal.gateway.gateway import Gateway
from shoal.model.service import GatewayEntry, Replica, Route, Served, Wanted

START_TIMEOUT_S = 60.0
TICK_S = 1.0

# Starts a balancer for replicas at these ports with this concurrency; yields its port and path.
Start = Callable[[Sequence[int], int], contextlib.AbstractContextManager[tuple[int, str]]]


@contextlib.contextmanager
def direct(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:  # noqa: ARG001
    """No balancer: requests go to the first replica."""
    yield ports[0], "/"


@contextlib.contextmanager
def shoal(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:
    """The gateway as a service uses it: path, ids, limits, log, adaptive weights."""
    with folder() as directory:
        gateway = Gateway(directory)
        port = free_port()
        replicas = tuple(
            Replica(id=f"r{number}", address="127.0.0.1", port=at)
            for number, at in enumerate(ports)
        )
        route = Route(service="bench", concurrency=concurrency, queue_max=100_000)
        served = Served(route=route, replicas=replicas)
        with pinned(PROXY_CPUS):
            gateway.apply(Wanted(entry=GatewayEntry(port=port, threads=1), services=(served,)))
        move_log_keeper(directory)
        end = threading.Event()

        def look() -> None:
            while not end.wait(TICK_S):
                gateway.tick()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield port, "/bench/"
        finally:
            end.set()
            thread.join()
            gateway.stop(grace_s=0)


def move_log_keeper(directory: Path) -> None:
    """Moves this process off the balancer's core."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in process.cmdline():
                process.cpu_affinity(list(OTHER_CPUS))


@contextlib.contextmanager
def haproxy(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:
    """Plain HAProxy: leastconn and defaults."""
    port = free_port()
    limit = f" maxconn {concurrency}" if concurrency else ""
    lines = [
        "global",
        "    nbthread 1",
        "defaults",
        "    mode http",
        "    timeout connect 1s",
        "    timeout client 60s",
        "    timeout server 60s",
        "frontend f",
        f"    bind 127.0.0.1:{port}",
        "    default_backend b",
        "backend b",
        "    balance leastconn",
        *(f"    server s{at} 127.0.0.1:{at} check inter 1s{limit}" for at in ports),
    ]
    with folder() as directory:
        (directory / "plain.cfg").write_text("\n".join(lines) + "\n")
        with started([str(find_binary().path), "-f", str(directory / "plain.cfg")], port):
            yield port, "/"


@contextlib.contextmanager
def nginx(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:  # noqa: ARG001
    """least_conn with keep-alive; open-source nginx has no queue and no limit per server."""
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{at};" for at in ports)
    with folder() as directory:
        text = f"""
daemon off; worker_processes 1; pid {directory}/pid; error_log {directory}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {directory}/a; proxy_temp_path {directory}/b;
  fastcgi_temp_path {directory}/c; uwsgi_temp_path {directory}/d; scgi_temp_path {directory}/e;
  upstream b {{ least_conn; {servers} keepalive 128; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 10000000;
    location / {{ proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""
        (directory / "nginx.conf").write_text(text)
        binary = which("nginx")
        assert binary is not None
        command = [binary, "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]
        with started(command, port):
            yield port, "/"


@contextlib.contextmanager
def sglang(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:  # noqa: ARG001
    """sglang-router with its cache-aware policy; any replicas will do."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--policy", "cache_aware", "--worker-urls"]
    command += [f"http://127.0.0.1:{at}" for at in ports]
    with started(command, port):
        yield port, "/generate"


@contextlib.contextmanager
def ray_serve(ports: Sequence[int], concurrency: int) -> Iterator[tuple[int, str]]:
    """Ray Serve with the same number of its own instant replicas: for throughput only."""
    port = free_port()
    text = f"""
import time
from ray import serve
@serve.deployment(num_replicas={len(ports)}, max_ongoing_requests={concurrency or 1000})
class Answer:
    async def __call__(self, request):
        return "ok"
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
serve.run(Answer.bind())
time.sleep(3600)
"""
    with started([sys.executable, "-c", text], port):
        yield port, "/"


def available() -> tuple[dict[str, Start], list[str]]:
    """The balancers that can run here, and a line about each that cannot."""
    found: dict[str, Start] = {"direct": direct}
    missing = []
    try:
        find_binary()
        found |= {"shoal": shoal, "haproxy": haproxy}
    except GatewayError as error:
        missing.append(str(error))
    if which("nginx"):
        found["nginx"] = nginx
    else:
        missing.append("nginx: not on this machine")
    for name, modules, start in (
        ("sglang-router", ("sglang_router",), sglang),
        ("ray-serve", ("ray.serve", "starlette"), ray_serve),  # ray[serve], not ray alone
    ):
        if all(installed(module) for module in modules):
            found[name] = start
        else:
            missing.append(f"{name}: not installed")
    return found, missing


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


CPUS = sorted(os.sched_getaffinity(0))
PROXY_CPUS = CPUS[:1]
OTHER_CPUS = CPUS[1:] or CPUS


@contextlib.contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Processes started in this block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def started(
    command: Sequence[str], port: int, cpus: Sequence[int] = PROXY_CPUS
) -> Iterator[subprocess.Popen[bytes]]:
    with pinned(cpus):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    try:
        wait_for(port)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def free_port() -> int:
    return ports.free_port()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="gwb-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
