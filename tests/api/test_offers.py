"""`POST /v1/offers`: what a neighbor is told before it hands over a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal import __version__
from shoal.client import Client
from shoal.model.ledger import Price, PriceList
from shoal.model.offers import OFFERS_MAX, Offer, OffersView
from shoal.model.policy import Policy, Tenant, problem_with
from shoal.model.report import Submit
from tests.api.server import OPERATORS, Reply, Server, serving
from tests.core.build import job_spec

JOB: dict[str, Any] = {"command": ["true"], "cpu_milli": 100}
POLICY = Policy(
    silent_after_ms=3_600_000,
    site="region=eu, power=hydro",
    tenants=(Tenant(name="east", gpus_max=2), Tenant(name="zebra", priority_max=50)),
)
PRICES = PriceList(currency="EUR", gpus={"*": Price(per_hour=2.5)})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("offers") / "home", POLICY) as made:
        for tenant in ("east", "zebra"):
            made.tenant(tenant)
        until(lambda: made.call(OPERATORS, "GET", "/v1/status").body.count(b'"gpus":4'))
        yield made


@pytest.fixture(scope="module")
def token(server: Server) -> str:
    return server.token("east", "east", only="neighbor")


def offered(server: Server, token: str, *specs: Any) -> OffersView:
    reply = server.call(token, "POST", "/v1/offers", list(specs))
    assert reply.status == 200, reply
    return msgspec.json.decode(reply.body, type=OffersView)


def test_each_spec_has_its_own_answer_and_a_refusal_is_one(server: Server, token: str) -> None:
    found = offered(
        server,
        token,
        {**JOB, "gpus": 1},
        {**JOB, "gpus": 3},
        {**JOB, "gpus": 1, "tenant": "zebra"},
        {**JOB, "gpu": 1},
        {**JOB, "cpu_milli": "many"},
        {**JOB, "cpu_milli": 900_000},
        "not a spec",
        {**JOB, "gpus": 2},
    )
    first, capped, other, unknown, wrong, large, text, last = found.offers
    assert (first.early_ms, first.start_ms, first.why) == (0, 0, "")
    assert capped.start_ms is None and "east may hold 2 at a time" in capped.why
    assert other.why.startswith("tenant: your token is for the tenant east")
    assert "gpu" in unknown.why and wrong.why.startswith("cpu_milli: ")
    assert "no node has more than" in large.why
    assert text.why and last.start_ms == 0
    assert {one.start_ms for one in (other, unknown, wrong, large, text)} == {None}


def test_the_answer_says_what_this_cluster_is_and_has_for_the_sender(
    server: Server, token: str
) -> None:
    found = offered(server, token)
    now_ms = server.run(server.loop.clock.now_ms)
    assert (found.version, found.labels) == (__version__, {"region": "eu", "power": "hydro"})
    assert (found.gpus, found.gpus_free) == (2, 2) and 0 < found.now_ms <= now_ms
    assert (found.offers, found.currency) == ([], "")


def test_a_price_is_one_of_the_list_for_the_gpus_that_the_job_may_get(
    server: Server, token: str
) -> None:
    put = server.call(OPERATORS, "PUT", "/v1/prices", msgspec.to_builtins(PRICES))
    assert put.status == 200, put
    found = offered(server, token, {**JOB, "gpus": 1}, JOB, {**JOB, "gpu_models": ["none"]})
    assert [one.price for one in found.offers] == [2.5, None, None]
    assert found.currency == "EUR"


def test_this_side_says_who_may_send_jobs_to_those_who_see_their_tenant(
    server: Server, token: str
) -> None:
    server.call(OPERATORS, "PUT", "/v1/prices", msgspec.to_builtins(PRICES))
    stranger = server.token("zoe", "zebra")
    for who, guests in ((OPERATORS, ["east"]), (server.token("eva", "east"), ["east"])):
        reply = server.call(who, "GET", "/v1/neighbors/shared")
        assert reply.status == 200, reply
        assert msgspec.json.decode(reply.body) == {
            "price": 2.5, "currency": "EUR", "guests": guests, "moved": [],
        }  # fmt: skip
        assert b'"neighbors":1' in server.call(who, "GET", "/v1/status").body
    assert b'"guests":[]' in server.call(stranger, "GET", "/v1/neighbors/shared").body
    assert b"neighbors" not in server.call(stranger, "GET", "/v1/status").body
    assert server.call(token, "GET", "/v1/neighbors/shared").status == 403


def test_what_others_do_is_a_time_and_not_a_name(server: Server, token: str) -> None:
    """The sender sees that it has to wait, and not for whom."""
    taken = job_spec(name="zebrajob", user="zebrauser", tenant="zebra", gpus=4, time_limit_ms=10**6)
    server.ask(Submit(taken))

    def full() -> Reply | None:
        reply = server.call(token, "POST", "/v1/offers", [{**JOB, "gpus": 1}])
        view = msgspec.json.decode(reply.body, type=OffersView)
        return reply if view.gpus_free == 0 else None

    reply = until(full)
    assert reply is not None
    (one,) = msgspec.json.decode(reply.body, type=OffersView).offers
    assert one.start_ms is not None and 0 < one.start_ms <= 10**6
    assert b"zebra" not in reply.body and b"j1" not in reply.body


def test_a_list_that_is_too_long_is_refused_as_a_whole(server: Server, token: str) -> None:
    reply = server.call(token, "POST", "/v1/offers", [JOB] * (OFFERS_MAX + 1))
    assert reply.status == 400 and b"length <= 32" in reply.body
    assert server.call(token, "POST", "/v1/offers", {"specs": [JOB]}).status == 400


def test_nothing_is_changed_and_the_client_has_a_method(server: Server, token: str) -> None:
    before = server.run(lambda: server.loop.last_seq)
    with Client(f"http://127.0.0.1:{server.port}", token) as client:
        found = client.offers([job_spec(gpus=3), JOB])
    assert isinstance(found.offers[0], Offer) and "may hold 2" in found.offers[0].why
    assert server.run(lambda: server.loop.last_seq) == before


@pytest.mark.parametrize("site", ["region", "region=", "region!=eu", "region=eu|us", "=eu", "!a"])
def test_a_site_that_is_no_list_of_labels_is_refused(site: str) -> None:
    assert problem_with(Policy(site=site)) == f"site: {site!r} is not a label like region=eu"
