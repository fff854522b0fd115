"""The gateways of several heads: what they see together, and what a standby's one does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.gateway_link import GatewayLink, GatewayReport, read_reports, report_of, together
from shoal.core.state.state import State
from shoal.model.job import JobSpec
from shoal.model.service import (
    GatewayEntry,
    Replica,
    ReplicaLoad,
    Route,
    Served,
    Service,
    ServiceLoad,
    ServiceSpec,
    Wanted,
)
from shoal.model.tokens import ReplicaState, TokenCount, TokenLoad

SPEC = ServiceSpec(name="web", replica=JobSpec(command=("true",)))


def service(*draining: str) -> dict[str, Service]:
    return {"web": Service(spec=SPEC, draining=dict.fromkeys(draining, 1))}


def test_requests_at_all_gateways_count() -> None:
    own = ServiceLoad(
        service="web",
        in_flight=2,
        queued=1,
        answers_per_ks=1000,
        response_ms=10,
        p99_ms=50,
        replicas={"j1": ReplicaLoad(True, 2, 1000, 10)},
    )
    other = ServiceLoad(
        service="web",
        in_flight=3,
        held=4,
        answers_per_ks=3000,
        response_ms=30,
        p99_ms=40,
        replicas={"j1": ReplicaLoad(False, 3, 3000, 30), "j2": ReplicaLoad(True, 0)},
    )
    load = together(service(), {"web": own}, [GatewayReport(loads=(other,))])["web"]
    assert (load.in_flight, load.queued, load.held, load.work) == (5, 1, 4, 10)
    assert (load.answers_per_ks, load.response_ms, load.p99_ms) == (4000, 25, 50)
    assert load.replicas == {"j1": ReplicaLoad(True, 5, 4000, 25), "j2": ReplicaLoad(True, 0)}


def test_a_replica_that_falls_asleep_is_busy_until_no_gateway_sends_to_it() -> None:
    own = ServiceLoad(service="web")
    for opened, busy in ((("j1",), 1), ((), 0)):
        other = GatewayReport(loads=(ServiceLoad(service="web"),), open=opened)
        load = together(service(), {"web": own}, [other], {"web": ["j1"]})["web"]
        assert sum(seen.in_flight for seen in load.replicas.values()) == busy
        assert load.work == 0, "it is not a request"


def test_a_gateway_that_sees_nothing_takes_nothing_away() -> None:
    own = ServiceLoad(service="web", in_flight=2)
    blind = GatewayReport(loads=(ServiceLoad(service="web", seen=False, trouble="no haproxy"),))
    assert together(service(), {"web": own}, [blind]) == {"web": own}
    assert together(service(), {"web": own}, []) == {"web": own}
    assert together(service(), {}, [GatewayReport()]) == {}
    seen = ServiceLoad(service="web", in_flight=1)
    assert together(service(), {}, [GatewayReport(loads=(seen,))]) == {"web": seen}


def test_a_replica_drains_until_no_gateway_sends_it_requests() -> None:
    own = ServiceLoad(service="web", replicas={"j1": ReplicaLoad(True, 0)})
    idle = ServiceLoad(service="web", replicas={"j1": ReplicaLoad(True, 0)})

    def in_flight(*, open_: tuple[str, ...]) -> int:
        report = GatewayReport(loads=(idle,), open=open_)
        return together(service("j1"), {"web": own}, [report])["web"].replicas["j1"].in_flight

    assert in_flight(open_=("j1",)) == 1, "the other gateway has not heard of the drain yet"
    assert in_flight(open_=("j2",)) == 0


def test_a_report_names_the_replicas_that_get_new_requests() -> None:
    replicas = tuple(
        Replica(id=name, address="10.0.0.1", port=1, state=state)
        for name, state in (("j1", ReplicaState.READY), ("j2", ReplicaState.DRAINING))
    )
    wanted = Wanted(services=(Served(route=Route(service="web"), replicas=replicas),))
    load = ServiceLoad(service="web", in_flight=1)
    [report] = read_reports([report_of(wanted, {"web": load}), b"of another version"])
    assert report == GatewayReport(loads=(load,), open=("j1",))


def test_a_report_that_is_too_long_leaves_replicas_out() -> None:
    many = {f"j{number}": ReplicaLoad(True, 1) for number in range(30_000)}
    load = ServiceLoad(service="web", in_flight=7, replicas=many)
    [report] = read_reports([report_of(Wanted(), {"web": load})])
    assert report.loads == (msgspec.structs.replace(load, replicas={}),)


class Followed:
    """The loop of a standby, as far as its gateway needs it."""

    def __init__(self) -> None:
        self.state = State()
        self.state.services.update(service())
        self.alarms = Alarms()

    async def settled(self) -> None: ...

    def served(self, load: ServiceLoad) -> None:
        raise AssertionError("a standby decides nothing")


class Proxy:
    def __init__(self) -> None:
        self.wanted: list[Wanted] = []

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        self.wanted.append(wanted)
        return {"web": ServiceLoad(service="web", in_flight=3)}


def test_a_standbys_gateway_serves_what_the_leader_has_decided_and_reports() -> None:
    async def story() -> None:
        proxy, told = Proxy(), asyncio.Event()
        reports: list[bytes] = []

        def report(body: bytes) -> None:
            reports.append(body)
            told.set()

        link = GatewayLink(Followed(), proxy, GatewayEntry)  # type: ignore[arg-type]
        link.report = report
        task = asyncio.create_task(link.run())
        async with asyncio.timeout(120):
            await told.wait()
        task.cancel()
        assert [one.route.service for one in proxy.wanted[0].services] == ["web"]
        assert read_reports(reports)[0].loads[0].in_flight == 3

    asyncio.run(story())


def test_tokens_of_all_heads_are_added_and_each_counts_in_its_own_folder() -> None:
    def load(folder: str, **figures: Any) -> ServiceLoad:
        count = TokenCount(service="web", prompt=5, folder=folder)
        return ServiceLoad(service="web", tokens=TokenLoad(**figures), token_counts=(count,))

    own = load("f1", judged=10, good=9, ttft_p99_ms=80, prompt_per_s=100, hit_milli=500)
    other = load("f2", judged=20, good=20, ttft_p99_ms=90, prompt_per_s=300, hit_milli=100)
    found = together(service(), {"web": own}, [GatewayReport(loads=(other,))])["web"]
    assert found.tokens == TokenLoad(
        judged=30, good=29, ttft_p99_ms=90, prompt_per_s=400, hit_milli=200
    )
    assert [one.folder for one in found.token_counts] == ["f1", "f2"]
    alone = together(service(), {}, [GatewayReport(loads=(other,))])["web"]
    assert alone.tokens == other.tokens
