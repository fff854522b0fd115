"""What a user is promised about services: a real cluster, a real HAProxy, real servers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.ports import free_port
from harness.waiting import WAIT_S, until

from shoal.client import ShoalError
from shoal.forms.pack import packed_service
from shoal.model.node import NodeIntent
from shoal.model.service import Probe, Route, Scale, ServiceSpec
from tests.gateway.test_certificates import presented
from tests.gateway.test_routing import certificate
from tests.gateway.world import Answer, get
from tests.live.cluster import Live
from tests.live.serving import Serving, serving_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with serving_cluster() as live:
        yield live


@pytest.fixture
def serving(cluster: Live, request: pytest.FixtureRequest) -> Iterator[Serving]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].strip("-")
    made = Serving(cluster, name)
    yield made
    with contextlib.suppress(ShoalError):
        cluster.client.stop_service(name)
    until(made.gone)


def test_what_is_served_answers_at_its_url(serving: Serving) -> None:
    view = serving.serve("v1", Scale(least=2, most=2))
    assert (view.ready, view.wanted, view.version) == (2, 2, 1)
    assert {replica.state for replica in view.replicas} == {"ready"}
    answer = serving.ask()
    assert (answer.status, answer.body) == (200, "v1")
    assert "x-request-id" in answer.headers
    again = serving.put(serving.replica("v1"), Scale(least=2, most=2))
    assert again.version == 1, "the same again changes nothing"


def test_when_it_is_called_ready_the_gateway_listens(serving: Serving) -> None:
    """The first service of a cluster starts the gateway; and after a death of both, the replicas
    answer before anybody can reach them."""

    def answers_when_ready() -> str:
        until(lambda: serving.view().state in ("ready", "idle"), more=serving.view)
        return serving.ask().body

    serving.put(serving.replica("v1"), Scale(least=0, most=1))
    assert answers_when_ready() == "v1", "with no replica wanted yet, it was not idle but unknown"
    gateway = int((serving.live.home.gateway / "haproxy.pid").read_text())
    serving.live.kill_controller()
    os.kill(gateway, signal.SIGKILL)
    assert answers_when_ready() == "v1"


def test_a_new_version_takes_over_without_a_failed_request(serving: Serving) -> None:
    serving.serve("v1", Scale(least=2, most=2))
    with serving.clients() as clients:
        clients.more()
        serving.serve("v2", Scale(least=2, most=2))
        clients.more()
        until(lambda: len(serving.view().replicas) == 2)
        clients.more()
    assert clients.failures == []
    assert clients.of("v1") and clients.of("v2")
    assert serving.ask().body == "v2"


def test_a_version_that_never_gets_ready_goes_back_by_itself(serving: Serving) -> None:
    serving.serve("v1")
    with serving.clients() as clients:
        assert serving.put(serving.shell("exit 3")).version == 2
        view = serving.settles(version=1)
        clients.more()
    assert clients.failures == []
    assert "version 2 failed 3 times" in view.why
    assert "it exited 3" in view.why
    assert set(clients.answers) == {"v1"}
    assert serving.serve("v3").version == 3, "a version is never numbered twice"


def test_a_replica_that_is_killed_is_replaced(serving: Serving) -> None:
    before = serving.serve("v1", Scale(least=2, most=2))
    killed, pid = sorted(serving.pids().items())[0]
    with serving.clients(method="GET") as clients:
        clients.more()
        os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            view = serving.view()
            jobs = {replica.job for replica in view.replicas}
            return view.ready == 2 and killed not in jobs

        until(replaced)
        clients.more()
    assert clients.failures == []
    assert killed in {replica.job for replica in before.replicas}
    assert serving.settles().version == 1


def test_requests_go_on_while_the_controller_is_dead(serving: Serving) -> None:
    serving.serve("v1", Scale(least=2, most=2))
    before = set(serving.pids().values())
    with serving.clients() as clients:
        clients.more()
        serving.live.kill_controller()
        clients.more(200)
        serving.settles()
        clients.more(200)
    assert clients.failures == []
    assert set(serving.pids().values()) == before, "its replicas were not disturbed"
    assert serving.serve("v2", Scale(least=2, most=2)).version == 2


@pytest.mark.outside("the load is made of real requests that a busy machine delays")
def test_replicas_follow_the_load_up_and_down(serving: Serving) -> None:
    scale = Scale(least=1, most=3, target=2, down_after_ms=1_000)
    serving.serve("v1", scale)
    with serving.clients("?ms=100", count=6) as clients:
        until(lambda: serving.view().ready == 3)
        clients.more()
    until(lambda: len(serving.view().replicas) == 1)
    assert clients.failures == []
    assert serving.ask().status == 200


def test_the_queue_inside_an_engine_asks_for_more_replicas(serving: Serving) -> None:
    """The gateway alone would be content with one."""
    serving.serve("engine", Scale(least=1, most=2, target=1_000))
    until(lambda: serving.view().wanted == 2, more=lambda: serving.view())
    why = [event.why for event in serving.scaled()]
    assert any("4 requests wait inside the engines" in text for text in why), why


def test_asleep_it_is_woken_by_a_request_that_waits(serving: Serving) -> None:
    scale = Scale(least=0, most=1, idle_ms=1_000, down_after_ms=1_000)
    serving.put(serving.replica("v1"), scale)
    until(lambda: any(event.wanted == 0 for event in serving.scaled()))  # "ready" may be brief
    assert serving.settles("idle").wanted == 0
    until(lambda: not serving.view().replicas)
    answer = serving.ask(method="POST")
    assert (answer.status, answer.body) == (200, "v1")


def test_a_stop_lets_a_stream_end(serving: Serving) -> None:
    serving.serve("v1")
    answers: list[Answer] = []

    def read_stream() -> None:
        answers.append(get(port, f"/{serving.name}/stream?n=40&every_ms=100"))

    port = serving.port
    reader = threading.Thread(target=read_stream)
    reader.start()
    until(lambda: serving.view().in_flight == 1)
    serving.live.client.stop_service(serving.name)
    assert serving.view().state == "stopping"
    with pytest.raises(ShoalError, match="is stopping"):
        serving.put(serving.replica("v2"))
    reader.join(WAIT_S)
    assert answers[0].body.count("data: v1") == 40
    until(serving.gone)


def test_a_port_that_is_taken_is_told_and_troubles_nobody_else(
    serving: Serving, cluster: Live
) -> None:
    other = Serving(cluster, "undisturbed")
    other.serve("v1")
    with socket.socket() as taken, other.clients() as clients:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        serving.put(serving.replica("v1"), route=Route(service=serving.name, port=port))
        view = serving.settles("failing")
        assert f"cannot listen on 127.0.0.1 port {port}" in view.why
        assert "\n" not in view.why
        other.serve("v2")  # it comes and goes as it likes
        clients.more()
    assert clients.failures == []
    view = serving.settles()  # the port is free now
    assert (view.url, get(port, "/").body) == (f"http://127.0.0.1:{port}/", "v1")
    cluster.client.stop_service(other.name)
    until(other.gone)


def test_a_certificate_file_becomes_a_secret_and_a_new_value_is_presented(
    serving: Serving, tmp_path: Path
) -> None:
    one, key = certificate(tmp_path, "one")
    two, other_key = certificate(tmp_path, "two")
    file, port = tmp_path / "web.pem", free_port()
    file.write_bytes(one + key)
    client = serving.live.client
    route = Route(service=serving.name, port=port, certificate=str(file))
    spec = ServiceSpec(name=serving.name, replica=serving.replica("v1"), route=route)
    with pytest.raises(ShoalError, match="is not the name of a secret"):
        client.submit_service(spec)
    packed = packed_service(client, spec, wanted=False)
    client.submit_service(packed)
    assert serving.settles().url == f"https://127.0.0.1:{port}/"
    assert presented(port) == one.decode().strip()
    client.set_secret(packed.way.certificate, two + other_key)
    until(lambda: presented(port) == two.decode().strip())
    client.set_secret(packed.way.certificate, b"nonsense")
    assert "is not a PEM file" in serving.settles("failing").why
    assert presented(port) == two.decode().strip(), "it stays as it was"
    client.set_secret(packed.way.certificate, one + key)
    serving.settles()


def test_a_node_is_drained_without_a_failed_request(cluster: Live, serving: Serving) -> None:
    view = serving.serve("v1")
    (first,) = view.replicas
    try:
        with serving.clients() as clients:
            clients.more()
            cluster.client.set_intent(first.node, NodeIntent.DRAINING)
            until(lambda: [r.job for r in serving.view().replicas] != [first.job])
            until(lambda: len(serving.view().replicas) == 1)
            clients.more()
        assert clients.failures == []
        assert serving.view().replicas[0].node != first.node
    finally:
        cluster.client.set_intent(first.node, NodeIntent.OPEN)


def test_the_gateways_own_port_is_no_services(serving: Serving) -> None:
    serving.serve("v1")
    route = Route(service=serving.name, port=serving.port)
    with pytest.raises(ShoalError, match=f"port: {serving.port} is the port that all"):
        serving.put(serving.replica("v1"), route=route)


def test_a_probe_that_never_answers_is_told(serving: Serving) -> None:
    probe = Probe(path="/hang", timeout_ms=500, start_ms=1_000)
    serving.put(serving.replica("v1"), probe=probe)
    view = serving.settles("failing")
    assert "its probe /hang did not answer within 1s" in view.why


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scale": {"least": 3, "most": 1}}, "replicas"),
        ({"probe": {"path": "health"}}, "probe"),
        ({"route": {"service": "bad", "certificate": "/x.pem"}}, "certificate"),
        ({"replica": {"command": ["true"], "gpus": 200}}, "gpus"),
        ({"replica": {"command": ["true"], "members": 2, "members_max": 3}}, "members"),
    ],
)
def test_what_cannot_be_served_is_refused(
    cluster: Live, change: dict[str, object], field: str
) -> None:
    fields = {"name": "bad", "replica": {"command": ["true"]}, **change}
    with pytest.raises(ShoalError) as refusal:
        cluster.client.submit_service(msgspec.convert(fields, ServiceSpec))
    assert refusal.value.field == field
    assert "bad" not in [view.name for view in cluster.client.services()]


def test_what_the_gateway_sees_is_kept_as_a_curve(serving: Serving) -> None:
    serving.serve("v1", Scale(least=1, most=1))
    series = serving.live.client.service_series

    def busy() -> bool:
        told = series(serving.name)
        return any(told.requests_per_s) and any(value is not None for value in told.p99_ms)

    with serving.clients() as clients:
        clients.more()
        until(busy)
    told = series(serving.name)
    assert told.ready[-1] == 1 and told.wanted[-1] == 1
    assert told.at_ms == sorted(told.at_ms)
    assert len(told.at_ms) == len(told.p50_ms) == len(told.queued)


def test_a_replica_that_hangs_is_replaced_and_replicas_are_spread(serving: Serving) -> None:
    """A process that was stopped accepts connections, and answers none."""
    probe = Probe(every_ms=200, failures=3)
    serving.put(serving.replica("v1"), Scale(least=2, most=2), probe)
    serving.settles()
    jobs = [serving.live.client.job(replica.job) for replica in serving.view().replicas]
    assert len({job.gang[0].node for job in jobs}) == 2
    hung = jobs[0].id
    os.kill(serving.pids()[hung], signal.SIGSTOP)
    assert serving.live.wait(hung) == "failed"
    assert "it hangs" in serving.live.client.job(hung).why
    until(lambda: serving.view().ready == 2)
    left = {replica.job for replica in serving.view().replicas}
    assert jobs[1].id in left and hung not in left
