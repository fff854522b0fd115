"""Three clusters that serve services of each other, with everything between them that can go wrong.
`python -m storm.sites 17` prints the histories of seed 17.

Each cluster is a world of its own, with its users, faults and witness. A round of home with a
neighbor is a letter there and one back, as in `control/neighboring/services.py`: one at a time, and
what has not come back in time is silence. What home remembers between two rounds is lost when its
controller dies.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from shoal.core.features.service.sites import outgoing_services
from shoal.model.far import Far
from shoal.model.neighbor import HOME, NeighborReport, service_mark, version_marked
from shoal.model.policy import Policy
from shoal.model.report import (
    AddTenant,
    Answer,
    DeclareGone,
    Refused,
    SetService,
    SetSites,
    StopService,
)
from shoal.model.service import Service, ServiceSpec
from shoal.model.sites import SiteReport, SiteWork
from storm.faults import BadNetwork, Faults
from storm.fuzz import SeedFailed, Size, _draw_nodes
from storm.lives import Untruth
from storm.neighbors import MINUTE_MS, NAMES, Length, Post
from storm.services import CRASHES, Services, is_good
from storm.timeline import Timeline
from storm.truth import Truth
from storm.users import SeededFates
from storm.world import World

ROUND_MS, PATIENCE_MS = 2_000, 10_000
FAILS_PART = 0.3  # of the versions, at one of the sites
LENGTH = Length(nodes=2, faults=4, storm_ms=900_000, calm_ms=3_600_000)


class Wishes(Services):
    """Users whose services are in several clusters."""

    others: tuple[str, ...] = ()

    def name_them(self, cluster: str) -> None:
        self._names = [f"{cluster}-{name}" for name in self._names[:1]] + ["shared"]
        self.others = tuple(name for name in NAMES if name != cluster)
        self._gangs = self._has_gpus = False  # what any of the clusters has room for

    def _spread(self, spec: ServiceSpec) -> ServiceSpec:
        some = self._rng.sample(self.others, self._rng.choice((0, 1, 2, 2)))
        return msgspec.structs.replace(spec, clusters=("here", *some) if some else ())

    def _draw_spec(self, name: str) -> ServiceSpec:
        return self._spread(self._draw_light(name))

    def _draw_change(self, spec: ServiceSpec) -> ServiceSpec:
        changed = super()._draw_change(spec)
        return self._spread(changed) if self._rng.random() < 0.3 else changed


class Cluster:
    """One cluster with everybody who does something there."""

    def __init__(self, name: str, storm: SiteStorm) -> None:
        self.name, self.storm, self.counts = name, storm, storm.counts
        rng = self.rng("cluster")
        nodes = [
            msgspec.structs.replace(node, id=f"{name}{node.id}", checkpoints="")
            for node in _draw_nodes(rng, Size(nodes=LENGTH.nodes))
        ]
        policy = Policy(silent_after_ms=10_000, grace_ms=30_000, port_count=64)
        self.truth = Truth(storm.timeline, policy)
        self.network = BadNetwork(self.rng("network"), self.counts, 2 * policy.grace_ms)
        self.world: World = World(
            policy,
            SeededFates(f"{storm.seed}/{name}"),
            timeline=storm.timeline,
            witness=self.truth,
            network=self.network,
            heartbeat_ms=2_000,
        )
        self.truth.health.saved = self.world.saved
        given = (self.world, self.network, self.truth.lives, nodes, policy)
        self.users = Wishes(*given, self.rng("services"), self.counts)
        self.users.name_them(name)
        self.truth.services.has_work = self.users.has_work
        self.truth.services.hangs = self.users.hangs
        self.truth.services.fails_elsewhere = self._fails_elsewhere
        self._refused: set[tuple[str, int]] = set()  # services and versions, by somebody
        self.faults = Faults(
            self.world, self.network, nodes, policy.grace_ms, self.rng("faults"), self.counts
        )
        self._sent: dict[tuple[str, str], ServiceSpec] = {}
        self._life = 0
        self._open: dict[str, int] = {}  # host -> the round that is under way
        self._rounds = 0
        for node in nodes:
            self.world.add_node(node)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.storm.seed}/{self.name}/{purpose}")

    def plan(self) -> None:
        rng, timeline, until_ms = self.rng("plan"), self.storm.timeline, LENGTH.storm_ms
        self.users.plan(until_ms)
        self.faults.plan(rng.randrange(LENGTH.faults + 1), until_ms)
        self.faults.plan_store(self.rng("store"), until_ms)
        for _ in range(rng.choice((0, 0, 1))):
            gone = DeclareGone(rng.choice(self.users.others), "ann")
            timeline.at(rng.randrange(until_ms), partial(self.world.ask, gone, lambda _: None))
        for _ in range(rng.choice((0, 0, 1))):
            timeline.at(rng.randrange(until_ms), partial(self._evict, rng))
        self.world.start_controller()
        timeline.after(rng.randrange(ROUND_MS), self._round)

    def _evict(self, rng: random.Random) -> None:
        """An admin of the host stops what others have brought."""
        if self.readable:
            names = [one.spec.name for one in self.services if self.guest(one)]
            if names:
                self.counts["host stopped a service"] += 1
                self.world.ask(StopService(rng.choice(names), "the host's admin"), lambda _: None)

    @property
    def readable(self) -> bool:
        return self.world.controller.readable

    @property
    def services(self) -> list[Service]:
        return list(self.world.controller.state.services.values())

    @staticmethod
    def guest(service: Service) -> str:
        """Whose it is."""
        return service.spec.replica.labels.get(HOME, "").partition(".")[0]

    # -- home ------------------------------------------------------------------------------

    def _round(self) -> None:
        self.storm.timeline.after(ROUND_MS, self._round)
        controller, now_ms = self.world.controller, self.storm.timeline.now_ms
        if not controller.readable:
            return
        if controller.life != self._life:
            self._life, self._sent, self._open = controller.life, {}, {}
        works: dict[str, list[tuple[SiteWork, ServiceSpec]]] = {}
        for to, work in outgoing_services(controller.state):
            works.setdefault(to, []).append((work, controller.state.services[work.service].spec))
        for host in self.users.others:
            if host in self._open and now_ms - self._open[host] < PATIENCE_MS:
                continue
            if host in self._open:
                self.hear(NeighborReport(name=host, problem="it does not answer"))
            self._open[host] = now_ms
            given = works.get(host, [])
            answer = partial(self._answered, host, self._life, now_ms)
            there = partial(self.storm.clusters[host].serve, self, given, answer)
            self.storm.post.send(self.name, host, there)

    def _fails_elsewhere(self, name: str, version: int) -> bool:
        others = (self.storm.clusters[host] for host in self.users.others)
        return (name, version) in self._refused or any(one.fails(name, version) for one in others)

    def _answered(self, host: str, life: int, begun_ms: int, report: NeighborReport) -> None:
        if self._open.get(host) == begun_ms and life == self._life:
            del self._open[host]
            self.hear(report)

    def hear(self, report: NeighborReport) -> None:
        if self.world.controller.up:
            self.world.controller.neighbors([report])

    def sends(self, host: str, work: SiteWork, spec: ServiceSpec, version: int) -> bool:
        """As in `Abroad._sends`."""
        sent = self._sent.get((host, work.service))
        if not work.version or (version and work.has == work.version != version):
            return False
        return version != work.version or sent != spec

    # -- host ------------------------------------------------------------------------------

    def serve(
        self,
        home: Cluster,
        works: list[tuple[SiteWork, ServiceSpec]],
        answer: Callable[[NeighborReport], None],
    ) -> None:
        """A round, when it arrives."""
        if not self.readable:
            return
        if (tenant := self._tenant(home)) not in self.world.controller.state.identity.tenants:
            self._ask(AddTenant(tenant))
        known = {work.service for work, _ in works}
        for service in self.services:
            if self.guest(service) == home.name and service.spec.name not in known:
                self._ask(StopService(service.spec.name, home.name, self._tenant(home)))
        refused: dict[str, str] = {}
        for work, spec in works:
            self._serve(home, work, spec, refused)
        # What it says of them is read when its controller has answered, or would have.
        back = partial(self._report, home, [work for work, _ in works], refused, answer)
        self.storm.timeline.after(500, back)

    def _tenant(self, home: Cluster) -> str:
        return f"from-{home.name}"

    def _ask(self, request: Any, answered: Callable[[Answer], None] = lambda _: None) -> None:
        self.world.ask(request, answered)

    def _serve(
        self, home: Cluster, work: SiteWork, spec: ServiceSpec, refused: dict[str, str]
    ) -> None:
        name, tenant = work.service, self._tenant(home)
        there = self.world.controller.state.services.get(name)
        version = self._version(home, name)
        if work.ends:
            if version and there is not None and not there.stopping:
                self._ask(StopService(name, home.name, tenant))
        elif there is not None and not version:
            self.counts["name used at a site"] += 1
            home._refused.add((name, work.version))
            refused[name] = "the name is already used there"
        elif there is not None and there.stopping:
            pass
        elif home.sends(self.name, work, spec, version):
            labels = {HOME: service_mark(home.name, work.version)}
            replica = msgspec.structs.replace(spec.replica, tenant=tenant, labels=labels)
            if self.fails(name, work.version):
                command = CRASHES, spec.replica.command[1]
                replica = msgspec.structs.replace(replica, command=command)
            sent = msgspec.structs.replace(spec, replica=replica, clusters=())

            def answered(given: Answer) -> None:
                if isinstance(given, Refused):
                    self.counts["site refused"] += 1
                    home._refused.add((name, work.version))
                    refused[name] = given.message
                else:
                    home._sent[self.name, name] = spec

            self._ask(SetService(sent, home.name, tenant), answered)
        doors = tuple(work.doors)
        if version:
            self._ask(SetSites(name, doors, home.name, tenant))

    def fails(self, name: str, version: int) -> bool:
        """Here alone."""
        return self.rng(f"{name} {version}").random() < FAILS_PART

    def _version(self, home: Cluster, name: str) -> int:
        service = self.world.controller.state.services.get(name)
        mark = service.spec.replica.labels.get(HOME, "") if service is not None else ""
        return version_marked(mark, home.name)

    def _report(
        self,
        home: Cluster,
        works: list[SiteWork],
        refused: dict[str, str],
        answer: Callable[[NeighborReport], None],
    ) -> None:
        if not self.readable:
            return
        said = tuple(self._say(home, work, refused.get(work.service, "")) for work in works)
        report = NeighborReport(name=self.name, clock_ms=self.storm.timeline.now_ms, services=said)
        self.storm.post.send(self.name, home.name, partial(answer, report))

    def _say(self, home: Cluster, work: SiteWork, refused: str) -> SiteReport:
        service = self.world.controller.state.services.get(work.service)
        version = self._version(home, work.service)
        stops = service is not None and service.stopping
        settled = service is not None and service.proven and not stops
        far = Far(site=self.name, address="192.0.2.1", port=9_080, certificate=self.name)
        return SiteReport(
            service=work.service,
            version=0 if stops and not work.ends else version,
            ready=settled,
            state="failing" if service is not None and service.failures else "",
            refused=refused,
            ended=work.ends and not version,
            door=far if version else None,
        )

    # -- the end ---------------------------------------------------------------------------

    def calm_down(self) -> None:
        self.faults.stop()
        self.truth.health.calm_ms = self.storm.timeline.now_ms
        self.users.calm_down()

    def unsettled(self) -> str:
        """A service has one version everywhere, or is nowhere."""
        if text := self.users.unsettled():
            return f"{self.name}: {text}"
        for service in self.services:
            name, good = service.spec.name, is_good(service.spec)
            if (home := self.guest(service)) and not self._wanted_by(home, name):
                return f"{self.name} serves {name}, and {home} does not know"
            for host in service.spec.clusters[1:] if good and not service.stopping else ():
                cluster = self.storm.clusters[host]
                if not cluster.readable:
                    return f"{host} recovers"
                used = cluster.world.controller.state.services.get(name)
                taken = used is not None and cluster.guest(used) != self.name
                if taken or cluster.fails(name, service.version):
                    continue
                version = cluster._version(self, name)
                if version != service.version or service.sites[host].ready != version:
                    return f"{name} of {self.name} is version {version} at {host}"
        return ""

    def _wanted_by(self, home: str, name: str) -> bool:
        cluster = self.storm.clusters[home]
        known = cluster.world.controller.state.services.get(name) if cluster.readable else None
        return known is not None and self.name in known.sites


class SiteStorm:
    """One seed, one history of three clusters."""

    def __init__(self, seed: int) -> None:
        self.seed, self.counts, self.timeline = seed, Counter[str](), Timeline()
        self.post = Post(random.Random(f"{seed}/post"), self.timeline, self.counts)
        self.clusters: dict[str, Cluster] = {}
        for name in NAMES:
            self.clusters[name] = Cluster(name, self)

    def finish(self) -> Counter[str]:
        timeline = self.timeline
        try:
            self.post.plan(LENGTH.storm_ms)
            for cluster in self.clusters.values():
                cluster.plan()
            timeline.run(LENGTH.storm_ms)
            self.post.calm = True
            for cluster in self.clusters.values():
                cluster.calm_down()
            self._settle(self._unsettled)
            for cluster in self.clusters.values():
                for service in cluster.services:
                    if not cluster.guest(service):
                        cluster.users._stop(service.spec.name)
            timeline.run(timeline.now_ms + MINUTE_MS)
            self._settle(self._left)
        except AssertionError as error:
            raise SeedFailed(
                f"seed {self.seed} at {timeline.now_ms} ms: {error}; "
                f"to see it again: python -m storm.sites {self.seed}"
            ) from error
        for cluster in self.clusters.values():
            self._count(cluster)
        return self.counts

    def _count(self, cluster: Cluster) -> None:
        for line in cluster.world.disk.log:
            for kind in ("SiteAsked", "SiteHeard", "SiteEnded", "SitesTold"):
                self.counts[kind] += f'"{kind}"'.encode() in line
            self.counts["back at a site"] += b"failed at" in line and b'"back":true' in line

    def _settle(self, unsettled: Callable[[], str]) -> None:
        timeline = self.timeline
        timeline.run(timeline.now_ms + LENGTH.calm_ms, lambda: not unsettled())
        if left := unsettled():
            raise Untruth(f"stuck: {left}")

    def _unsettled(self) -> str:
        return next(filter(None, (one.unsettled() for one in self.clusters.values())), "")

    def _left(self) -> str:
        for cluster in self.clusters.values():
            if not cluster.readable:
                return f"{cluster.name} recovers"
            if cluster.services:
                return f"{cluster.name} has {cluster.services[0].spec.name}"
        return ""


def run_sites(seed: int) -> Counter[str]:
    return SiteStorm(seed).finish()


if __name__ == "__main__":
    _storm = SiteStorm(int(sys.argv[1]))
    _failure = None
    try:
        _storm.finish()
    except SeedFailed as _error:
        _failure = _error
    for _cluster in _storm.clusters.values():
        print(*(f"{_cluster.name} {line.decode()}" for line in _cluster.world.disk.log), sep="\n")
    print(dict(sorted(_storm.counts.items())))
    if _failure is not None:
        raise SystemExit(str(_failure))
