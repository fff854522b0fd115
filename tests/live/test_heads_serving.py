"""A service behind the gateways of two heads: requests through one of them do not notice a roll-out
that the other decides, nor its end."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.heads import Head, Pair, pair
from harness.waiting import until

from shoal.client import Client
from shoal.model.job import JobSpec
from shoal.model.service import Scale, ServiceSpec
from shoal.model.views import ServiceView
from tests.gateway.world import ROOT, Clients, get
from tests.live.serving import need_gateway, replica_ports
from tests.needs import need

need("postgres")

NAME = "web"


@pytest.fixture(scope="module")
def heads() -> Iterator[Pair]:
    need_gateway()
    with pair() as found:
        policy = found.first.client.policy()
        found.first.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
        yield found


def put(head: Head, version: str) -> None:
    script = f"exec {sys.executable} -m tests.gateway.replica $PORT {version}"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    replica = JobSpec(command=("sh", "-c", script), env=env, workdir=str(ROOT), cpu_milli=100)
    spec = ServiceSpec(name=NAME, replica=replica, scale=Scale(least=2, most=2))
    head.client.submit_service(spec)


def view(head: Head) -> ServiceView:
    return head.client.service(NAME)


def port(head: Head) -> int:
    return urlsplit(view(head).url).port or 0


def _answers(at: int) -> bool:
    with contextlib.suppress(OSError):
        return get(at, f"/{NAME}/").status == 200
    return False


@pytest.mark.soak
def test_requests_through_a_standby_do_not_notice_that_the_leader_is_lost(heads: Pair) -> None:
    first, second = heads.heads
    put(second, "v1")
    until(lambda: (view(second).state, view(second).ready) == ("ready", 2), "two replicas")
    assert port(first) != port(second), "a URL names the gateway of the head that was asked"
    for head in (first, second):  # a gateway follows what the leader decides, a moment later
        until(functools.partial(_answers, port(head)), f"the gateway of {head.name}")
    with (
        Clients(port(first), f"/{NAME}/", 1) as at_first,
        Clients(port(second), f"/{NAME}/") as load,
    ):
        at_first.more()
        load.more()
        until(lambda: view(first).requests_per_s > 0, "the standby's requests at the leader")
        put(second, "v2")
        until(lambda: (view(first).version, view(first).state) == (2, "ready"), "version 2")
        load.more()
        assert load.of("v2") and at_first.of("v2")
        with Client(f"{first.url},{second.url}", first.home.read_token()) as client:
            seen = client.status().last_seq
            first.kill()
            load.more(100)  # nobody leads yet
            until(lambda: heads.roles().get(second.name) == "leads", "the next leader")
            assert client.lent(patience_s=60).status().last_seq >= seen
            assert client.url == second.url
        load.more(100)
        until(lambda: view(second).state == "ready", "the replicas to be ready")
        at_first.more()
    assert load.failures == []
    assert at_first.failures == [], "the gateway of a head that is lost serves on"
    assert view(second).version == 2
