"""Three clusters that run jobs of each other, with everything between them that can go wrong.
`python -m storm.neighbors 17` prints the histories of seed 17.

Each cluster is a world of its own, with its users, faults and witness. What travels between two of
them is a *letter*: it may be lost, come twice, after minutes, and after letters that were sent
later; so may each answer. All clocks are wrong by days, and none runs as fast as another.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from shoal.core.features.neighbors import outgoing, submission, wanted_offers
from shoal.model.job import JobSpec, Phase
from shoal.model.neighbor import (
    ANY,
    HandedJob,
    Neighbor,
    NeighborReport,
    Offer,
    Outgoing,
    key_of,
    stays_home,
)
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Tenant
from shoal.model.report import (
    Accepted,
    Answer,
    Cancel,
    DeclareGone,
    Refused,
    RenewLease,
    Request,
)
from storm.faults import BadNetwork, Faults
from storm.flows import Flows
from storm.fuzz import STEPS_PER_SECOND_MAX, SeedFailed, Size, _draw_nodes, _draw_policy
from storm.lives import Untruth
from storm.neighbortruth import Everywhere, SiteTruth
from storm.replacing import Replacing
from storm.timeline import Clock, Timeline
from storm.users import SeededFates, Users
from storm.world import World

NAMES = ("a", "b", "c")
DAY_MS = 86_400_000
GAINS = 100  # millionths: the fastest clock and the slowest
ROUND_MS = 4_000  # between two looks at what is to be sent
HEARD_MS = 200  # what comes in this time is heard together
HEARTBEAT_MS = 4_000
MINUTE_MS = 60_000
CUT_PART = 0.04  # of the rounds in which a neighbor has jobs with leases are its last for a while
PRICES = (None, 500_000, 2_500_000)


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """How much happens; the numbers are upper bounds."""

    nodes: int = 2
    jobs: int = 10
    faults: int = 6
    storm_ms: int = 600_000
    calm_ms: int = 6 * 3_600_000


class Post:
    """What lies between the clusters."""

    def __init__(self, rng: random.Random, timeline: Timeline, counts: Counter[str]) -> None:
        self.calm = False
        self._rng, self._timeline, self._counts = rng, timeline, counts
        self._cuts: dict[tuple[str, str], int] = {}  # from, to -> how many cuts
        self._loss = rng.choice((0.0, 0.05, 0.3))
        self._repeat = rng.choice((0.0, 0.1, 0.3))
        self._late = rng.choice((0.0, 0.1, 0.4))
        self._replay = rng.choice((0.0, 0.02))

    def plan(self, until_ms: int) -> None:
        for _ in range(self._rng.randrange(9)):
            one, other = self._rng.sample(NAMES, 2)
            ways = [(one, other), (other, one)][: self._rng.choice((1, 2, 2))]
            self._timeline.at(self._rng.randrange(until_ms), partial(self.cut, *ways))

    def cut(self, *ways: tuple[str, str]) -> None:
        long_ms = self._rng.choice((MINUTE_MS, 5 * MINUTE_MS, 5 * MINUTE_MS))
        self._change(ways, +1)
        self._timeline.after(self._rng.randrange(long_ms), partial(self._change, ways, -1))

    def _change(self, ways: tuple[tuple[str, str], ...], more: int) -> None:
        for way in ways:
            self._counts["neighbors cut"] += more > 0
            self._cuts[way] = self._cuts.get(way, 0) + more

    def send(self, sender: str, to: str, deliver: Callable[[], None]) -> None:
        rng, counts = self._rng, self._counts
        if self.calm:
            self._timeline.after(40, deliver)
            return
        if self._cuts.get((sender, to)) or rng.random() < self._loss:
            counts["letter lost"] += 1
            return
        copies = 1 + (rng.random() < self._repeat)
        counts["letter repeated"] += copies > 1
        for _ in range(copies):
            late = rng.random() < self._late
            counts["letter late"] += late
            long_ms = rng.choice((5_000, MINUTE_MS, 5 * MINUTE_MS)) if late else 300
            self._timeline.after(rng.randrange(20, long_ms), deliver)
        if rng.random() < self._replay:
            counts["letter replayed"] += 1
            self._timeline.after(rng.randrange(MINUTE_MS, 30 * MINUTE_MS), deliver)


class Site:
    """One cluster with everybody who does something there."""

    def __init__(self, name: str, storm: NeighborStorm) -> None:
        self.name, self.storm, self.counts = name, storm, storm.counts
        rng = self.rng("cluster")
        self.nodes = [_named(node, name) for node in _draw_nodes(rng, _size(storm.length))]
        self.policy = _shared(self.rng("shares"), name, _draw_policy(rng))
        self.clock = Clock(
            storm.timeline, rng.randrange(1, 9) * DAY_MS, rng.randrange(-GAINS, GAINS + 1)
        )
        self.truth = SiteTruth(name, self.clock, self.policy, storm.everywhere)
        self.network = BadNetwork(self.rng("network"), self.counts, 2 * self.policy.grace_ms)
        self.world: World = World(
            self.policy,
            SeededFates(f"{storm.seed}/{name}"),
            timeline=storm.timeline,
            clock=self.clock,
            witness=self.truth,
            network=self.network,
            heartbeat_ms=HEARTBEAT_MS,
            checked=storm.checked,
        )
        self.truth.health.saved = self.world.saved
        self.users = Users(self.world, self.nodes, self.rng("users"), self.counts, _another)
        self.users.wish = partial(self._wish, self.rng("wishes"))
        self.flows = Flows(self.world, self.users, self.rng("flows"), self.counts)
        self.flows.schedules = False
        self.flows.wish = partial(self._wish, self.rng("wishes of flows"))
        self.replacing = Replacing(self.world, self.users, self.rng("replacing"), self.counts)
        self.faults = Faults(
            self.world,
            self.network,
            self.nodes,
            self.policy.grace_ms,
            self.rng("faults"),
            self.counts,
        )
        self._until: dict[tuple[str, int], int] = {}  # what the host has said of leases
        self._heard: dict[str, NeighborReport] = {}
        self._hosts, self._cuts = self.rng("offers"), self.rng("cuts")
        for node in self.nodes:
            self.world.add_node(node)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.storm.seed}/{self.name}/{purpose}")

    def plan(self) -> None:
        length, rng = self.storm.length, self.rng("plan")
        self.users.plan(rng.randrange(length.jobs) + 1, length.storm_ms)
        self.faults.plan(rng.randrange(length.faults + 1), length.storm_ms)
        self.faults.plan_store(self.rng("store"), length.storm_ms)
        self.flows.plan(length.storm_ms)
        if rng.random() < 0.3:
            self.replacing.plan(length.storm_ms)
        for _ in range(rng.randrange(3)):
            self.storm.timeline.at(rng.randrange(length.storm_ms), partial(self._evict, rng))
        for _ in range(rng.choice((0, 0, 1, 2))):
            gone = DeclareGone(rng.choice([other for other in NAMES if other != self.name]), "ann")
            self.storm.timeline.at(
                rng.randrange(length.storm_ms), partial(self.world.ask, gone, lambda _: None)
            )
        self.world.start_controller()
        self.storm.timeline.after(rng.randrange(ROUND_MS), self._round)

    def calm_down(self) -> None:
        self.faults.stop()
        self.truth.health.calm_ms = self.clock.now_ms
        self.users.calm_down()

    # -- users -----------------------------------------------------------------------------

    def _wish(self, rng: random.Random, spec: JobSpec) -> JobSpec:
        """Most may leave, and run for longer than letters travel."""
        program, _ = spec.command
        length_ms = rng.choice((1_000, 20_000, 120_000, 240_000))
        others = [name for name in NAMES if name != self.name]
        cluster = rng.choice(("", ANY, ANY, "price<2", rng.choice(others), ",".join(others)))
        spec = msgspec.structs.replace(spec, command=(program, str(length_ms)), cluster=cluster)
        if cluster and spec.restart != "never" and rng.random() < 0.6:
            spec = msgspec.structs.replace(spec, if_cut_ms=rng.choice((60_000, 60_000, 200_000)))
        return spec

    def _evict(self, rng: random.Random) -> None:
        """An admin of the host ends what others have brought."""
        if self.world.controller.readable:
            jobs = self.world.controller.state.jobs.values()
            theirs = [job.id for job in jobs if job.spec.tenant.startswith("from-")]
            if theirs:
                self.counts["host cancelled"] += 1
                self.world.ask(Cancel(rng.choice(theirs), "the host's admin"), lambda _: None)

    def cancel_hopeless(self) -> None:
        """Nobody can hold them, or will in the life of their owners."""
        if self.world.controller.readable:
            for job in self.world.controller.state.jobs.values():
                if job.phase is Phase.WAITING and not job.active and job.spec.cluster:
                    self.world.ask(Cancel(job.id), lambda _: None)

    # -- home: what follows from the state -------------------------------------------------

    def _round(self) -> None:
        self.storm.timeline.after(ROUND_MS, self._round)
        controller = self.world.controller
        if not controller.readable:
            self._until.clear()
            return
        state = controller.state
        wanted = wanted_offers(state, controller.policy, self.clock.now_ms)
        asked = [(job.id, job.spec) for job in wanted]
        for name, host in self.storm.sites.items():
            if name == self.name:
                continue
            mine = [out for out in outgoing(state) if out.away.neighbor == name]
            leased = any(out.away.until_here_ms for out in mine)
            if leased and not self.storm.post.calm and self._cuts.random() < CUT_PART:
                self.storm.post.cut((self.name, name), (name, self.name))
            for out in mine:
                self.storm.post.send(self.name, name, partial(self._send_job, host, out))
            if asked:
                self.storm.post.send(self.name, name, partial(host.offer, self, asked))

    def _send_job(self, host: Site, out: Outgoing) -> None:
        """It arrives at the host, however late."""
        job, attempt, away, *_ = out
        said = partial(self._said, host, job, attempt)
        if asked := submission(self.name, f"from-{self.name}", out):
            host.take(asked, said)
        elif self._until.get((job, attempt), 0) < away.until_there_ms:
            host.take(
                RenewLease(away.id, away.until_there_ms, self.name), partial(said, id_=away.id)
            )
        else:
            host.tell(self, job, attempt, away.id)

    def _said(
        self, host: Site, job: str, attempt: int, request: Request, answer: Answer, id_: str = ""
    ) -> None:
        """At the host, when it has answered."""
        if isinstance(request, RenewLease):
            host.tell(self, job, attempt, id_)
        elif isinstance(answer, Accepted):
            host.tell(self, job, attempt, answer.id)
        elif isinstance(answer, Refused):
            self.counts["host refused"] += 1
            host.tell(self, job, attempt, "", refused=answer.message)

    def hear(self, report: NeighborReport) -> None:
        for handed in report.jobs:
            if handed.until_ms:
                self._until[handed.job, handed.attempt] = handed.until_ms
        before = self._heard.get(report.name)
        if before is not None:  # one report for each neighbor, with all that is new
            report = msgspec.structs.replace(
                report,
                clock_ms=max(before.clock_ms, report.clock_ms),
                jobs=before.jobs + report.jobs,
                offers=before.offers + report.offers,
            )
        if not self._heard:
            self.storm.timeline.after(HEARD_MS, self._pass_on)
        self._heard[report.name] = report

    def _pass_on(self) -> None:
        reports, self._heard = list(self._heard.values()), {}
        if self.world.controller.up:
            self.world.controller.neighbors(reports)

    # -- host: somebody else's job is a user's ---------------------------------------------

    def take(self, request: Request, said: Callable[[Request, Answer], None]) -> None:
        self.world.ask(request, partial(said, request))

    def tell(self, home: Site, job: str, attempt: int, id_: str, refused: str = "") -> None:
        """What its log says of the job."""
        if not self.world.controller.readable:
            return
        live = self.world.controller.state.jobs.get(id_)
        ended = None
        if live is None and id_:
            hosted = self.storm.everywhere.keys[self.name][key_of(home.name, job, attempt)]
            assert hosted.job == id_, f"{job} was {id_}, and is {hosted.job}"
            ended = hosted.ending
            assert ended is not None, id_
        handed = HandedJob(
            job=job,
            attempt=attempt,
            id=id_,
            phase=live.phase.value if live else "",
            until_ms=live.until_ms if live else 0,
            refused=refused,
            ended=ended,
        )
        self._report(home, jobs=(handed,))

    def offer(self, home: Site, asked: list[tuple[str, JobSpec]]) -> None:
        if self.world.controller.readable:
            offers = tuple(self._offer(job, spec) for job, spec in asked)
            self._report(home, offers=offers)

    def _offer(self, job: str, spec: JobSpec) -> Offer:
        """Some are wrong."""
        rng, calm = self._hosts, self.storm.post.calm
        if stays_home(spec) or (calm and not self.users.possible(spec)):
            return Offer(job=job, why="never")
        start_ms = rng.choice((0, 0, 5_000, 3_600_000, None))
        return Offer(job=job, start_ms=0 if calm else start_ms, price=rng.choice(PRICES))

    def _report(
        self, home: Site, *, jobs: tuple[HandedJob, ...] = (), offers: tuple[Offer, ...] = ()
    ) -> None:
        now_ms = self.clock.now_ms
        report = NeighborReport(name=self.name, clock_ms=now_ms, jobs=jobs, offers=offers)
        self.storm.post.send(self.name, home.name, partial(home.hear, report))

    # -- the end ---------------------------------------------------------------------------

    def unsettled(self) -> str:
        controller = self.world.controller
        for askers in (self.users, self.flows, self.replacing):
            if askers.open_questions:
                return f"{self.name}: unanswered: {list(askers.open_questions)}"
        if self.truth.unfinished:
            return f"{self.name}: unfinished: {list(self.truth.unfinished)}"
        if self.truth.lives.living:
            return f"{self.name}: alive: {', '.join(map(str, self.truth.lives.living))}"
        if not controller.readable:
            return f"{self.name}: the controller recovers"
        left = [*controller.state.away, *controller.state.strays]
        return f"{self.name}: away: {left}" if left else ""


class NeighborStorm:
    """One seed, one history of three clusters."""

    def __init__(self, seed: int, length: Length, *, checked: bool = True) -> None:
        self.seed, self.length, self.checked = seed, length, checked
        self.counts: Counter[str] = Counter()
        self.timeline = Timeline()
        self.everywhere = Everywhere(self.counts)
        self.post = Post(random.Random(f"{seed}/post"), self.timeline, self.counts)
        self.sites: dict[str, Site] = {}
        for name in NAMES:
            self.sites[name] = Site(name, self)

    def finish(self) -> Counter[str]:
        timeline = self.timeline
        try:
            self.post.plan(self.length.storm_ms)
            for site in self.sites.values():
                site.plan()
            timeline.run(self.length.storm_ms)
            self.post.calm = True
            for site in self.sites.values():
                site.calm_down()
                timeline.after(5 * MINUTE_MS, site.cancel_hopeless)
                timeline.after(2 * 3_600_000, site.cancel_hopeless)
            timeline.run(timeline.now_ms + self.length.calm_ms, lambda: not self._unsettled())
            if left := self._unsettled():
                raise Untruth(f"stuck: {left}")
            self.everywhere.verify_accounts()
            self._verify_steps()
        except AssertionError as error:
            raise SeedFailed(
                f"seed {self.seed} at {timeline.now_ms} ms: {error}; "
                f"to see it again: python -m storm.neighbors {self.seed}"
            ) from error
        return self.counts

    def _unsettled(self) -> str:
        return next(filter(None, (site.unsettled() for site in self.sites.values())), "")

    def _verify_steps(self) -> None:
        seconds = self.timeline.now_ms // 1000
        for site in self.sites.values():
            if site.world.controller.steps > STEPS_PER_SECOND_MAX * seconds:
                raise Untruth(f"{site.name} answers itself for ever")


def run_neighbors(seed: int, length: Length | None = None, *, checked: bool = True) -> Counter[str]:
    return NeighborStorm(seed, length or Length(), checked=checked).finish()


def _size(length: Length) -> Size:
    return Size(nodes=length.nodes)


def _another(policy: Policy) -> Policy:
    """Of no consequence for neighbors."""
    return msgspec.structs.replace(policy, run_ms_min=policy.run_ms_min + 500)


def _named(node: NodeSpec, cluster: str) -> NodeSpec:
    return msgspec.structs.replace(node, id=f"{cluster}{node.id}", checkpoints="")


def _shared(rng: random.Random, name: str, policy: Policy) -> Policy:
    """What goes to neighbors, what may come, and times that suit minutes."""
    others = [other for other in NAMES if other != name]
    caps = [
        Tenant(name=f"from-{other}", jobs_max=rng.choice((0, 0, 1, 3)))
        for other in others
        if rng.random() < 0.6
    ]
    shares = [
        Neighbor(
            name=other,
            after_ms=rng.choice((0, 20_000)),
            gpus_max=rng.choice((0, 0, 4)),
            price_max=rng.choice((0, 0, 1_000_000)),
        )
        for other in others
        if rng.random() < 0.5
    ]
    return msgspec.structs.replace(
        policy,
        tenants=(*(tenant for tenant in policy.tenants if not tenant.has_budget), *caps)
        if not any(tenant.parent or tenant.has_budget for tenant in policy.tenants)
        else tuple(caps),
        neighbors=tuple(shares),
        silent_after_ms=10_000,
        grace_ms=30_000,
        hang_after_ms=20_000,
    )


if __name__ == "__main__":
    _storm = NeighborStorm(int(sys.argv[1]), Length())
    _failure = None
    try:
        _storm.finish()
    except SeedFailed as _error:
        _failure = _error
    for _site in _storm.sites.values():
        print(*(f"{_site.name} {line.decode()}" for line in _site.world.disk.log), sep="\n")
    print(dict(sorted(_storm.counts.items())))
    if _failure is not None:
        raise SystemExit(str(_failure))
