"""Renders how gateways of several clusters serve one service together.

A request goes to this site's own replicas while they have room, else to the nearest other site that
has. It gets there by that site's door, which asks for a certificate, and never sends a request on.
A site that has filled up meanwhile refuses at once with 425. Then, and when it fails, the request
comes back to this gateway through `_home` for another turn, and waits here after the last one.

What sites tell each other is in headers that begin with `Shoal-`; those of clients are removed.
"""

from __future__ import annotations

import functools
import hashlib
import ssl
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

import msgspec

from shoal.gateway.quote import name, word
from shoal.model.far import FAR_MAX, Far
from shoal.model.service import GatewayEntry, Route, Routing, Served, Wanted

DOOR = "_door"
HOME = "_home"
NOWHERE = "_nowhere"
RANKS = "sites.map"  # SERVICE/RANK -> the site
# One backend for requests that may be repeated and one for those that may not; with the failures
# after which the next turn begins. A site that refuses has not begun the request.
AGAIN, ONCE = "_far-", "_once-"
RETRY_ON = {AGAIN: "conn-failure empty-response 425", ONCE: "conn-failure 425"}
IDEMPOTENT = "{ method GET HEAD OPTIONS PUT DELETE TRACE }"
TURNS_MAX = 3
KEPT_ONE_OF = 4  # slots of one replica: for a site's own requests
CLOSED = "this gateway has no door for other sites: its port is not set, or a service has it"
HEALTH = "/-/health/"
ROOM = "/-/room/"
# One check without an answer decides. It must be connected within its interval, TLS included, which
# is enough for 290 ms there and back.
CHECK = (
    "check inter 600ms fastinter 100ms downinter 300ms fall 1 rise 1"
    " observe layer4 error-limit 1 on-error mark-down"
)
# A site is often full for a moment: it refuses what comes then, and is asked again. It says that it
# has no room when it was full at this many checks in a row.
FULL_CHECKS = 2
CONNECT_MS_MIN = 1_000  # two round trips
BODY_WAIT_MS = 2_000  # a request whose body has not arrived by then is not repeated
# A machine that is gone without a word is noticed by what is under way there.
SILENT_MS = 2_000

HERE = f"{{ fe_name {DOOR} {HOME} }}"  # it has passed its first gateway
BY_DOOR = f"{{ fe_name {DOOR} }}"
TURN = "var(txn.turn) -m int"


def others(entry: GatewayEntry, served: Served) -> tuple[Far, ...]:
    """Sites that the gateway can call. The token router sees only its own cluster."""
    if not (served.far and entry.door and entry.door_pem):
        return ()
    if served.route.routing is Routing.CACHE:
        return ()
    found = {far.site: far for far in served.far if not trouble(far)}
    return tuple(found.values())


def with_door(wanted: Wanted) -> Wanted:
    """Without one, if its port is already somebody's: services go on without their other sites."""
    ports = {wanted.entry.port, *(served.route.port for served in wanted.services)}
    if not wanted.entry.door or wanted.entry.door not in ports:
        return wanted
    return msgspec.structs.replace(wanted, entry=msgspec.structs.replace(wanted.entry, door=0))


def trouble(far: Far) -> str:
    """What another cluster says of itself is not believed."""
    if not _der(far.certificate):
        return "its certificate is not one"
    try:
        ip_address(far.address)
    except ValueError:
        return f"its address {far.address!r} is not an IP address"
    return ""


@functools.lru_cache(256)
def _der(pem: str) -> bytes:
    """Of exactly one certificate that OpenSSL can read; else nothing."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=der)
    except (ValueError, ssl.SSLError):
        return b""
    return der


def pems(wanted: Wanted) -> dict[str, str]:
    """The files that the configuration names: what the door shows, what each site shows, and what
    all of them show. Their text is written anew from what was read."""
    found = {
        far.certificate: ssl.DER_cert_to_PEM_cert(_der(far.certificate))
        for served in wanted.services
        for far in others(wanted.entry, served)
    }
    if found:
        everybody = "".join(sorted(set(found.values())))
        found |= {DOOR: wanted.entry.door_pem, ROOM: everybody}
    return found


def file_name(pem: str) -> str:
    return f"certificate-{hashlib.sha256(pem.encode()).hexdigest()[:32]}.pem"


# -- frontends -----------------------------------------------------------------------------


def health(wanted: Wanted) -> Iterator[str]:
    """For a name service or load balancer in front of all sites."""
    shared = [served.route for served in wanted.services if others(wanted.entry, served)]
    if shared:
        yield f"    http-request set-log-level silent if {{ path_beg {HEALTH} }}"
    for route in shared:
        service = name(route.service)
        here = f"{{ path {HEALTH}{service} }}"
        yield f"    http-request return status 200 if {here} {{ nbsrv({service}) gt 0 }}"
        yield f"    http-request return status 200 if {here} {_anywhere(service)}"
        yield f"    http-request return status 503 if {here}"


def overflow(entry: GatewayEntry, served: Served, condition: str = "") -> Iterator[str]:
    """Before the rule by which a request goes to the service's own backend."""
    if others(entry, served):
        service = name(served.route.service)
        there = f"{condition} {_full(served.route)} {_anywhere(service)}".strip()
        yield f"    use_backend {AGAIN}{service} if {there} {IDEMPOTENT}"
        yield f"    use_backend {ONCE}{service} if {there}"


def frontends(wanted: Wanted, bind: str, known: Iterable[str]) -> Iterator[list[str]]:
    """`known`: rules by which the log knows a request."""
    files = {one: file_name(text) for one, text in pems(wanted).items()}
    if not files:
        return
    shared = [served for served in wanted.services if others(wanted.entry, served)]
    client = "    http-request set-src req.hdr_ip(shoal-for)"
    door = [
        f"frontend {DOOR}",
        f"    bind {bind} ssl crt {files[DOOR]} ca-file {files[ROOM]} verify required",
        *known,
        f"    http-request set-log-level silent if {{ path_beg {ROOM} }}",
        "    http-request set-var(txn.from) ssl_c_der,sha2(256),hex",
        f"    stick-table type string len 200 size {FAR_MAX * 100} expire 10s store gpc0",
        f"    http-request set-var(txn.asks) path,concat(,txn.from) if {{ path_beg {ROOM} }}",
        "    http-request track-sc0 var(txn.asks) if { var(txn.asks) -m found }",
    ]
    home = [
        f"frontend {HOME}",
        f"    bind unix@{HOME[1:]}.sock mode 600",
        *known,
        "    http-request set-var(txn.turn) req.hdr(shoal-turn),add(0)",
        client,
    ]
    to = []
    for served in shared:
        service, far = name(served.route.service), others(wanted.entry, served)
        hashes = " ".join(sorted(hashlib.sha256(_der(one.certificate)).hexdigest() for one in far))
        may = f"{{ var(txn.from) -m str -i {hashes} }}"
        meant = f"{{ req.hdr(shoal-service) -m str {service} }}"
        asks = f"    http-request return status 200 if {{ path {ROOM}{service} }} {may}"
        door.append(f"{asks} !{_full(served.route)} {{ sc_clr_gpc0(0) ge 0 }}")
        door.append(f"{asks} {{ sc_inc_gpc0(0) lt {FULL_CHECKS} }}")
        to.append(f"    use_backend {service} if {meant} {may}")
        turns = f"{meant} {{ {TURN} lt {min(len(far), TURNS_MAX)} }}"
        home += [*overflow(wanted.entry, served, turns), f"    use_backend {service} if {meant}"]
    door += [f"    http-request return status 503 if {{ path_beg {ROOM} }}", client, *to]
    for frontend in (door, home):
        yield [*frontend, f"    default_backend {NOWHERE}"]


def _full(route: Route, kept: int = 0) -> str:
    """`kept`: slots that are not given away."""
    if not route.concurrency:
        return f"{{ nbsrv({name(route.service)}) lt 1 }}"
    return f"{{ be_conn_free({name(route.service)}) lt {1 + kept} }}"


def _anywhere(service: str) -> str:
    """Besides `_home`, which is always there."""
    return f"{{ nbsrv({AGAIN}{service}) gt 1 }}"


# -- backends ------------------------------------------------------------------------------


def passed(route: Route, waiting: Iterable[str]) -> Iterator[str]:
    """What the service's own backend does with a request that has passed a gateway: its caller is
    known, and its path is the replica's. One that cannot be refused waits behind the site's own."""
    yield f"    http-request set-priority-class int(1) if {BY_DOOR}"
    again = f"{BY_DOOR} {{ req.hdr(shoal-again) -m found }}"
    # Else others would fill the slots, and this site's own requests would go elsewhere.
    full = _full(route, route.concurrency // KEPT_ONE_OF)
    for no_room in (full, f"{{ queue({name(route.service)}) gt 0 }}"):
        yield f"    http-request return status 425 if {again} {no_room}"
    # Without a replica that can be reached, this gateway itself says 503: nothing has begun.
    yield f"    http-request set-var(txn.again) bool(true) if {again}"
    yield "    http-response set-var(txn.answered) bool(true)"
    unbegun = "{ status 503 } { var(txn.again) -m found } !{ var(txn.answered) -m found }"
    yield f"    http-after-response set-status 425 if {unbegun}"
    yield from (f"{rule} {HERE}" for rule in waiting)
    yield f"    http-request del-header Shoal- -m beg if {HERE}"
    yield f"    http-request allow if {HERE}"


def before(route: Route, kind: str, buffer_bytes: int) -> Iterator[str]:
    """Of a backend of other sites: what comes before the rules of the entry."""
    yield f"backend {kind}{name(route.service)}"
    yield "    balance first"  # a request that failed elsewhere goes to `_home`, the first
    yield "    retries 1"
    yield f"    retry-on {RETRY_ON[kind]}"
    yield "    http-reuse always"  # a new connection takes two more round trips
    yield "    option forwardfor header Shoal-For"
    yield "    option srvtcpka"
    for part, value in (("idle", "1s"), ("intvl", "1s"), ("cnt", "2")):
        yield f"    srvtcpka-{part} {value}"
    yield f"    option httpchk GET {ROOM}{name(route.service)}"
    yield "    http-check expect status 200"
    yield f"    timeout connect {max(route.connect_timeout_ms, CONNECT_MS_MIN)}ms"
    yield "    http-request del-header Shoal- -m beg"
    yield f"    http-request set-header Shoal-Service {name(route.service)}"
    yield f"    http-request set-var(txn.turn) int(0) unless {{ {TURN} gt 0 }}"
    yield "    http-request set-header Shoal-Turn %[var(txn.turn),add(1)]"
    # The proxy can repeat only what it has as a whole.
    sized = f"{{ req.hdr(content-length) -m found }} {{ req.body_size lt {buffer_bytes} }}"
    yield f"    http-request wait-for-body time {BODY_WAIT_MS}ms if {sized}"
    yield "    http-request set-var(txn.size) req.body_size"
    whole = "{ req.body_len,sub(txn.size) eq 0 } !{ req.hdr(transfer-encoding) -m found }"
    yield f"    http-request set-header Shoal-Again 1 if {{ method GET HEAD }} {whole}"
    yield f"    http-request set-header Shoal-Again 1 if {sized} {whole}"
    yield f"    http-request allow if {HERE}"


def servers(entry: GatewayEntry, served: Served, kind: str) -> Iterator[str]:
    """By rank: each turn begins one further, and passes over sites without room."""
    service, far = name(served.route.service), others(entry, served)
    for rank in range(1, len(far) + 1):
        site = f"%[str({service}/{rank}),map({RANKS})]"
        yield f"    use-server {site} if {{ {TURN} lt {rank} }}"
    yield f"    server {HOME} unix@{HOME[1:]}.sock"
    for one in far:
        address = f"[{one.address}]" if ":" in one.address else one.address
        trusted = file_name(ssl.DER_cert_to_PEM_cert(_der(one.certificate)))
        check = CHECK if kind == AGAIN else f"track {AGAIN}{service}/{name(one.site)}"
        yield (
            f"    server {name(one.site)} {word(f'{address}:{one.port}')}"
            f" ssl crt {file_name(entry.door_pem)} ca-file {trusted} verify required"
            f" tcp-ut {SILENT_MS}ms {check}"
        )
