"""A service in several clusters: rolled out from site to site, and back everywhere."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from shoal.core.features.service.sites import PASSED_MS, outgoing_services, sites_of, sites_text
from shoal.core.state.events.services import ServiceSet, SiteAsked, SiteHeard, SitesTold
from shoal.core.state.facts import Snapshot
from shoal.core.state.load import restore
from shoal.model.far import Far
from shoal.model.identity import Role, User
from shoal.model.neighbor import Neighbor, NeighborReport
from shoal.model.report import (
    Accepted,
    AddTenant,
    DeclareGone,
    Refused,
    SetSites,
    SetUser,
)
from shoal.model.sites import Site, SiteReport
from tests.core.build import POLICY
from tests.core.serving import Serving


def door(site: str, port: int = 9_080) -> Far:
    return Far(site=site, address="192.0.2.1", port=port, certificate=f"of {site}")


class There:
    """A neighbor that takes services, as `control/neighboring/services.py` reports of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has: dict[str, list[int]] = {}  # versions that were ready, and the present one
        self.broken: set[int] = set()
        self.silent = self.failing = False
        self.refuses = ""
        self.price: int | None = None
        self.sent: list[int] = []

    def report(self, cluster: Serving) -> NeighborReport:
        if self.silent:
            return NeighborReport(name=self.name, problem="it does not answer")
        works = [work for to, work in outgoing_services(cluster.state) if to == self.name]
        said = []
        for work in works:
            versions = self.has.setdefault(work.service, [])
            refused = ""
            if work.ends:
                versions.clear()
            elif work.version and (not versions or work.has != work.version):
                if self.refuses:
                    refused = self.refuses
                elif work.version not in versions[-1:]:
                    versions.append(work.version)
                    self.sent.append(work.version)
            version = versions[-1] if versions else 0
            said.append(
                SiteReport(
                    service=work.service,
                    version=version,
                    ready=bool(version) and version not in self.broken and not self.failing,
                    state="failing" if version in self.broken or self.failing else "ready",
                    refused=refused,
                    ended=work.ends,
                    door=door(self.name) if version else None,
                )
            )
            if len(versions) > 1 and version in self.broken:
                versions.pop()  # it goes back by itself
        return NeighborReport(name=self.name, clock_ms=1, price=self.price, services=tuple(said))


class Several(Serving):
    def __init__(self, *names: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.there = {name: There(name) for name in names}
        self.talk()

    def talk(self, times: int = 1) -> None:
        """Everybody says something, as in a round of the driver."""
        for _ in range(times):
            self.step(neighbors=[one.report(self) for one in self.there.values()])
            self.tick()

    def site(self, name: str) -> Site:
        return self.service().sites[name]

    def at(self) -> dict[str, int]:
        return {name: one.ready for name, one in self.service().sites.items()}

    def why(self) -> str:
        return sites_text(self.state, self.service())

    def everywhere(self, version: int) -> None:
        assert self.service().version == version
        assert self.versions() == [version]
        assert set(self.at().values()) <= {version}, (self.at(), self.why())


WEST: dict[str, Any] = {"clusters": ["here", "west"]}
BOTH: dict[str, Any] = {"clusters": ["west", "south"]}


@pytest.fixture
def two() -> Several:
    cluster = Several("west", "south")
    cluster.served(**BOTH)
    cluster.talk(6)
    return cluster


def test_a_version_goes_from_site_to_site_when_the_one_before_has_it_ready(two: Several) -> None:
    two.everywhere(1)
    assert {one.site for one in two.service().far} == {"west", "south"}
    two.there["west"].failing = True
    two.serve(version=2, **BOTH)
    two.talk(6)
    assert (two.versions(), two.at()) == ([2], {"west": 1, "south": 1})
    assert two.site("south").version == 1
    assert "version 2 is not ready there" in two.why()
    two.there["west"].failing = False
    two.talk(4)
    two.everywhere(2)
    assert not two.why()


def test_what_is_sent_is_stored_only_when_it_changes(two: Several) -> None:
    """A settled service says nothing, and after a restart the same is sent."""
    for _ in range(5):
        two.talk()
        sites = (SiteAsked, SiteHeard)
        assert not [one for one in two.last.events if isinstance(one, sites)]
    sent = list(outgoing_services(two.state))
    snapshot = msgspec.json.decode(msgspec.json.encode(two.state.snapshot()), type=Snapshot)
    assert list(outgoing_services(restore(snapshot, two.state.functions))) == sent


def test_a_version_that_fails_at_home_goes_nowhere(two: Several) -> None:
    two.crashing = {"v2"}
    two.serve(version=2, **BOTH)
    for _ in range(40):
        two.talk()
        two.wait(10_000)
    two.everywhere(1)
    assert two.there["west"].sent == [1]


@pytest.mark.parametrize("bad", ["west", "south"])
@pytest.mark.parametrize("refuses", [False, True])
def test_one_that_fails_at_a_site_goes_back_everywhere(
    two: Several, bad: str, refuses: bool
) -> None:
    there = two.there[bad]
    there.broken, there.refuses = {2}, "no room" if refuses else ""
    two.serve(version=2, **BOTH)
    for _ in range(12):
        two.talk()
        there.refuses = there.refuses if two.service().version == 2 else ""
    two.everywhere(1)
    (back,) = [one for one in two.log if isinstance(one, ServiceSet) and one.back]
    assert f"version 2 failed at {bad}" in back.why, back.why
    assert ("no room" if refuses else "gone back to version 1") in back.why
    there.broken = set()
    two.serve(version=3, **BOTH)
    two.talk(8)
    two.everywhere(3)


def test_a_site_that_is_cut_off_is_passed_after_a_while_and_catches_up(two: Several) -> None:
    west = two.there["west"]
    west.silent = True
    two.serve(version=2, **BOTH)
    two.talk(6)
    assert two.at() == {"west": 1, "south": 1}
    assert "west" in two.why() and "it does not answer" in two.why()
    two.wait(PASSED_MS)
    two.talk(6)
    assert two.at() == {"west": 1, "south": 2}
    two.serve(version=3, **BOTH)
    two.talk(6)
    west.silent = False
    two.talk(6)
    two.everywhere(3)
    assert 2 not in west.sent


def test_a_site_that_never_had_it_does_not_send_it_back() -> None:
    cluster = Several("west", "south")
    cluster.served()
    cluster.there["west"].refuses = "the name chat is already used there"
    cluster.serve(version=2, **BOTH)
    cluster.talk(8)
    assert (cluster.service().version, cluster.at()) == (2, {"west": 0, "south": 2})
    assert "already used there" in cluster.why()
    cluster.there["west"].refuses = ""
    cluster.talk(4)
    cluster.everywhere(2)


def test_another_scale_is_no_other_version(two: Several) -> None:
    assert two.serve(scale={"least": 2, "most": 2}, **BOTH) == Accepted("chat")
    two.talk(4)
    works = dict(outgoing_services(two.state))
    assert [work.version for work in works.values()] == [1, 1]


def test_it_ends_where_it_is_no_longer_named_and_everywhere_when_it_is_stopped(
    two: Several,
) -> None:
    two.serve(**WEST)
    two.talk(2)
    assert list(two.service().sites) == ["west"] and not two.there["south"].has["chat"]
    two.there["west"].silent = True
    two.stop()
    two.talk(4)
    assert two.service().stopping, "it has not ended at west"
    assert "it ends at west" in two.why() and "does not answer" in two.why()
    two.there["west"].silent = False
    two.talk(2)
    assert not two.state.services and not two.there["west"].has["chat"]


def test_a_neighbor_that_is_declared_gone_is_not_waited_for(two: Several) -> None:
    two.stop()
    two.there = {}
    for name in ("west", "south"):
        assert isinstance(two.ask(DeclareGone(name)), Accepted)
    two.tick(4)
    assert not two.state.services


def test_what_the_policy_keeps_here_is_refused_or_not_sent() -> None:
    cluster = Several("west")
    refused = cluster.serve(clusters=["west"], replica={"labels": {"stays": "eu"}})
    assert refused == Refused("clusters", "west: the job stays in eu")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"replica": {"workdir": "/data"}}, "--pack"),
        ({"replica": {"volumes": ["/data:data"]}}, "a folder of this cluster"),
        ({"route": {"service": "chat", "port": 8443, "certificate": "tls"}}, "secret"),
        ({"route": {"service": "chat", "routing": "cache"}}, "a router of tokens"),
        ({"clusters": ["any"]}, "not the name of a neighbor"),
        ({"clusters": ["west", "west"]}, "twice"),
    )
    for fields, why in cases:
        answer = cluster.serve(**{"clusters": ["west"], **fields})
        assert isinstance(answer, Refused) and answer.field == "clusters", answer
        assert why in answer.message, answer
    policy = msgspec.structs.replace(
        POLICY, neighbors=(Neighbor(name="west", price_max=2_000_000, gpus_max=1),)
    )
    cluster = Several("west", policy=policy)
    cluster.join("g", gpus=2)
    for price, gpus in ((3_000_000, 1), (None, 1), (1_000_000, 2)):
        cluster.there["west"].price = price
        cluster.serve(replica={"gpus": gpus}, **WEST)
        cluster.talk(4)
        assert not cluster.service().sites, (price, gpus)
        (seen,) = sites_of(cluster.state, cluster.service())
        assert seen.why.startswith(("its price is", "it names no price", "the policy has at most"))
    cluster.serve(replica={"gpus": 1}, **WEST)
    cluster.talk(4)
    assert cluster.at() == {"west": cluster.service().version}


def test_a_tenant_goes_only_to_neighbors_that_are_named_for_it() -> None:
    cluster = Several("west")
    assert isinstance(cluster.ask(AddTenant("lab")), Accepted)
    answer = cluster.serve(replica={"tenant": "lab"}, **WEST)
    assert isinstance(answer, Refused) and "names no tenants" in answer.message


def test_a_neighbor_that_lies_is_believed_about_its_own_service_and_slowly(two: Several) -> None:
    lie = SiteReport(service="chat", version=10**9, ready=True, door=door("west"))
    other = msgspec.structs.replace(lie, service="other")
    stranger = NeighborReport(name="nobody", clock_ms=1, services=(lie, other))
    two.step(neighbors=[stranger])
    assert not [one for one in two.last.events if isinstance(one, SiteHeard)]
    count = 0
    for number in range(100):
        changed = msgspec.structs.replace(lie, version=number % 2, door=door("west", 1 + number))
        two.step(neighbors=[NeighborReport(name="west", clock_ms=1, services=(changed,))])
        count += len([one for one in two.last.events if isinstance(one, SiteHeard)])
        two.wait(100)
    assert 10 < count < 30
    assert two.service().version == 1 and two.site("south").ready == 1


def test_a_neighbors_service_here_learns_of_its_other_sites_from_its_home_alone() -> None:
    cluster = Several()
    assert isinstance(cluster.ask(AddTenant("home")), Accepted)
    cluster.ask(SetUser(User(name="home", roles={"home": Role.MEMBER})))
    cluster.served(replica={"tenant": "home"})
    doors = (door("home"), door("south"))
    for scope, taken in (("other", False), ("home", True), ("home", True)):
        answer = cluster.ask(SetSites("chat", doors, scope=scope))
        assert isinstance(answer, Accepted) is taken
    assert cluster.service().far == doors
    assert len([one for one in cluster.log if isinstance(one, SitesTold)]) == 1


class Wild(There):
    """What is said or heard may be lost, and its people stop what is there."""

    def __init__(self, name: str, rng: random.Random) -> None:
        super().__init__(name)
        self.rng = rng

    def report(self, cluster: Serving) -> NeighborReport:
        rng = self.rng
        if rng.random() < 0.1:
            self.silent = not self.silent
        if rng.random() < 0.05:
            self.has.clear()
        if rng.random() < 0.1:
            self.refuses = rng.choice(("", "", "no room"))
        said = super().report(cluster)
        lost = rng.random() < 0.2
        return NeighborReport(name=self.name, problem="no answer") if lost else said


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_between_all_sites_end_with_one_version(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Several()
    cluster.there = {name: Wild(name, rng) for name in ("west", "south", "east")}
    cluster.served()
    version = 1
    for _ in range(60):
        if rng.random() < 0.2:
            version += 1
            if rng.random() < 0.4:
                cluster.there[rng.choice(list(cluster.there))].broken.add(version)
            if rng.random() < 0.2:
                cluster.crashing.add(f"v{version}")
            some = rng.sample(sorted(cluster.there), rng.randrange(4))
            cluster.serve(version=version, clusters=["here", *some])
        elif rng.random() < 0.03 and "chat" in cluster.state.services:
            cluster.stop()
        elif rng.random() < 0.05:
            cluster.ask(DeclareGone(rng.choice(list(cluster.there))))
        cluster.talk()
        cluster.wait(rng.choice((1_000, 10_000, PASSED_MS // 3)))
    calm = {name: There(name) for name in cluster.there}
    for name, there in calm.items():
        there.has = cluster.there[name].has
    cluster.there, cluster.crashing = calm, set()
    for _ in range(30):
        cluster.talk()
        cluster.wait(20_000)
    if rng.random() < 0.5 and "chat" in cluster.state.services:
        cluster.everywhere(cluster.service().version)
        cluster.stop()
        cluster.talk(4)
        assert not cluster.state.services
    elif "chat" in cluster.state.services:
        cluster.everywhere(cluster.service().version)
        assert set(cluster.at()) == set(cluster.service().spec.clusters) - {"here"}
