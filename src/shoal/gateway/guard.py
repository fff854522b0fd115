"""Renders who may call, and the way to the token router: rules of the services that need these.

The proxy looks a caller up by the hash of the secret in `Authorization: Bearer PREFIX_ID_SECRET`,
in one map, which the controller keeps and which stays when the controller is gone. A row says
everything about a caller, so that it comes and goes as one. Rules compare with names of services
and tenants only, which need no quotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shoal.gateway.quote import name
from shoal.machine.files import write_private
from shoal.model.access import CLUSTER, EVERY_SERVICE, Caller, is_open, members
from shoal.model.service import Route, Routing, Served

CALLERS = "callers.map"
RATES = "_callers"  # the table of requests by caller, in a backend of its own
SHARED = "_models"  # the backend of the address that all language models share
SHARED_PATH = "/v1/"
ROUTER = "_router"  # a server; no replica can have this name
NEVER_S = 99_999_999_999
RATED_MAX = 20_000  # callers whose requests in the last minute are known

# What a client sends by these is never for us, and the router believes what they say.
OURS = "X-Shoal-"
WISHES = ("Priority", "Deadline-Ms")  # the router reads these
SECRET_IN_URL = "'shoal(key)?_[a-z0-9]{8}|[?&](api[-_]?key|access_token)='"
# Several connections to a router may be idle when it dies, and each try can meet one of them.
RETRIES = 8
BODY_WAIT_MS = 2_000  # then it goes on without the rest, and is not repeated
ROUTER_CHECK = (
    "check inter 1s fastinter 100ms downinter 100ms fall 1 rise 1"
    " observe layer4 error-limit 1 on-error mark-down"
)
# A language model that was asked and did not answer is asked again: nothing was bought or sent.
OPENAI = (
    "{ method POST } { path_end /chat/completions /completions /embeddings /responses /rerank"
    " /score /tokenize }"
)


def is_guarded(route: Route) -> bool:
    return not is_open(route.access)


# -- rules ---------------------------------------------------------------------------------


def table() -> Iterator[str]:
    yield f"backend {RATES}"
    yield (
        f"    stick-table type string len 16 size {RATED_MAX} expire 2m store gpc0,gpc0_rate(1m)"
    )


def before(served: Served) -> Iterator[str]:
    """The first rules of a service's backend."""
    route = served.route
    yield from _look_up()
    if is_guarded(route):
        may = " or ".join(_may_call(served))
        yield f"    http-request {_answer(401, MISSING)} unless {CALLER}"
        yield f"    http-request {_answer(403, FORBIDDEN)} unless {may}"
    yield from _count()
    if route.routing is Routing.CACHE:
        yield whole()


def whole() -> str:
    """The proxy can repeat only what it has before it sends any of it."""
    return f"    http-request wait-for-body time {BODY_WAIT_MS}ms if {OPENAI}"


def after(route: Route) -> Iterator[str]:
    """The last ones: the replica does not see what its callers show."""
    yield f"    http-request del-header Authorization if {CALLER}"
    yield from _say_who(route.service)


def router() -> str:
    return f"    server {ROUTER} unix@router.sock {ROUTER_CHECK}"


def models(services: Iterable[Served]) -> list[Route]:
    return [served.route for served in services if served.route.routing is Routing.CACHE]


def shared(services: Iterable[Served], *, lua: bool) -> Iterator[str]:
    """The backend of the shared address. Which services a caller may choose there, the router
    knows; without a key it offers those that are open to everybody. While it is down, requests
    wait here: only it knows the replicas by their models."""
    routes = models(services)
    most = {
        wait: max(getattr(route, f"{wait}_timeout_ms") for route in routes)
        for wait in ("connect", "queue", "response", "tunnel")
    }
    yield f"backend {SHARED}"
    yield "    balance leastconn"
    yield f"    retries {RETRIES}"
    yield "    retry-on conn-failure empty-response"
    yield f"    timeout connect {most['connect']}ms"
    yield f"    timeout queue {most['queue']}ms"
    yield f"    timeout server {most['response']}ms"
    yield f"    timeout tunnel {most['tunnel']}ms"
    yield from _look_up()
    if not any(is_open(route.access) for route in routes):
        yield f"    http-request {_answer(401, MISSING)} unless {CALLER}"
    yield from _count()
    yield whole()
    if lua:
        most_held = sum(route.queue_max for route in routes)
        hold = f"lua.hold {SHARED} {most_held} {most['queue']}"
        yield f"    http-request {hold} if {{ nbsrv({SHARED}) eq 0 }}"
    yield f"    http-request del-header Authorization if {CALLER}"
    yield from _say_who("*")
    yield f"    http-request disable-l7-retry unless {{ method GET }} or {OPENAI}"
    yield router()


CALLER = "{ var(txn.caller) -m found }"


def _look_up() -> Iterator[str]:
    """Sets txn.caller, the id of whoever has shown a secret that is good now."""
    secret = "http_auth_bearer,field(3,_,0),sha2(256),hex,lower"
    twice = "{ req.fhdr_cnt(authorization) gt 1 } or { req.hdr_cnt(authorization) gt 1 }"
    yield f"    http-request {_answer(400, TWICE)} if {twice}"
    in_url = f"{{ url -m reg -i {SECRET_IN_URL} }}"
    yield f"    http-request set-log-level silent if {in_url}"
    yield f"    http-request {_answer(400, IN_URL)} if {in_url}"
    yield f"    http-request set-var(txn.row) {secret},map({CALLERS})"
    yield "    http-request set-var(txn.now) date"
    alive = "{ var(txn.row),field(2,:),sub(txn.now) gt 0 }"
    yield f"    http-request set-var(txn.caller) var(txn.row),field(1,:) if {alive}"


def _may_call(served: Served) -> Iterator[str]:
    route = served.route
    for_service = f"{{ var(txn.row),field(6,:) -m sub ,{name(route.service)}, ,{EVERY_SERVICE}, }}"
    if served.tenant:
        yield f"{{ var(txn.row),field(5,:) -m str {name(served.tenant)} }} {for_service}"
    person = "{ var(txn.row),field(4,:) -m str token }"
    if route.access == (CLUSTER,):
        yield person
    else:
        tenants = " ".join(
            one if one == "*" else name(one) for one in members(route.access, served.tenant)
        )
        yield f"{person} {{ var(txn.row),field(5,:) -m str {tenants} }}"


def _count() -> Iterator[str]:
    """Requests of a caller in a minute, at all services of this gateway together."""
    rated = "{ var(txn.rpm) -m int gt 0 }"
    yield f"    http-request set-var(txn.rpm) var(txn.row),field(3,:),add(0) if {CALLER}"
    yield f"    http-request track-sc1 var(txn.caller) table {RATES} if {rated}"
    yield f"    http-request set-var(txn.rate) sc1_gpc0_rate if {rated}"
    over = f"{rated} {{ var(txn.rpm),sub(txn.rate) le 0 }}"
    yield f"    http-request set-var(txn.wait) int(60),div(txn.rpm),add(1) if {over}"
    wait = "hdr Retry-After %[var(txn.wait)]"
    yield f"    http-request {_answer(429, TOO_MANY)} {wait} if {over}"
    yield f"    http-request sc-inc-gpc0(1) if {rated}"


def _say_who(service: str) -> Iterator[str]:
    """Of what a client calls like ours, only its own wishes are left."""
    for wish in WISHES:
        yield f"    http-request set-var(txn.wish_{wish[0]}) req.hdr({OURS}{wish})"
    yield f"    http-request del-header {OURS} -m beg"
    for wish in WISHES:
        found = f"{{ var(txn.wish_{wish[0]}) -m found }}"
        yield f"    http-request set-header {OURS}{wish} %[var(txn.wish_{wish[0]})] if {found}"
    yield f"    http-request set-header X-Shoal-Service {service}"
    yield f"    http-request set-header X-Shoal-Caller %[var(txn.caller)] if {CALLER}"


MISSING = "this service asks for a key: send it as Authorization: Bearer KEY"
FORBIDDEN = "this key is not for this service"
TWICE = "the header Authorization was sent twice"
IN_URL = "a key in a URL ends in logs: send it as Authorization: Bearer KEY"
TOO_MANY = "this key has used up its requests of this minute"
CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "permission_denied",
    429: "rate_limit_exceeded",
}


def _answer(status: int, text: str) -> str:
    """As OpenAI's clients expect it."""
    error = {
        "message": text,
        "type": "invalid_request_error",
        "param": None,
        "code": CODES[status],
    }
    body = json.dumps({"error": error}, separators=(",", ":"))
    ask = " hdr WWW-Authenticate 'Bearer realm=\"shoal\"'" if status == 401 else ""
    return f"return status {status} content-type application/json string '{body}'{ask}"


# -- rows of callers -----------------------------------------------------------------------


def rows(callers: Iterable[Caller]) -> dict[str, str]:
    """By hash: id, until when, requests a minute, what it is, tenant, services."""
    return {one.hash: _row(one) for one in callers}


def _row(one: Caller) -> str:
    until_s = one.until_ms // 1000 if one.until_ms else NEVER_S
    kind = "key" if one.services else "token"
    services = f",{','.join(one.services)}," if one.services else ""
    return f"{one.id}:{until_s}:{one.rpm}:{kind}:{one.tenant}:{services}"


def keep(directory: Path, found: Mapping[str, str]) -> None:
    """The proxy reads it when it starts and with each new configuration."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = "".join(f"{hash_} {row}\n" for hash_, row in found.items())
    write_private(directory / CALLERS, text.encode())


def map_changes(
    actual: Mapping[str, str], wanted: Mapping[str, str], file: str = CALLERS
) -> list[str]:
    """Commands for a runtime socket: first what ends."""
    gone = [f"del map {file} {one}" for one in actual if one not in wanted]
    other = [
        f"set map {file} {one} {row}"
        for one, row in wanted.items()
        if one in actual and actual[one] != row
    ]
    new = [f"add map {file} {one} {row}" for one, row in wanted.items() if one not in actual]
    return gone + other + new


def parse_map(text: str) -> dict[str, str]:
    """`show map`: an address, the key, the value."""
    words = (line.split() for line in text.splitlines())
    return {row[1]: row[2] for row in words if len(row) == 3}
