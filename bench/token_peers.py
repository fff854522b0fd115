"""Starts what `bench/tokens.py` compares over HTTP, each in front of the same simulated engines."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from harness.waiting import until

from bench.gateway_peers import OTHER_CPUS, folder, free_port, started
from bench.token_load import Target
from shoal.gateway.binary import find_binary
from shoal.gateway.gateway import Gateway
from shoal.machine.files import write_private
from shoal.model.service import GatewayEntry, Replica, Route, Routing, Served, Wanted
from shoal.model.tokens import RoutedReplica, RoutedService, RouterWanted

Start = Callable[[Sequence[int]], contextlib.AbstractContextManager[Target]]

SERVICE = "chat"
READY_S = 60.0
OURS = {
    "least-loaded": Routing.LEAST_LOADED,
    "p2c": Routing.P2C,
    "prefix": Routing.PREFIX,
    "cache": Routing.CACHE,
}


@contextlib.contextmanager
def shoal(routing: Routing, ports: Sequence[int]) -> Iterator[Target]:
    """The gateway; with `cache` it starts the router by itself."""
    with folder() as directory:
        gateway = Gateway(directory)
        port = free_port()
        replicas = tuple(
            Replica(id=f"r{number}", address="127.0.0.1", port=at)
            for number, at in enumerate(ports)
        )
        served = Served(route=Route(service=SERVICE, routing=routing), replicas=replicas)
        gateway.apply(Wanted(entry=GatewayEntry(port=port), services=(served,)))
        try:
            ready(port, f"/{SERVICE}/v1/models")
            yield Target(port=port, path=f"/{SERVICE}/v1/chat/completions")
        finally:
            gateway.stop(grace_s=0)


@contextlib.contextmanager
def router(ports: Sequence[int]) -> Iterator[Target]:
    """The token router without a proxy before it."""
    with folder() as directory, RouterProcess(directory, ports):
        headers = (f"X-Shoal-Service: {SERVICE}",)
        yield Target(socket=str(directory / "router.sock"), headers=headers)


class RouterProcess:
    """Starts where its folder says what is wanted, as after the death of everything else."""

    def __init__(self, directory: Path, ports: Sequence[int]) -> None:
        self.directory = directory
        replicas = tuple(
            RoutedReplica(id=f"r{number}", address="127.0.0.1", port=at)
            for number, at in enumerate(ports)
        )
        wanted = RouterWanted(services=(RoutedService(name=SERVICE, replicas=replicas),))
        write_private(directory / "router.json", msgspec.json.encode(wanted))
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "shoal.router", str(self.directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        until(self._listens, "the router listens", within_s=READY_S)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.directory / "router.sock"))
            except OSError:
                return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[Target]:
    """HAProxy as it comes, and the next replica for each request."""
    port = free_port()
    lines = [
        "defaults",
        "    mode http",
        "    option http-no-delay",
        "    timeout connect 1s",
        "    timeout client 600s",
        "    timeout server 600s",
        "listen all",
        f"    bind 127.0.0.1:{port}",
        "    balance roundrobin",
        *(f"    server s{at} 127.0.0.1:{at}" for at in ports),
    ]
    with folder() as directory:
        (directory / "plain.cfg").write_text("\n".join(lines) + "\n")
        command = [str(find_binary().path), "-f", str(directory / "plain.cfg")]
        with started(command, port, OTHER_CPUS):
            yield Target(port=port)


@contextlib.contextmanager
def peer(python: Path, module: str, ports: Sequence[int]) -> Iterator[Target]:
    """sglang-router or vllm-router, with the rule that knows about caches and its defaults."""
    port, figures = free_port(), free_port()
    command = [str(python), "-m", f"{module}.launch_router", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--policy", "cache_aware", "--log-level", "error"]
    command += ["--prometheus-port", str(figures), "--prometheus-host", "127.0.0.1"]
    command += ["--worker-urls", *(f"http://127.0.0.1:{at}" for at in ports)]
    with started(command, port, OTHER_CPUS):
        ready(port, "/v1/models")
        yield Target(port=port)


def ready(port: int, path: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def available(python: Path) -> tuple[dict[str, Start], list[str]]:
    """What can run here, and a line about each that cannot."""
    found: dict[str, Start] = {"round-robin": round_robin}
    found["router alone"] = router
    found |= {name: functools.partial(shoal, routing) for name, routing in OURS.items()}
    missing = []
    for name, module in (("sglang-router", "sglang_router"), ("vllm-router", "vllm_router")):
        if has(python, module):
            found[name] = functools.partial(peer, python, module)
        else:
            missing.append(f"{name}: not there; --peers names a Python that has it")
    return found, missing


def has(python: Path, module: str) -> bool:
    return (
        python.exists()
        and not subprocess.run(
            [str(python), "-c", f"import {module}.launch_router"], capture_output=True, check=False
        ).returncode
    )
