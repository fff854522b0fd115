"""A service: replicas of a server behind the gateway, and its routes."""

from __future__ import annotations

import enum
import re
from typing import Annotated, NamedTuple

import msgspec

from shoal.model.access import ACCESS_MAX, CLUSTER, OPEN, Caller, is_open
from shoal.model.far import Far, SiteLoad
from shoal.model.identity import Name, ServiceName
from shoal.model.job import JobSpec
from shoal.model.secret import SECRET_NAME_PATTERN
from shoal.model.sites import Clusters, Site
from shoal.model.tokens import Goals, TokenCount, TokenLoad
from shoal.model.tokens import ReplicaState as ReplicaState

REPLICA_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(?!\n)$"
HEADER_NAME_PATTERN = r"^([A-Za-z0-9!#$&'*+.^_`|~-]*)(?!\n)$"
# Refuses text that HAProxy would read as more than one word, or as a variable.
PLAIN_PATTERN = r"^[A-Za-z0-9._:/@+,=-]*(?!\n)$"

# The last label starts with a letter, so that no IP address can be inside the domain.
DOMAIN_PATTERN = r"\A([a-z0-9-]+\.)*[a-z][a-z0-9-]*\Z"

HOST_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)*\.?(?!\n)$"
# The page's cookie (`api/access.py`), of this cluster and of others on the machine.
SESSION_COOKIE = "shoal-[0-9a-f]{8}"

Domain = Annotated[str, msgspec.Meta(max_length=190, pattern=DOMAIN_PATTERN)]
ReplicaId = Annotated[str, msgspec.Meta(max_length=100, pattern=REPLICA_ID_PATTERN)]
HeaderName = Annotated[str, msgspec.Meta(max_length=64, pattern=HEADER_NAME_PATTERN)]
Plain = Annotated[str, msgspec.Meta(max_length=255, pattern=PLAIN_PATTERN)]
# The proxy does not resolve names of replicas that are added while it runs.
IpAddress = Annotated[str, msgspec.Meta(max_length=45, pattern=r"^[0-9a-fA-F.:]+(?!\n)$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
PortOrNone = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]

# What Gradio and the command `uvicorn` read; both expect a proxy that strips the path. gunicorn's
# SCRIPT_NAME and Streamlit's base URL path expect one that does not, so they are not set.
ROOT_PATH_VARIABLES = ("GRADIO_ROOT_PATH", "UVICORN_ROOT_PATH")
HEADER_BYTES_LIMIT = 60_000  # fits the proxy's buffer along with the headers it adds


class Routing(enum.StrEnum):
    """How the replica for a request is chosen."""

    LEAST_LOADED = "least-loaded"  # fewest requests in flight for its speed
    P2C = "p2c"  # the less loaded of two random replicas
    PREFIX = "prefix"  # where the start of the conversation is cached, unless too loaded
    STICKY = "sticky"  # the same replica for the same header or cookie value
    CACHE = "cache"  # where the fewest tokens of the prompt are new, for its load (model/tokens.py)


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service as the gateway sees it. 0 and "" mean none."""

    service: ServiceName
    routing: Routing = Routing.LEAST_LOADED
    sticky_header: HeaderName = ""
    sticky_cookie: HeaderName = ""
    concurrency: Amount = 0  # requests that one replica handles at a time
    queue_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    queue_timeout_ms: Milliseconds = 60_000
    connect_timeout_ms: Milliseconds = 1_000
    response_timeout_ms: Milliseconds = 600_000  # longest silence of a replica that has a request
    client_timeout_ms: Milliseconds = 60_000  # longest silence of a client that should send or read
    tunnel_timeout_ms: Milliseconds = 3_600_000  # longest silence on a WebSocket
    body_bytes_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 << 20
    # 0: as large as the proxy's buffer, about 15 KiB.
    header_bytes_max: Annotated[int, msgspec.Meta(ge=0, le=HEADER_BYTES_LIMIT)] = 0
    rate_per_s: Amount = 0  # new requests per second for one tenant
    rate_header: HeaderName = "authorization"  # identifies the tenant; without it, the address does
    retries: Annotated[int, msgspec.Meta(ge=0, le=10)] = 3
    host: Plain = ""  # a host name of its own, besides NAME.DOMAIN
    path: Plain = ""  # a path of its own instead of /NAME
    port: PortOrNone = 0  # a port of its own, besides the shared one
    # For its own port: the tenant's secret with the certificate and its key, as PEM.
    certificate: Plain = ""
    # Who may call: OPEN, CLUSTER, or tenants by name. Empty: OPEN for the operator's services,
    # CLUSTER for those of added tenants.
    access: Annotated[tuple[Name, ...], msgspec.Meta(max_length=ACCESS_MAX)] = ()

    @property
    def prefix(self) -> str:
        """The service's path on the shared port; it is stripped from requests."""
        return self.path.rstrip("/") or f"/{self.service}"

    @property
    def asks(self) -> bool:
        """Whether the gateway wants to know who calls."""
        return self.routing is Routing.CACHE or not is_open(self.access)

    @property
    def root_path_env(self) -> dict[str, str]:
        """For a service that its user has put at a path: servers that make absolute links learn of
        it by these. At a host name or port, where nothing is stripped, the links would be wrong."""
        at_path = self.path and not self.host and not self.port
        return dict.fromkeys(ROOT_PATH_VARIABLES, self.prefix) if at_path else {}

    @property
    def claims(self) -> dict[str, str]:
        """What no other service may use, by field."""
        found = {"path": f"path {self.prefix}"}
        if self.host:
            found["host"] = f"host {_bare(self.host)}"
        if self.port:
            found["port"] = f"port {self.port}"
        return found


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one replica answers."""

    id: ReplicaId
    address: IpAddress
    port: Port
    weight: Annotated[int, msgspec.Meta(ge=1, le=256)] = 100
    state: ReplicaState = ReplicaState.READY


class Served(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route and the replicas behind it, possibly none. `owner`: the tenant, if it is one that was
    added; what belongs to no such tenant is the operator's. `certificate`: the value of the
    route's secret; `problem`: why there is none. `tenant`: whose keys are good for it. `far`: its
    other sites."""

    route: Route
    replicas: tuple[Replica, ...] = ()
    owner: str = ""
    certificate: str = ""
    problem: str = ""
    tenant: str = ""
    goals: Goals = Goals()
    adapters: str = ""
    adapters_max: int = 0
    far: tuple[Far, ...] = ()


class GatewayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The port that all services share."""

    address: Plain = "127.0.0.1"
    port: Port = 8080
    certificate: Plain = ""
    domain: Domain = "localhost"  # a service is also at NAME.DOMAIN
    threads: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # 0: one for each core
    names: tuple[str, ...] = ()  # of the head itself; *.NAME is every name below it
    # Where gateways of other clusters call, if a service has other sites; 0: nowhere. With it goes
    # its certificate with the key, as PEM.
    door: PortOrNone = 0
    door_pem: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full configuration that the gateway has to put in place. `refused`: keys that have used
    up their tokens, and until when."""

    entry: GatewayEntry = GatewayEntry()
    services: tuple[Served, ...] = ()
    callers: tuple[Caller, ...] = ()
    refused: dict[str, int] = {}


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica is ready when this path answers with a status below 500; with `models`, when it
    lists at least one, as OpenAI's /v1/models does. From then on it is probed every `every_ms`
    while it has requests and answers none, and more rarely while it has none; after
    `failures` probes in a row without an answer, it is replaced."""

    path: Plain = "/"
    models: bool = False
    timeout_ms: Milliseconds = 2_000
    start_ms: Milliseconds = 600_000  # it must be ready by then
    every_ms: Milliseconds = 10_000
    failures: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 6


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run enough replicas that each has about `target` requests in flight or waiting."""

    least: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    most: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    target: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 8
    down_after_ms: Milliseconds = 60_000  # scale down after fewer were enough for this long
    idle_ms: Milliseconds = 300_000  # if `least` is 0: to zero after this long without requests


class Rollout(enum.StrEnum):
    """What comes first when a replica of a new version takes the place of an old one."""

    SURGE = "surge"  # the new one starts and gets ready, then the old one is drained
    REPLACE = "replace"  # where there is no room for both, the old one is drained first


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user asks for. Each replica is a job like `replica`, with PORT set. Sending the same
    spec again changes nothing; another one is rolled out."""

    name: ServiceName
    replica: JobSpec
    scale: Scale = Scale()
    probe: Probe = Probe()
    route: Route | None = None  # None: the default route
    drain_ms: Milliseconds = 60_000  # time for a replica that ends to finish its requests
    rollout: Rollout = Rollout.SURGE
    # Replicas that a roll-out replaces at a time. 0: a quarter of them, and at least one.
    at_a_time: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    # The last replica sleeps after this long without requests. 0: never.
    sleep_after_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 0
    goals: Goals = Goals()  # what its users shall see; only a service of route `cache` has them
    # Names of adapters are those of the folders there: a path that replicas have, or a URL.
    adapters: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    # Loaded in a replica at a time. 0: as many as the engine takes.
    adapters_max: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 0
    # Neighbors that serve it, too, each with replicas of its own; `here` may be named.
    clusters: Clusters = ()

    @property
    def way(self) -> Route:
        return self.route or Route(service=self.name, concurrency=self.scale.target)


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What the gateway sees of a replica."""

    up: bool
    in_flight: int
    answers_per_ks: int = 0  # per thousand seconds
    response_ms: int = 0


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the inference engine inside a replica says of itself."""

    waiting: int  # requests that it has and does not work on
    running: int
    cache_milli: int = 0  # the part of its cache that is in use


DAY_SLOTS = 96  # quarters of an hour


class ServiceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway sees of a service, about once a second. `ready`: jobs whose probe was
    answered; `trouble`: why the service cannot be served at all."""

    service: str
    in_flight: int = 0
    queued: int = 0
    held: int = 0  # requests that wait because there is no replica
    answers_per_ks: int = 0  # per thousand seconds
    failures_per_ks: int = 0
    response_ms: int = 0
    p50_ms: int = 0  # time until an answer began, over the last seconds
    p95_ms: int = 0
    p99_ms: int = 0
    replicas: dict[str, ReplicaLoad] = {}
    ready: tuple[str, ...] = ()
    trouble: str = ""
    seen: bool = True
    unanswered: dict[str, int] = {}  # job -> probes in a row without an answer, since it was ready
    engines: dict[str, EngineFigures] = {}  # job -> as its /metrics says, if it has an engine
    tokens: TokenLoad | None = None  # what the token router sees, if the service has one
    token_counts: tuple[TokenCount, ...] = ()
    sites: dict[str, SiteLoad] = {}  # its other sites, by name
    # Its usual work in each part of a day (UTC), in thousandths, if it has goals; -1: not known.
    day: tuple[int, ...] = ()

    @property
    def tells(self) -> bool:
        """Whether the figures mean anything; if not, that is not the same as idle."""
        return self.seen and not self.trouble

    @property
    def work(self) -> int:
        """What came in here and is not done, wherever it is: more replicas would keep it here."""
        elsewhere = sum(one.in_flight for one in self.sites.values())
        return self.in_flight + self.queued + self.held + elsewhere


VERSIONS_KEPT = 10


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a service that was ready once. `at_ms`, `why`: when it was set, and by whom."""

    version: int
    spec: ServiceSpec
    at_ms: int = 0
    why: str = ""


class Service(msgspec.Struct, kw_only=True):
    """A service's whole record. Only `apply` changes it."""

    spec: ServiceSpec
    version: int = 1
    wanted: int = 0
    since_ms: int = 0
    stopping: bool = False
    proven: bool = False  # this version has been ready
    before: ServiceSpec | None = None  # the last version that was ready, to go back to
    before_version: int = 0
    past: list[Past] = []  # versions that were ready and were replaced, the newest last
    set_ms: int = 0  # since when this version is wanted, and who wanted it
    set_why: str = ""
    newest: int = 1  # version numbers are never used twice
    failures: int = 0  # failures of this version in a row
    retry_ms: int = 0  # no new replica before then
    ready: dict[str, int] = {}  # job -> since when
    draining: dict[str, int] = {}
    why: str = ""
    sites: dict[str, Site] = {}  # neighbors that serve it, too, or are to end it
    doors: tuple[Far, ...] = ()  # at a neighbor of its home: its other sites, as home names them

    @property
    def far(self) -> tuple[Far, ...]:
        """Its other sites, as far as their doors are known."""
        sites = (self.sites.get(name) for name in self.spec.clusters)
        return self.doors or tuple(one.door for one in sites if one and one.door)

    @property
    def earlier(self) -> list[Past]:
        """What it may go back to, the newest first; what runs now is not among them."""
        kept = list(self.past)
        if self.before is not None and all(one.version != self.before_version for one in kept):
            # stored by a version of Shoal that kept one only
            kept.append(Past(version=self.before_version, spec=self.before))
        known = [self.spec.replica]
        found = []
        for one in sorted(kept, key=lambda one: -one.version):
            if one.spec.replica not in known and not self.stopping:
                known.append(one.spec.replica)
                found.append(one)
        return found


def problem_with_service(spec: ServiceSpec) -> tuple[str, str] | None:
    """What is wrong beyond what the types refuse: the field, and what would work."""
    if _is_number(spec.name):
        return (
            "name",
            f"{spec.name!r} could be an IP address; put a letter first, such as s{spec.name}",
        )
    if spec.scale.least > spec.scale.most:
        return "replicas", f"{spec.scale.least}..{spec.scale.most} is reversed"
    if spec.replica.elastic:
        return "members", "a replica has a fixed number of members, such as 2; scale with replicas"
    if spec.sleep_after_ms and (spec.replica.no_sleep or spec.replica.whole_nodes):
        what = "no_sleep" if spec.replica.no_sleep else "whole_nodes"
        return "sleep_after", f"a replica with {what} cannot sleep; leave one of them out"
    if spec.way.service != spec.name:
        return "route", f"is for {spec.way.service}, not for {spec.name}"
    if not spec.probe.path.startswith("/"):
        return "probe", f"{spec.probe.path!r} is not a path such as /health"
    if spec.way.routing is not Routing.CACHE:
        given = {"ttft": spec.goals.ttft_ms, "itl": spec.goals.itl_ms, "adapters": spec.adapters}
        given["goodput"] = spec.goals.share_milli != Goals().share_milli
        for field in [name for name, value in given.items() if value]:
            return field, "needs a service of a language model; add route: cache"
    if spec.goals.share_milli != Goals().share_milli and not spec.goals:
        return "goodput", "is a share of the requests that meet a goal; add ttft or itl"
    if spec.adapters_max and not spec.adapters:
        return "adapters_max", "has no effect without adapters; leave it out"
    problem = _problem_with_route(spec.way)
    if problem is not None:
        field, _, message = problem.partition(": ")
        return (field, message) if message else ("route", problem)
    return None


def problem_with_services(wanted: Wanted) -> str | None:
    """What is wrong beyond what the types refuse, in one sentence; None if nothing is."""
    return next(iter(problems_with_services(wanted).values()), None)


def problems_with_services(wanted: Wanted) -> dict[int, str]:
    """By the place in `services`. Of two that contradict each other, it is the later one's."""
    claims, names, found = Claims(), set[str](), dict[int, str]()
    for place, served in enumerate(wanted.services):
        route = served.route
        clash = claims.clash(route, served.owner)
        problem = (
            _problem_with_route(route)
            or problem_with_certificate(route)
            or served.problem
            or _problem_with_replicas(served)
            or problem_with_names(wanted.entry, route, served.owner)
            or (f"{clash.claim} is already used by service {clash.holder}" if clash else None)
        )
        if route.service in names:
            problem = f"service {route.service} is already used by another one of this name"
        if route.port == wanted.entry.port:
            problem = f"port {route.port} is already used by the gateway itself"
        if problem:
            found[place] = f"service {route.service}: {problem}"
            continue
        names.add(route.service)
        claims.add(route, served.owner)
    return found


class Clash(NamedTuple):
    field: str
    claim: str
    holder: str  # a service


class Claims:
    """What services hold at the gateway. A path also holds what is below it against other owners:
    the longest path wins, so a service there would get their requests."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}  # claim -> service
        self._paths: dict[str, tuple[str, str]] = {}  # path -> owner, service
        self._above: dict[str, dict[str, str]] = {}  # path above others -> owner -> service

    def add(self, route: Route, owner: str) -> None:
        for claim in route.claims.values():
            self._held[claim] = route.service
        self._paths[route.prefix] = owner, route.service
        for path in _above(route.prefix):
            self._above.setdefault(path, {})[owner] = route.service

    def clash(self, route: Route, owner: str) -> Clash | None:
        for field, claim in route.claims.items():
            if claim in self._held:
                return Clash(field, claim, self._held[claim])
        around = [self._paths[path] for path in _above(route.prefix) if path in self._paths]
        for other, service in (*around, *self._above.get(route.prefix, {}).items()):
            if other != owner:
                return Clash("path", f"a path inside or around {route.prefix}", service)
        return None


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


def problem_with_names(entry: GatewayEntry, route: Route, owner: str) -> str | None:
    """The names of the head and of its domain are the operator's to give: requests of all tenants
    come by them. In the domain, a service has its own name, unless that is the head's."""
    if not owner:
        return None
    full, heads = f"{route.service}.{entry.domain}", [name.lower() for name in entry.names]
    if full in heads or (route.service in heads and entry.domain != "localhost"):
        return f"name: {full} is a name of the head; choose another"
    return _problem_with_host(entry, route.host) if route.host else None


def _problem_with_host(entry: GatewayEntry, host: str) -> str | None:
    bare = _bare(host)
    for name in (entry.domain, "localhost", *entry.names):
        below = name.startswith("*.") or name in (entry.domain, "localhost")
        name = name.removeprefix("*.").lower()
        if bare == name or (below and bare.endswith(f".{name}")):
            return f"host: {host!r} is a name of the head or in its domain; choose another"
        if "." not in name and bare.startswith(f"{name}."):  # head, for head.example.com
            return f"host: {host!r} is a name of the head or in its domain; choose another"
    return None


def problem_with_certificate(route: Route) -> str | None:
    """Files of the head are not for services: before 0.6, this was the path of one."""
    if not route.certificate or re.fullmatch(SECRET_NAME_PATTERN, route.certificate):
        return None
    fix = f"shoal secret set {route.service}-tls < FILE, then certificate: {route.service}-tls"
    return f"certificate: {route.certificate!r} is not the name of a secret; set one with: {fix}"


def _bare(host: str) -> str:
    return host.lower().rstrip(".")


def _problem_with_route(route: Route) -> str | None:
    sticky = bool(route.sticky_header) + bool(route.sticky_cookie)
    if route.routing is Routing.STICKY and sticky != 1:
        return "sticky routing needs either sticky_header or sticky_cookie"
    if route.routing is not Routing.STICKY and sticky:
        return "sticky_header and sticky_cookie need routing: sticky"
    if route.certificate and not route.port:
        return "certificate: a certificate of its own needs a port of its own; set port"
    if route.sticky_cookie and re.match(SESSION_COOKIE, route.sticky_cookie):
        return (
            f"sticky_cookie: {route.sticky_cookie!r} is a cookie of the page; choose another name"
        )
    if route.host and not re.fullmatch(HOST_PATTERN, route.host):
        return f"host: {route.host!r} is not a host name such as {route.service}.example.com"
    if route.host and _is_everybodys(route.host):
        return f"host: {route.host!r} is how every service is reached; choose a name of its own"
    if route.path and (route.path[0] != "/" or not route.path.strip("/")):
        return f"path: {route.path!r} is not a path such as /{route.service}"
    if len(route.access) > 1 and {OPEN, CLUSTER} & set(route.access):
        return f"access: {OPEN} and {CLUSTER} stand alone; name tenants, or one of these"
    return None


def _is_everybodys(host: str) -> bool:
    """An address, or this machine's usual name: a host wins over a path, so a service with such a
    host would get requests meant for others."""
    bare = _bare(host)
    return bare == "localhost" or ":" in bare or _is_number(bare.rpartition(".")[2])


def _is_number(word: str) -> bool:
    """Text that a resolver may take for an address: 127, 0x7f."""
    return word.isdigit() or (word.startswith("0x") and set(word[2:]) <= set("0123456789abcdef"))


def _problem_with_replicas(served: Served) -> str | None:
    seen: set[str] = set()
    for replica in served.replicas:
        if replica.id in seen:
            return f"replica {replica.id} is named twice"
        seen.add(replica.id)
    return None
