"""Measures what TLS adds to `shoal ps`, and to a request on a connection that is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import ratio, spread
from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.node import NodeSpec

COMMANDS = 40
CALLS = 500
SHOAL = str(Path(sys.executable).with_name("shoal"))


def measure(quick: bool = False) -> dict[str, float]:
    """`shoal ps` through the socket file and over TLS, one after the other, so that both see the
    same machine."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-tls-"))
    home = Home(folder / "home")
    node = NodeSpec(id="n1", gpus=1, cpu_milli=1000, memory_mb=1000)
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config"), "SHOAL_HOME": ""}
    try:
        bring_up(home, ClusterConfig(nodes=(node,), port=0, host="0.0.0.0"), lambda _: None)
        line = _shoal(environment, "login", "--show", "--home", str(home.path)).split()[1:]
        _shoal(environment, *line, "--context", "bench", "--token-file", str(home.token))
        local, secure = [], []
        for _ in range(COMMANDS // (4 if quick else 1)):
            local.append(_wall_ns(environment, "ps", "--home", str(home.path)))
            secure.append(_wall_ns(environment, "ps", "--context", "bench"))
        certificate = (home.tls / "ca.pem").read_text()
        url = f"https://localhost:{line[1].rpartition(':')[2]}"
        calls = CALLS // (10 if quick else 1)
        with Client.at_home(home.path) as client:
            kept_local_ms = _call_ms(client, calls)
        with Client(url, home.read_token(), certificate=certificate) as client:
            kept_tls_ms = _call_ms(client, calls)
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(folder, ignore_errors=True)
    more = [b - a for a, b in zip(local, secure, strict=True)]
    local_ms, tls_ms = spread(local).median_ms, spread(secure).median_ms
    return {
        "ps_socket_ms": local_ms,
        "ps_tls_ms": tls_ms,
        "ps_more_ms": spread(more).median_ms,
        "ps_ratio": ratio(tls_ms, local_ms),
        "kept_call_socket_ms": kept_local_ms,
        "kept_call_tls_ms": kept_tls_ms,
        "kept_call_ratio": ratio(kept_tls_ms, kept_local_ms),
    }


def _shoal(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run([SHOAL, *words], env=environment, capture_output=True, check=True)
    return done.stdout.decode()


def _wall_ns(environment: dict[str, str], *words: str) -> int:
    started = time.perf_counter_ns()
    _shoal(environment, *words)
    return time.perf_counter_ns() - started


def _call_ms(client: Client, calls: int) -> float:
    client.status()
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        client.status()
        times.append(time.perf_counter_ns() - started)
    return spread(times).median_ms


if __name__ == "__main__":
    print(measure())
