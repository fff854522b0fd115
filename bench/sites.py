"""One service at three sites: who serves a request, what that costs, and what a dead site costs.

    python -m bench.sites                 about six minutes
    python -m bench.sites --quick         half a minute

Sites a, b and c with a gateway and a replica of 8 slots, 100 ms for a request. Between them are
lines in user space: a-b 5, a-c 80, b-c 150 ms there and back. Open load at all three: "one" asks
for 130 % of what a can do, "two" for 120 % of both a and b. Then the gateway and the replica of b
are killed with SIGKILL under load, several times. All of it for Shoal, and for HAProxy alone with
the replicas of other sites as backup servers, and in turns with those of its own. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from harness.distance import Line, line
from harness.sites import Sites, free_ports
from harness.waiting import until

from bench.figures import machine, percentile, table
from bench.gateway_load import Sample
from bench.gateway_peers import folder, wait_for
from shoal.gateway.binary import find_binary
from shoal.gateway.stats import Runtime
from shoal.model.service import Replica, Route

HERE = Path(__file__).parent
NAMES = "abc"
TRIPS_S = {frozenset("ab"): 0.005, frozenset("ac"): 0.080, frozenset("bc"): 0.150}
SLOTS, MEAN_MS = 8, 100.0
CAPACITY_PER_S = SLOTS * 1000 / MEAN_MS
LOADS = {"one": {"a": 1.3, "b": 0.4, "c": 0.4}, "two": {"a": 1.2, "b": 1.2, "c": 0.2}}
KILL_LOAD = {"a": 1.3, "c": 0.4}
ROUTE = Route(service="chat", concurrency=SLOTS)
LOOK_S = 0.5
KILL_AFTER_S, AFTER_KILL_S = 1.5, 2.5


class System:
    """A way to serve all three sites: `ports` of the entries, `lines` between them."""

    ports: Mapping[str, int]
    lines: Mapping[tuple[str, str], Line]
    path: str

    def up(self, here: str, there: str) -> bool:
        """Whether requests may go there, by the proxy's own word."""
        raise NotImplementedError

    def down(self, here: str, there: str) -> bool:
        return not self.up(here, there)

    def kill(self, name: str) -> None:
        raise NotImplementedError

    def restore(self, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Shoal(System):
    """Each site's gateway, driven as its head drives it."""

    def __init__(self, ports: Mapping[str, int], directory: Path) -> None:
        self.sites = Sites(NAMES, TRIPS_S, directory)
        self.lines = self.sites.lines
        for name, site in self.sites.all.items():
            site.replicas = (Replica(id=f"{name}1", address="127.0.0.1", port=ports[name]),)
            site.serve(ROUTE)
        self.ports = {name: site.port for name, site in self.sites.all.items()}
        self.path = "/chat/"
        self._dead: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            for name, site in self.sites.all.items():
                if name not in self._dead:
                    site.look()

    def up(self, here: str, there: str) -> bool:
        return _up(self.sites.all[here].folder, "_far-chat", there)

    def kill(self, name: str) -> None:
        self._dead.add(name)
        self.sites.all[name].kill()

    def restore(self, name: str) -> None:
        self._dead.discard(name)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.sites.close()


class Plain(System):
    """HAProxy alone at each site. It reaches the replicas of the other sites directly."""

    def __init__(self, ports: Mapping[str, int], directory: Path, *, backup: bool) -> None:
        self._stack = ExitStack()
        self.ports = dict(zip(NAMES, free_ports(3), strict=True))
        self.path = "/"
        lines = self.lines = dict[tuple[str, str], Line]()
        self._folders = {name: directory / name for name in NAMES}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for here in NAMES:
            servers = [_server(here, ports[here], "")]
            for there in NAMES.replace(here, ""):
                delay_s = TRIPS_S[frozenset((here, there))] / 2
                made = self._stack.enter_context(line(("127.0.0.1", ports[there]), delay_s))
                lines[here, there] = made
                servers.append(_server(there, made.address[1], " backup" if backup else ""))
            self._folders[here].mkdir()
            balance = "leastconn" if backup else "roundrobin"
            text = PLAIN.format(port=self.ports[here], balance=balance, servers="".join(servers))
            (self._folders[here] / "it.cfg").write_text(text)
            self.restore(here)

    def up(self, here: str, there: str) -> bool:
        return _up(self._folders[here], "all", there)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def restore(self, name: str) -> None:
        self._processes[name] = subprocess.Popen(
            [find_binary().path, "-db", "-f", "it.cfg"],
            cwd=self._folders[name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self.ports[name])

    def close(self) -> None:
        for name in NAMES:
            self.kill(name)
        self._stack.close()


PLAIN = """global
    nbthread 1
    stats socket unix@runtime.sock
defaults
    mode http
    timeout client 60s
    timeout server 60s
    timeout connect 1s
    timeout queue 60s
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response
frontend entry
    bind 127.0.0.1:{port}
    default_backend all
backend all
    balance {balance}
    option allbackups
    option httpchk GET /
{servers}"""


def _server(name: str, port: int, more: str) -> str:
    check = "check inter 500ms fastinter 100ms fall 2 rise 1 observe layer4 error-limit 1"
    return (
        f"    server {name} 127.0.0.1:{port} maxconn {SLOTS} {check} on-error sudden-death{more}\n"
    )


def _up(directory: Path, backend: str, server: str) -> bool:
    rows = Runtime(directory / "runtime.sock").table()
    return any(
        row["status"].startswith("UP")
        for row in rows
        if (row["pxname"], row["svname"]) == (backend, server)
    )


Start = Callable[[Mapping[str, int], Path], System]
SYSTEMS: dict[str, Start] = {
    "shoal": Shoal,
    "backup": lambda ports, directory: Plain(ports, directory, backup=True),
    "in turns": lambda ports, directory: Plain(ports, directory, backup=False),
}


class Replicas:
    """One at each site. The status of an answer says whose it is."""

    def __init__(self, mean_ms: float) -> None:
        self.ports = dict(zip(NAMES, free_ports(3), strict=True))
        self._mean_ms = mean_ms
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        number = NAMES.index(name)
        words = (self.ports[name], SLOTS, self._mean_ms, 1.0, number, 200 + number)
        self._processes[name] = subprocess.Popen(
            [sys.executable, str(HERE / "gateway_replica.py"), *map(str, words)],
            stdout=subprocess.DEVNULL,
        )
        wait_for(self.ports[name])

    def kill(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def close(self) -> None:
        for name in NAMES:
            self.kill(name)


@contextlib.contextmanager
def loaded(
    system: System, shares: Mapping[str, float], seconds: float, warm_up_s: float
) -> Iterator[dict[str, list[Sample]]]:
    """The answers, once the context is over."""
    asking, found = {}, dict[str, list[Sample]]()
    for seed, (name, share) in enumerate(shares.items()):
        port, rate = system.ports[name], share * CAPACITY_PER_S
        words = [port, system.path, rate, seconds, warm_up_s, "GET", seed]
        asking[name] = subprocess.Popen(
            [sys.executable, str(HERE / "gateway_load.py"), *map(str, words)],
            stdout=subprocess.PIPE,
        )
    yield found
    for name, process in asking.items():
        said, _ = process.communicate(timeout=300)
        found[name] = msgspec.json.decode(said, type=list[Sample])


def spread(samples: list[Sample], home: str) -> dict[str, Any]:
    latencies = [sample.latency_s * 1000 for sample in samples]
    return {
        "requests": len(samples),
        "failed": sum(sample.status not in (200, 201, 202) for sample in samples),
        "home": round(_share(samples, home), 3),
        **{name: round(_share(samples, name), 3) for name in NAMES if name != home},
        "p50_ms": round(percentile(latencies, 50)),
        "p99_ms": round(percentile(latencies, 99)),
    }


def _share(samples: list[Sample], name: str) -> float:
    return sum(one.status == 200 + NAMES.index(name) for one in samples) / max(1, len(samples))


def under_load(system: System, seconds: float, warm_up_s: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, shares in LOADS.items():
        before = {pair: one.carried for pair, one in system.lines.items()}
        with loaded(system, shares, seconds, warm_up_s) as found:
            pass
        carried = sum(one.carried - before[pair] for pair, one in system.lines.items())
        figures[name] = {site: spread(samples, site) for site, samples in found.items()}
        everybody = [sample.latency_s * 1000 for one in found.values() for sample in one]
        figures[name]["all_p50_ms"] = round(percentile(everybody, 50))
        figures[name]["all_p99_ms"] = round(percentile(everybody, 99))
        abroad = sum((1 - _share(samples, site)) * len(samples) for site, samples in found.items())
        figures[name]["elsewhere"] = round(abroad / len(everybody), 3)
        figures[name]["cross_kb_per_s"] = round(carried / (seconds + warm_up_s) / 1000)
    return figures


def killed(system: System, replicas: Replicas, times: int) -> dict[str, Any]:
    """Everything of site b, at once and again; under load and, in between, without any."""
    left_ms: list[float] = []
    idle_ms: list[float] = []
    lost = asked = 0
    slowest_ms = 0.0
    for number in range(times):
        idle = number % 4 == 3
        shares = {} if idle else KILL_LOAD
        with loaded(system, shares, KILL_AFTER_S + AFTER_KILL_S, 0) as found:
            time.sleep(KILL_AFTER_S + 0.1 * (number % 5))
            began_s = time.monotonic()
            system.kill("b")
            replicas.kill("b")
            for here in "ac":
                until(partial(system.down, here, "b"), f"{here} sees it", look_s=0.002)
            (idle_ms if idle else left_ms).append((time.monotonic() - began_s) * 1000)
        for samples in found.values():
            asked += len(samples)
            lost += sum(sample.status not in (200, 201, 202) for sample in samples)
            late = [one.latency_s * 1000 for one in samples if one.begun_s > began_s]
            slowest_ms = max(slowest_ms, *late)
        replicas.start("b")
        system.restore("b")
        for here in "ac":
            until(partial(system.up, here, "b"), f"b is back at {here}")
    times_ms = [*left_ms, *idle_ms]
    return {
        "kills": times,
        "asked": asked,
        "failed": lost,
        "left_p50_ms": round(statistics.median(times_ms)),
        "left_max_ms": round(max(times_ms)),
        "slowest_ms": round(slowest_ms),
    }


def added(count: int) -> dict[str, float]:
    """Requests to a, which has no replica, beside the same to b, which serves both. Replicas answer
    at once, one request at a time, connections are kept."""
    with folder() as directory, contextlib.closing(Replicas(0.01)) as replicas:
        system = Shoal(replicas.ports, directory)
        with contextlib.closing(system):
            site = system.sites.all["a"]
            site.replicas = ()
            site.serve(ROUTE)
            until(lambda: system.up("a", "b"))
            times = {name: _times_ms(system.ports[name], count) for name in "ab"}
            trip_ms = TRIPS_S[frozenset("ab")] * 1000
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "round_trip_ms": trip_ms,
        "at_b_p50_ms": round(medians["b"], 2),
        "from_a_p50_ms": round(medians["a"], 2),
        "added_p50_ms": round(medians["a"] - medians["b"] - trip_ms, 2),
    }


def _times_ms(port: int, count: int) -> list[float]:
    times = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as one:
        for _ in range(count):
            began_ns = time.perf_counter_ns()
            one.request("GET", "/chat/")
            assert one.getresponse().read() == b"ok"
            times.append((time.perf_counter_ns() - began_ns) / 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="shorter, and fewer kills")
    parser.add_argument("--only", choices=list(SYSTEMS), help="one of the systems")
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    seconds, warm_up_s, kills = (3.0, 1.0, 2) if arguments.quick else (20.0, 4.0, arguments.kills)
    print(machine())
    figures: dict[str, Any] = {"added": added(50 if arguments.quick else 500)}
    print("added:", figures["added"])
    for name, start in SYSTEMS.items():
        if arguments.only in (None, name):
            figures[name] = measured(start, seconds, warm_up_s, kills)
            print(f"{name}: {figures[name]['killed']}")
    print(json.dumps(figures))


def measured(start: Start, seconds: float, warm_up_s: float, kills: int) -> dict[str, Any]:
    with folder() as directory, contextlib.closing(Replicas(MEAN_MS)) as replicas:
        system = start(replicas.ports, directory)
        with contextlib.closing(system):
            for here, there in itertools.permutations(NAMES, 2):
                until(partial(system.up, here, there), "all see each other")
            found = under_load(system, seconds, warm_up_s)
            for name, load in found.items():
                sites = [(site, *load[site].values()) for site in LOADS[name]]
                heads = ("site", "requests", "failed", "at home", "next", "last", "p50", "p99")
                print(f"\n{name}: {load['elsewhere']:.1%} elsewhere, {load['cross_kb_per_s']} kB/s")
                print(table(heads, sites))
            return {**found, "killed": killed(system, replicas, kills)}


if __name__ == "__main__":
    main()
