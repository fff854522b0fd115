"""A hostile user takes ports as fast as it can: a replica's while it loads, and the gateway's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
import pytest
from harness.waiting import until

from shoal.control.lifecycle import take_down
from shoal.core.state.events.runs import JobRequeued, MemberLost
from shoal.gateway.binary import Presence
from shoal.machine.listening import holder_text, listeners
from shoal.model.job import Fault
from tests.gateway.world import get
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway
from tests.needs import need_root

GOOD, EVIL = 61_921, 61_922  # Unix users of two tenants
COUNT = 40

# Loads its model for a while, and only then binds its port.
SLOW = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
words = ["-m", "tests.gateway.replica", os.environ["PORT"], "own"]
os.execvp(sys.executable, [sys.executable, *words])
"""
# A gang whose first member listens where the others would look for it.
MEETS = """
import os, socket
if os.environ["RANK"] == "0":
    socket.create_server(("", int(os.environ["MASTER_PORT"]))).close()
"""
# What a tenant may bind, one line for each attempt.
BINDS = """
import json, os, socket
told = {}
own = int(os.environ["PET_MASTER_PORT"])
first, *_, last = (port for port in range(*json.loads(os.environ["FACTS"])) if port != own)
tries = {"first": first, "last": last, "before": first - 2, "any": 0, "torchrun": own}
for name, port in tries.items():
    with socket.socket() as door:
        try:
            door.bind(("127.0.0.1", port))
            told[name] = "bound"
        except OSError as error:
            told[name] = error.strerror
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    need_root()
    need_gateway()
    with live_cluster(nodes=1, gpus=2) as live:
        policy = live.client.policy()
        range_ = {"port_first": a_range(COUNT), "port_count": COUNT}
        live.client.set_policy(msgspec.structs.replace(policy, **range_))
        live.client.add_tenant("good", uid=GOOD)
        live.client.add_tenant("evil", uid=EVIL)
        yield live


def a_range(count: int) -> int:
    """The first of so many ports that nobody listens on."""
    taken = {one.port for one in listeners()}
    for first in random.sample(range(30_000, 32_000), 100):
        if taken.isdisjoint(range(first, first + count)):
            return first
    raise AssertionError("no ports are free")


@contextmanager
def hog(ports: range, heard: Path) -> Iterator[int]:
    """A process of another user, which no node of the cluster has started."""
    read, write = os.pipe()
    with heard.open("a", buffering=1) as file:
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(EVIL)
                os.setuid(EVIL)
                take_all(ports, write, file)
            finally:
                os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 5) == b"begun"
        yield pid
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def take_all(ports: range, begun: int, heard: TextIO) -> None:
    """Takes every port that it can get, and writes down what anybody sends to it."""
    held: dict[int, socket.socket] = {}
    chosen = selectors.DefaultSelector()
    while True:
        for port in ports:
            if port not in held:
                with contextlib.suppress(OSError):
                    held[port] = socket.create_server(("127.0.0.1", port))
                    chosen.register(held[port], selectors.EVENT_READ)
        if begun:
            os.write(begun, b"begun")
            begun = 0
        for key, _ in chosen.select(0.01):
            with contextlib.suppress(OSError), key.fileobj.accept()[0] as line:  # type: ignore[union-attr]
                line.settimeout(2)
                heard.write(f"{line.recv(65_536)!r}\n")
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmine")


def lost(live: Live) -> list[MemberLost]:
    events = live.client.events(after=-1000, limit=1000).events
    return [one.event for one in events if isinstance(one.event, MemberLost)]


def test_a_thief_of_a_loading_replicas_port_gets_no_request(live: Live, tmp_path: Path) -> None:
    """It takes every port of the range while the replica loads. The node sees whose they are."""
    policy, heard, loaded = live.client.policy(), tmp_path / "heard", tmp_path / "loaded"
    ports = range(policy.port_first, policy.port_first + policy.port_count)
    service = Serving(live, "victim")
    service.put(service.shell(f"exec {sys.executable} -c '{SLOW}' {loaded}"))
    first = service.view().replicas[0].job
    assert live.wait(first, "running") == "running"
    with hog(ports, heard) as thief:
        until(lambda: len(lost(live)) >= 2, more=lambda: service.view().why)
        loaded.touch()
        for _ in range(3):
            with contextlib.suppress(OSError):  # the gateway starts, or waits for a replica
                headers = {"Authorization": "Bearer secret"}
                answer = get(service.port, "/victim/", headers=headers, timeout_s=1)
                assert answer.status == 503
        assert service.view().ready == 0
        assert {event.fault for event in lost(live)} == {Fault.TAKEN, Fault.PORT}
        assert any(f"process {thief}" in event.why for event in lost(live))
    assert service.settles().ready == 1
    assert service.ask().body == "own"
    assert heard.read_text() == "", "not even a probe"
    assert live.client.job(first).failures == 0
    events = live.client.events(after=-1000, limit=1000).events
    again = [one.event for one in events if isinstance(one.event, JobRequeued)]
    assert all("does not count as a retry" in event.why for event in again if event.job == first)


def test_a_gang_whose_port_is_taken_runs_again_at_no_cost(live: Live, tmp_path: Path) -> None:
    policy = live.client.policy()
    ports = range(policy.port_first, policy.port_first + policy.port_count)
    with hog(ports, tmp_path / "heard") as thief:
        job = live.client.submit(live.spec(sys.executable, "-c", MEETS, members=2)).id
        until(lambda: any(one.job == job for one in lost(live)))
    assert live.wait(job) == "succeeded", live.output(job)
    first = next(one for one in lost(live) if one.job == job)
    assert first.fault is Fault.PORT
    assert f"is not free on this node: process {thief}" in first.why
    view = live.client.job(job)
    assert (view.failures, view.attempt > 1) == (0, True)


def test_a_tenants_job_cannot_bind_a_port_that_is_not_its_own(live: Live) -> None:
    need_binding(live)
    policy = live.client.policy()
    env = {"FACTS": json.dumps([policy.port_first, policy.port_first + policy.port_count])}
    spec = live.spec(sys.executable, "-c", BINDS, tenant="evil", env=env)
    job = live.client.submit(spec).id
    assert live.wait(job) == "succeeded", live.output(job)
    told = json.loads(live.output(job).splitlines()[-1])
    assert told.pop("first") == told.pop("last") == "Operation not permitted"
    if told["torchrun"] == "Address already in use":
        del told["torchrun"]  # by another program of this machine: the kernel let it try
    assert set(told.values()) == {"bound"}, told


def test_a_tenants_gang_binds_the_port_it_was_given(live: Live) -> None:
    need_binding(live)
    spec = live.spec(sys.executable, "-c", MEETS, tenant="good", members=2, cpu_milli=100)
    job = live.client.submit(spec).id
    assert live.wait(job) == "succeeded", live.output(job)


def need_binding(live: Live) -> None:
    lacks = [text for text in live.client.nodes()[0].unenforced if "ports" in text]
    if lacks:
        pytest.skip(lacks[0])


def test_nobody_takes_the_gateways_port_while_the_proxy_is_down(live: Live, tmp_path: Path) -> None:
    service = Serving(live, "steady")
    service.serve("one")
    port, heard = service.port, tmp_path / "heard"
    proxy = Presence(live.home.gateway)
    with hog(range(port, port + 1), heard):
        for _ in range(3):
            before = proxy.pid()
            assert before is not None
            os.kill(before, signal.SIGKILL)
            live.kill_controller()
            until(lambda: _answers(service), more=lambda: holder_text(port))
            assert proxy.pid() != before
    assert heard.read_text() == ""


def _answers(service: Serving) -> bool:
    with contextlib.suppress(Exception):
        return service.ask().body == "one"
    return False


def test_a_port_that_was_taken_while_the_cluster_was_down_is_an_alarm_that_names_the_process(
    live: Live, tmp_path: Path
) -> None:
    """It comes last: it takes the cluster down."""
    service = Serving(live, "steady")
    service.serve("one")
    port = service.port
    take_down(live.home, lambda _: None)
    with hog(range(port, port + 1), tmp_path / "heard") as thief:
        until(lambda: f"process {thief}" in holder_text(port))
        live.restart()
        until(
            lambda: alarm(live, f"process {thief}"), "no alarm", lambda: live.client.status().alarms
        )
        assert f"gateway: cannot listen on 127.0.0.1 port {port}" in alarm(live, str(thief))
    until(lambda: _answers(service), "when it ends, services go on")
    until(lambda: not alarm(live, "cannot listen"))


def alarm(live: Live, words: str) -> str:
    return next((text for text in live.client.status().alarms if words in text), "")
