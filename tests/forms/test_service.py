"""What people write about a service, as flags or in a file, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.request import assemble
from shoal.forms.failure import BadField
from shoal.forms.job import to_service
from shoal.forms.request import JOB
from shoal.model.job import Restart
from shoal.model.service import Probe, Route, Routing, Scale, ServiceSpec
from shoal.model.tokens import Goals
from tests.cli.conftest import Shoal, assert_one_clear_line

LEAST: dict[str, Any] = {"name": "chat", "command": "python server.py"}


def made(**fields: Any) -> ServiceSpec:
    return to_service({**LEAST, **fields})


def test_what_is_not_said_is_as_usual() -> None:
    spec = made()
    assert spec.replica.command == ("python", "server.py")
    assert (spec.replica.priority, spec.replica.cpu_milli) == (100, 1000)
    assert spec.replica.restart is Restart.ON_NODE_LOSS
    assert (spec.scale, spec.probe, spec.route) == (Scale(), Probe(), None)


def test_every_field_arrives_where_it_belongs() -> None:
    spec = made(
        replicas="1..8",
        target=4,
        idle="30s",
        probe="/health",
        ready_within="20m",
        route="prefix",
        queue=50,
        rate=7,
        port=8443,
        certificate="/etc/chat.pem",
        drain="2m",
        gpus=1,
        cpus=0.5,
        priority=7,
        env={"A": 1},
    )
    assert spec.scale == Scale(least=1, most=8, target=4, idle_ms=30_000)
    assert spec.probe == Probe(path="/health", start_ms=1_200_000)
    assert spec.drain_ms == 120_000
    assert spec.route == Route(
        service="chat",
        routing=Routing.PREFIX,
        concurrency=4,
        queue_max=50,
        rate_per_s=7,
        port=8443,
        certificate="/etc/chat.pem",
    )
    replica = spec.replica
    assert (replica.gpus, replica.cpu_milli, replica.priority) == (1, 500, 7)
    assert replica.env == {"A": "1"}


def test_a_route_of_its_own_keeps_the_usual_limit_at_a_replica() -> None:
    assert made(queue=50).way.concurrency == made().way.concurrency == Scale().target


def test_a_header_or_a_cookie_alone_means_sticky() -> None:
    assert made(sticky_header="x-user").way.routing is Routing.STICKY
    assert made(sticky_cookie="sid", route="sticky").way.sticky_cookie == "sid"


def test_a_language_model_has_goals_adapters_and_who_may_call() -> None:
    goals = {"ttft": "500ms", "itl": "50ms", "goodput": "99.5%"}
    spec = made(route="cache", **goals, adapters="/models/lora", adapters_max=4, access="lab,art")
    assert spec.goals == Goals(ttft_ms=500, itl_ms=50, share_milli=995)
    assert (spec.adapters, spec.adapters_max) == ("/models/lora", 4)
    assert spec.way.routing is Routing.CACHE and spec.way.access == ("lab", "art")
    assert made(route="cache", goodput=0.95, itl="1s").goals.share_milli == 950


@pytest.mark.parametrize(
    ("replicas", "scale"), [(3, (3, 3)), ("3", (3, 3)), ("0..1", (0, 1)), (" 2 .. 4 ", (2, 4))]
)
def test_replicas_are_a_number_or_a_range(replicas: object, scale: tuple[int, int]) -> None:
    spec = made(replicas=replicas)
    assert (spec.scale.least, spec.scale.most) == scale


@pytest.mark.parametrize(
    ("fields", "field", "hint"),
    [
        ({"replicas": "8..1"}, "replicas", "write 1..8"),
        ({"replicas": 0}, "replicas", "write 0..1"),
        ({"replicas": True}, "replicas", "a whole number"),
        ({"certificate": "/x.pem"}, "certificate", "port: 8443"),
        ({"route": "sticky"}, "route", "sticky_header"),
        ({"route": "p2c", "sticky_cookie": "c"}, "sticky_cookie", "leave one out"),
        ({"route": 3}, "route", "least-loaded"),
        ({"ttft": "500ms"}, "ttft", "route: cache"),
        ({"adapters": "/a", "route": "p2c"}, "adapters", "route: cache"),
        ({"route": "cache", "goodput": 0.9}, "goodput", "add ttft or itl"),
        ({"route": "cache", "ttft": "1s", "goodput": 1.5}, "goodput", "such as 0.99 or 99%"),
        ({"route": "cache", "adapters_max": 2}, "adapters_max", "without adapters"),
        ({"access": ["open", "lab"]}, "access", "stand alone"),
        ({"access": "a b"}, "access", "names of tenants"),
        ({"probe": "health"}, "probe", "such as /health"),
        ({"name": "Chat"}, "name", "lower-case letters"),
        ({"name": "j12"}, "name", "looks like a job id"),
        ({"name": 3}, "name", "text"),
        ({"drain": 0}, "drain", "60s"),
        ({"target": "8"}, "target", "a whole number"),
        ({"command": []}, "command", "is empty"),
        ({"gpus": "lots"}, "gpus", "0.5"),
    ],
)
def test_a_refusal_names_the_field_and_the_fix(
    fields: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(BadField) as refusal:
        made(**fields)
    assert refusal.value.field == field
    assert hint in str(refusal.value)


@pytest.mark.parametrize("name", ["name", "command"])
def test_what_must_be_there_is_asked_for(name: str) -> None:
    with pytest.raises(BadField, match=f"{name}: is missing"):
        to_service({key: value for key, value in LEAST.items() if key != name})


def test_a_flag_of_zero_is_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("command: x\npriority: 5\n")
    assert assemble(JOB, [str(path)], {"priority": 0}).spec.priority == 0
    assert assemble(JOB, [str(path)], {}).spec.priority == 5


# -- files ---------------------------------------------------------------------------------


def refused(shoal: Shoal, path: Path, text: str | None, *flags: str) -> str:
    if text is not None:
        path.write_text(text)
    result = shoal("serve", str(path), *flags)
    assert_one_clear_line(result)
    return result.err


def test_a_file_is_refused_in_one_line(shoal: Shoal, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    assert "there is no such file" in refused(shoal, path, None)
    whole = "name: chat\ncommand: python server.py\n"
    assert "did you mean 'replicas'" in refused(shoal, path, whole + "replica: 3\n")
    assert "a service has name, command, replicas" in refused(shoal, path, whole + "zebra: red\n")
    assert "service.yaml: name: is missing" in refused(shoal, path, "command: x\n")
    assert "command: is missing" in refused(shoal, path, "name: chat\n")
    assert "8..1 is backwards" in refused(shoal, path, whole + "replicas: 8..1\n")
    assert "is empty" in refused(shoal, path, "")
    assert "not YAML, line 1" in refused(shoal, path, "{")
    assert "python server.py" not in refused(shoal, path, whole, "--replicas", "2..1")


def test_a_certificate_that_is_not_there_is_missed_at_once(shoal: Shoal, tmp_path: Path) -> None:
    text = "name: chat\ncommand: python server.py\nport: 8443\ncertificate: keys/chat.pem\n"
    told = refused(shoal, tmp_path / "service.yaml", text)
    assert "tls" not in told, "nothing was asked of the cluster"
    assert f"certificate: {tmp_path}/keys/chat.pem: there is no such file" in told
    result = shoal("serve", "chat", "--port", "8443", "--certificate", "no.pem", "--", "true")
    assert_one_clear_line(result)
    assert "no.pem: there is no such file" in result.err


def test_without_a_cluster_that_is_what_is_told(shoal: Shoal) -> None:
    for args in (["services"], ["service", "chat"], ["service", "chat", "--stop"], ["why", "chat"]):
        result = shoal(*args)
        assert_one_clear_line(result)
        assert (result.code, "shoal up" in result.err) == (3, True)
