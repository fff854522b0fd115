"""Renders the HAProxy configuration of the wanted services: a pure function from data to text."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from shoal.gateway import guard, sites
from shoal.gateway.quote import Refused, call, in_format, name, pattern, word
from shoal.gateway.sites import IDEMPOTENT, NOWHERE, file_name, overflow
from shoal.machine.files import write_private
from shoal.model.service import SESSION_COOKIE as COOKIE
from shoal.model.service import (
    GatewayEntry,
    Replica,
    Route,
    Routing,
    Served,
    Wanted,
)
from shoal.model.tokens import ReplicaState

ENTRY = "_entry"  # not a valid service name, so it cannot clash

# Prefix routing and retries see only as much of a request as fits a buffer. A large buffer is
# copied for every request that may be retried, which halves the throughput, so only services that
# need one make it large.
BUFFER_BYTES = 16_384
BUFFER_BYTES_LARGE = 65_536
BUFFER_BYTES_SPARE = 2_048  # for what the proxy adds
PREFIX_BYTES = 1_024  # of a conversation's beginning
BODY_WAIT_MS = 2_000  # for the beginning of a body; then the request is routed without it
# No replica gets more than this share of the average in flight. A lower bound would send two
# requests of one conversation to different replicas even at low load.
LOAD_BOUND_PERCENT = 200
LINGER_S = 3_600  # streams that began before a reload may last this long
REQUEST_TIMEOUT_MS = 10_000  # for a client to send the request headers
KEEP_ALIVE_MS = 65_000  # longer than the minute after which most clients and proxies close
LOG_ALL_PER_S = 2_000
LOG_ONE_OF = 16
# What a thread keeps of freed memory for itself. HAProxy's 512 KiB are the buffers of some 30
# requests; with more at a time, each takes them from the heap that all threads share.
HOT_BYTES = 4 << 20
REQUEST_ID_BYTES = 128
TENANTS_MAX = 100_000
TENANT_BYTES = 64
# After a failed connection the next check comes soon, and one failed check decides.
CHECK = (
    "check inter 1s fastinter 100ms downinter 300ms fall 2 rise 1"
    " observe layer4 error-limit 1 on-error sudden-death"
)

SESSION = f"'^(([^;]*;)* *)({COOKIE}=[^;]*)(; *|$)(.*)$'"
HAS_SESSION = f"{{ req.fhdr(cookie) -m reg '(^|;) *{COOKIE}=' }}"
# A cookie without a name (`Set-Cookie: =shoal-...=...`) comes back as if its value were one.
SETS_SESSION = f"'^[[:space:]=]*{COOKIE}.*$'"
SESSIONS_TAKEN_OUT = 4

Weights = Mapping[tuple[str, str], int]  # (service, replica) -> weight


class Place(msgspec.Struct, frozen=True):
    """What the configuration must know about the machine."""

    lua: bool = True  # whether requests can be held while there is no replica
    log: bool = True


def render(wanted: Wanted, place: Place, weights: Weights | None = None) -> str:
    """The whole configuration, including replicas, so that a start or reload keeps them."""
    return _text(wanted, place, weights or {}, digest(wanted, place))


def digest(wanted: Wanted, place: Place) -> str:
    """Identifies a configuration without its replicas; a reload is needed only if it differs."""
    bare = Wanted(
        entry=msgspec.structs.replace(wanted.entry, names=()),
        services=tuple(
            Served(
                route=served.route,
                certificate=served.certificate,
                tenant=served.tenant if guard.is_guarded(served.route) else "",
                far=served.far,
            )
            for served in wanted.services
        ),
    )
    plain = msgspec.to_builtins(bare)
    # The text says enough of these, if they are used.
    for fields in (plain["entry"], *plain["services"]):
        for unused in ("door", "door_pem", "far"):
            fields.pop(unused, None)
    said = _text(bare, place, {}, "").encode() + msgspec.msgpack.encode(plain)
    return hashlib.sha256(said).hexdigest()[:16]


def server_options(route: Route, replica: Replica, weight: int | None = None) -> str:
    """What follows a server's name, both in the file and on the runtime socket."""
    address = f"[{replica.address}]" if ":" in replica.address else replica.address
    words = [
        word(f"{address}:{replica.port}"),
        f"id {server_number(replica.id)}",
        f"weight {replica.weight if weight is None else weight}",
    ]
    if route.concurrency:
        words.append(f"maxconn {route.concurrency}")
    # With a token router, replicas are asked directly only when it is gone.
    return " ".join([*words, CHECK, *(["backup"] if route.routing is Routing.CACHE else [])])


def server_number(replica_id: str) -> int:
    """It decides a replica's place on the hash ring, so it must survive reloads."""
    return zlib.crc32(replica_id.encode()) % (2**31 - 1) + 1


def _text(wanted: Wanted, place: Place, weights: Weights, known_as: str) -> str:
    concerned = any(served.route.asks for served in wanted.services)
    blocks = [
        _global(wanted, place, known_as),
        _defaults(place, queries=not concerned),
        _entry(wanted, place),
        *_between(wanted, place),
    ]
    for served in wanted.services:
        if served.route.port:
            blocks.append(_own_port(wanted.entry, served, place))
        blocks.append(_backend(wanted.entry, served, place, weights))
        if sites.others(wanted.entry, served):
            blocks += [_elsewhere(wanted, served, kind) for kind in sites.RETRY_ON]
    if guard.models(wanted.services):
        blocks.append(guard.shared(wanted.services, lua=place.lua))
    if concerned:
        blocks.append(guard.table())
    blocks.append(_nowhere())
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks)


def _global(wanted: Wanted, place: Place, known_as: str) -> Iterator[str]:
    yield "# Written by Shoal; changes made here are lost."
    yield "global"
    yield f"    description shoal:{known_as}"
    # The proxy runs in its own directory; `unix@` makes a bare name a socket path.
    yield "    stats socket unix@runtime.sock mode 600 level admin expose-fd listeners"
    yield "    stats timeout 1m"
    yield f"    hard-stop-after {LINGER_S}s"
    yield f"    tune.bufsize {_buffer_bytes(wanted)}"
    yield f"    tune.memory.hot-size {HOT_BYTES}"
    if wanted.entry.threads:
        yield f"    nbthread {wanted.entry.threads}"
    if place.log:
        yield "    log stdout len 4096 format raw local0 info"
    if place.lua:
        yield "    lua-load hold.lua"


def _buffer_bytes(wanted: Wanted) -> int:
    routes = [served.route for served in wanted.services]
    most = max((route.header_bytes_max for route in routes), default=0)
    large = most > BUFFER_BYTES - BUFFER_BYTES_SPARE
    large = large or any(route.routing in (Routing.PREFIX, Routing.CACHE) for route in routes)
    return BUFFER_BYTES_LARGE if large else BUFFER_BYTES


def _defaults(place: Place, *, queries: bool) -> Iterator[str]:
    yield "defaults"
    yield "    mode http"
    if place.log:
        yield f"    log-format '{_log_format(queries=queries)}'"
    yield "    option dontlognull"
    yield "    option abortonclose"
    # Else the kernel delays each small chunk, such as a streamed token, by 200 ms.
    yield "    option http-no-delay"
    # A client with an open connection may send its next request during a reload. It is answered and
    # asked to reconnect.
    yield "    option idle-close-on-response"
    yield "    option forwardfor"
    yield "    option redispatch 1"
    yield f"    timeout http-request {REQUEST_TIMEOUT_MS}ms"
    yield f"    timeout http-keep-alive {KEEP_ALIVE_MS}ms"
    yield "    timeout client 60s"
    yield "    timeout client-fin 10s"
    yield "    timeout check 2s"
    for status, text in ERRORS.items():
        yield f"    http-error status {status} {_json_error(text, retry=status == 503)}"


ERRORS = {
    408: "the request did not arrive in time",
    502: "the replica closed the connection or did not send HTTP",
    503: "no replica could take the request in time",
    504: "the replica did not answer in time",
}


def _json_error(text: str, *, retry: bool) -> str:
    again = " hdr Retry-After 1" if retry else ""
    return f'content-type application/json string \'{{"error":"{text}"}}\'{again}'


def _log_format(*, queries: bool) -> str:
    """One JSON object for each request; text from the client is escaped. Without `queries`, the
    log has no part of a URL in which somebody may have put a key."""
    path = "" if queries else "field(1,?),"
    texts = {
        "id": "%[var(txn.id),json(utf8s)]",
        "client": "%ci",
        "method": "%[capture.req.method,json(utf8s)]",
        "path": f"%[capture.req.uri,{path}bytes(0,1024),json(utf8s)]",
        "service": "%b",
        "replica": "%s",
        "end": "%tsc",
    }
    numbers = {
        "time_s": "%Ts.%ms",
        "status": "%ST",
        "bytes_in": "%U",
        "bytes_out": "%B",
        "queue_ms": "%Tw",
        "connect_ms": "%Tc",
        "response_ms": "%Tr",
        "total_ms": "%Ta",
        "in_flight": "%bc",
        "queued": "%bq",
    }
    fields = [f'"{name}":"{value}"' for name, value in texts.items()]
    fields += [f'"{name}":{value}' for name, value in numbers.items()]
    return "{" + ",".join(fields) + "}"


def _entry(wanted: Wanted, place: Place) -> Iterator[str]:
    entry = wanted.entry
    yield f"frontend {ENTRY}"
    yield f"    bind {_bind(entry.address, entry.port, entry.certificate)}"
    yield from sites.health(wanted)
    yield from _keep_host(wanted)
    yield from _identify(place, secure=bool(entry.certificate))
    # A host name is more specific than a path, so it goes first and the path stays whole.
    # NAME.DOMAIN comes before the `host` setting, so that no service can take another one's name.
    for served in wanted.services:
        yield from _use(entry, served, _by_name(entry, served.route))
    for served in wanted.services:
        if served.route.host:
            yield from _use(entry, served, _by_host(served.route.host))
    if guard.models(wanted.services):
        yield f"    use_backend {guard.SHARED} if {{ path_beg {guard.SHARED_PATH} }}"
    for served in sorted(wanted.services, key=lambda served: -len(served.route.prefix)):
        yield from _use(entry, served, _at(served.route.prefix))
        yield from _use(entry, served, _under(served.route.prefix))
    yield f"    default_backend {NOWHERE}"


def _use(entry: GatewayEntry, served: Served, condition: str) -> Iterator[str]:
    yield from overflow(entry, served, condition)
    yield f"    use_backend {name(served.route.service)} if {condition}"


def _own_port(entry: GatewayEntry, served: Served, place: Place) -> Iterator[str]:
    route = served.route
    if route.certificate and not served.certificate:
        raise Refused("its certificate is not known, and it is not served without")
    file = file_name(served.certificate) if route.certificate else ""
    yield f"frontend _port-{name(route.service)}"
    yield f"    bind {_bind(entry.address, route.port, file)}"
    yield f"    timeout client {route.client_timeout_ms}ms"
    yield from _identify(place, secure=bool(file))
    yield from overflow(entry, served)
    yield f"    default_backend {name(route.service)}"


def _between(wanted: Wanted, place: Place) -> Iterator[list[str]]:
    bind = _bind(wanted.entry.address, wanted.entry.door, "")
    known = [*(["    log global"] if place.log else []), OWN_ID]
    yield from sites.frontends(wanted, bind, known)


def _bind(address: str, port: int, certificate: str) -> str:
    host = f"[{address}]" if ":" in address else address
    secure = f" ssl crt {word(certificate)} alpn h2,http/1.1" if certificate else ""
    return word(f"{host}:{port}") + secure


def _keep_host(wanted: Wanted) -> Iterator[str]:
    """Keeps the host of a request that may be for a service by name. Most requests name none, so
    all services together look at the header once."""
    host = "req.hdr(host),host_only"
    own = f".{wanted.entry.domain}"
    yield f"    http-request set-var(txn.host) {host} if {{ {host} -m end -i {pattern(own)} }}"
    for served in wanted.services:
        if served.route.host:
            chosen = f"{{ {host} -m str -i {pattern(served.route.host)} }}"
            yield f"    http-request set-var(txn.host) {host} if {chosen}"


def _identify(place: Place, *, secure: bool) -> Iterator[str]:
    """Every request in the log has an id; the client's own is kept. Above LOG_ALL_PER_S, only one
    in LOG_ONE_OF and failures are logged, and only they get an id: both together cost half as much
    as all the rest."""
    sampled = ""
    if place.log:
        yield "    log global"  # frontends only: a backend would also log server state changes
        sampled = f" unless {{ fe_req_rate gt {LOG_ALL_PER_S} }} !{{ rand({LOG_ONE_OF}) eq 0 }}"
    yield f"    http-request set-var(txn.id) uuid(){sampled}"
    if place.log:
        yield f"    http-request set-log-level silent unless {IDENTIFIED}"
        yield "    http-response set-log-level info if { status ge 500 }"
        yield f"    http-response set-var(txn.id) uuid() if {{ status ge 500 }} !{IDENTIFIED}"
    yield OWN_ID
    yield f"    http-request set-header X-Request-Id %[var(txn.id)] if {IDENTIFIED}"
    yield f"    http-after-response set-header X-Request-Id %[var(txn.id)] if {IDENTIFIED}"
    yield f"    http-request set-header X-Forwarded-Proto {'https' if secure else 'http'}"
    yield from _withhold_sessions()


OWN_ID = f"    http-request set-var(txn.id) req.hdr(x-request-id),bytes(0,{REQUEST_ID_BYTES})"
IDENTIFIED = "{ var(txn.id) -m found }"


def _withhold_sessions() -> Iterator[str]:
    """Cookies belong to a host, not a port. So a browser that is signed in to the page also sends
    its session to services on the same machine, which could then use it. Each rule removes one
    session cookie; if there are more than these rules remove, no cookie is forwarded. For the same
    reason no answer may set it: browsers ignore a Set-Cookie header that is empty. These are the
    last rules of a frontend: a request without a session is done with them."""
    yield f"    http-request allow unless {HAS_SESSION}"
    for _ in range(SESSIONS_TAKEN_OUT):
        yield f"    http-request replace-header Cookie {SESSION} \\1\\5 if {HAS_SESSION}"
    yield f"    http-request del-header Cookie if {HAS_SESSION}"
    yield "    http-request del-header Cookie if { req.fhdr(cookie) -m len 0 }"
    yield f"    http-after-response replace-header Set-Cookie {SETS_SESSION} %[str()]"


def _by_name(entry: GatewayEntry, route: Route) -> str:
    return _by_host(f"{route.service}.{entry.domain}")


def _by_host(host: str) -> str:
    """Matches the whole name, with any port. A name that only begins like it is different."""
    return f"{{ var(txn.host) -m str -i {pattern(host)} }}"


def _at(path: str) -> str:
    return f"{{ path {pattern(path)} }}"


def _under(path: str) -> str:
    return f"{{ path_beg {pattern(f'{path}/')} }}"


def _backend(entry: GatewayEntry, served: Served, place: Place, weights: Weights) -> Iterator[str]:
    route, shared = served.route, bool(sites.others(entry, served))
    yield f"backend {name(route.service)}"
    yield from _balance(route)
    routed, asks = route.routing is Routing.CACHE, route.asks
    yield f"    retries {max(route.retries, guard.RETRIES) if routed else route.retries}"
    if route.retries or routed:
        yield "    retry-on conn-failure empty-response"
    yield f"    timeout connect {route.connect_timeout_ms}ms"
    yield from _timeouts(route)
    if routed:
        yield "    option allbackups"
    if shared:
        yield from _chosen(route)
        yield from sites.passed(route, _waiting(route, place))
    if asks:
        yield from guard.before(served)
    yield from _limits(route)
    yield from _rate(route)
    yield from _waiting(route, place)
    if shared:
        yield from _strip(entry, route)
    else:
        yield from _chosen(route, _strip(entry, route))
    if asks:
        yield from guard.after(route)
    if routed:
        yield guard.router()
    for replica in served.replicas:
        weight = weights.get((route.service, replica.id))
        if replica.state is ReplicaState.DRAINING:
            weight = 0  # nothing new goes there until the runtime socket sets the drain state
        yield f"    server {name(replica.id)} {server_options(route, replica, weight)}"


def _timeouts(route: Route) -> Iterator[str]:
    yield f"    timeout queue {route.queue_timeout_ms}ms"
    yield f"    timeout server {route.response_timeout_ms}ms"
    yield f"    timeout tunnel {route.tunnel_timeout_ms}ms"


def _chosen(route: Route, strip: Iterable[str] = ()) -> Iterator[str]:
    """By what the replica is chosen, and how often."""
    routed = route.routing is Routing.CACHE
    yield from _key(route)
    yield from strip
    if route.retries or routed:
        # A replica may have begun a request that failed: only idempotent ones are sent twice.
        more = f" or {guard.OPENAI}" if routed else ""
        yield f"    http-request disable-l7-retry unless {IDEMPOTENT}{more}"


def _elsewhere(wanted: Wanted, served: Served, kind: str) -> Iterator[str]:
    """Requests for which there is no room here: they pass all that the entry asks for."""
    route, entry = served.route, wanted.entry
    yield from sites.before(route, kind, _buffer_bytes(wanted) - BUFFER_BYTES_SPARE)
    yield from _timeouts(route)
    if route.asks:
        yield from guard.before(served)
    yield from _limits(route)
    yield from _rate(route, f" table {name(route.service)}")
    yield from _strip(entry, route)
    if route.asks:
        yield from guard.after(route)
    yield from sites.servers(entry, served, kind)


def _balance(route: Route) -> Iterator[str]:
    if route.routing in (Routing.LEAST_LOADED, Routing.CACHE):
        yield "    balance leastconn"
        return
    if route.routing is Routing.P2C:
        yield "    balance random(2)"
        return
    yield "    balance hash var(txn.key)"
    yield "    hash-type consistent sdbm avalanche"
    if route.routing is Routing.PREFIX:
        yield f"    hash-balance-factor {LOAD_BOUND_PERCENT}"


def _limits(route: Route) -> Iterator[str]:
    if route.header_bytes_max:  # measuring headers costs a fifth of a core's requests
        yield (
            f"    http-request {_answer(431, 'the headers are too large')}"
            f" if {{ req.hdrs,length gt {route.header_bytes_max} }}"
        )
    if route.body_bytes_max:
        yield (
            f"    http-request {_answer(413, 'the body is too large')}"
            f" if {{ req.body_size gt {route.body_bytes_max} }}"
        )


def _rate(route: Route, table: str = "") -> Iterator[str]:
    """`table`: of the service, if these are rules of another backend."""
    if not route.rate_per_s:
        return
    # Only accepted requests count, so that a client above its rate still gets that rate.
    if not table:
        yield (
            f"    stick-table type string len {TENANT_BYTES} size {TENANTS_MAX} expire 10s"
            " store gpc0,gpc0_rate(1s)"
        )
    sender = call("req.hdr", route.rate_header)
    yield f"    http-request track-sc0 {sender},sha2(256),hex{table} if {{ {sender} -m found }}"
    yield f"    http-request track-sc0 src{table} unless {{ {sender} -m found }}"
    yield (
        f"    http-request {_answer(429, 'too many requests', retry=True)}"
        f" if {{ sc0_gpc0_rate ge {route.rate_per_s} }}"
    )
    yield "    http-request sc-inc-gpc0(0)"


def _waiting(route: Route, place: Place) -> Iterator[str]:
    """Bounds the queue, both with replicas (HAProxy's queue) and without (held requests)."""
    service = name(route.service)
    if route.concurrency:  # else no request waits for a replica that is up
        full = _answer(503, "the queue is full", retry=True)
        yield f"    http-request {full} if {{ queue({service}) ge {route.queue_max} }}"
    if place.lua:
        hold = f"lua.hold {service} {route.queue_max} {route.queue_timeout_ms}"
        yield f"    http-request {hold} if {{ nbsrv({service}) eq 0 }}"


def _key(route: Route) -> Iterator[str]:
    """Sets the hash key. A request without one gets a random key, within the same load bound."""
    if route.routing is Routing.PREFIX:
        # A body longer than the buffer is fine: only its beginning is hashed.
        yield (f"    http-request wait-for-body time {BODY_WAIT_MS}ms if {{ method POST }}")
        # All conversations share the system message; together with the first question it identifies
        # one. Without a system message the second message is an answer, which is not there at
        # first.
        for variable, query in PREFIX_PARTS:
            yield (
                f"    http-request set-var(txn.{variable}) "
                f"req.body,json_query('{query}'),bytes(0,{PREFIX_BYTES}) if {{ method POST }}"
            )
        by_system = "{ var(txn.role) -m str system developer }"
        yield f"    http-request unset-var(txn.second) unless {by_system}"
        names = ",".join(f"concat(,txn.{variable})" for variable, _ in PREFIX_PARTS[1:])
        yield f"    http-request set-var(txn.key) str(),{names} if {{ method POST }}"
        yield "    http-request unset-var(txn.key) if { var(txn.key),length eq 0 }"
    elif route.sticky_header:
        yield f"    http-request set-var(txn.key) {call('req.hdr', route.sticky_header)}"
    elif route.sticky_cookie:
        fresh = f"{in_format(route.sticky_cookie)}=%[var(txn.fresh)]; Path=/; HttpOnly"
        yield f"    http-request set-var(txn.key) {call('req.cook', route.sticky_cookie)}"
        yield "    http-request set-var(txn.fresh) uuid() unless { var(txn.key) -m found }"
        yield "    http-request set-var(txn.key) var(txn.fresh) if { var(txn.fresh) -m found }"
        yield (
            f"    http-response add-header Set-Cookie {word(fresh)}"
            " if { var(txn.fresh) -m found }"
        )
    else:
        return
    yield "    http-request set-var(txn.key) rand(1000000000) unless { var(txn.key) -m found }"


PREFIX_PARTS = (
    ("role", "$.messages[0].role"),
    ("first", "$.messages[0].content"),
    ("second", "$.messages[1].content"),
    ("prompt", "$.prompt"),
)


def _strip(entry: GatewayEntry, route: Route) -> Iterator[str]:
    """Removes the prefix from requests that matched by path, not by host name or port."""
    shared = f" {{ fe_name {ENTRY} }}" if route.port else ""
    named = f"!{_by_name(entry, route)}"
    if route.host:
        named += f" !{_by_host(route.host)}"
    under = f"if {_under(route.prefix)} {named}{shared}"
    prefix = word(in_format(route.prefix))
    yield f"    http-request set-header X-Forwarded-Prefix {prefix} {under}"
    yield f"    http-request set-path %[path,bytes({len(route.prefix.encode())})] {under}"
    yield f"    http-request set-path / if {_at(route.prefix)} {named}{shared}"


def _nowhere() -> Iterator[str]:
    yield f"backend {NOWHERE}"
    yield f"    http-request {_answer(404, 'no service of this name')}"


def _answer(status: int, text: str, *, retry: bool = False) -> str:
    return f"return status {status} {_json_error(text, retry=retry)}"


# Certificates of services: private files in the gateway's folder, named by what is in them.


def keep(directory: Path, pem: str) -> Path:
    """The proxy reads it when it starts and with each new configuration."""
    path = directory / file_name(pem)
    if not path.exists():
        write_private(path, pem.encode())
    return path


def forget_others(directory: Path, pems: Iterable[str]) -> None:
    wanted = {file_name(pem) for pem in pems}
    for path in directory.glob("certificate-*.pem"):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
