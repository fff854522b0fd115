"""One service at three sites: real gateways, real TLS between them, lines that can be cut."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.sites import Site, Sites, door_certificate
from harness.waiting import WAIT_S, until

from shoal.gateway.binary import GatewayError, find_binary
from shoal.gateway.gateway import HaproxyBalancer
from shoal.gateway.nearest import ranked
from shoal.gateway.sites import CLOSED, RANKS
from shoal.model.access import Caller
from shoal.model.far import Far, SiteLoad
from shoal.model.service import Replica, Route
from tests.gateway.world import ROOT, Answer, get, raw, read_until

# On a busy machine a check may fail: then a request waits here, is refused, and is sent once more.
ROUTE = Route(service="chat", concurrency=2, queue_timeout_ms=2_000)
# There and back, in seconds.
TRIPS_S = {frozenset("ab"): 0.005, frozenset("ac"): 0.080, frozenset("bc"): 0.150}


class Three:
    """Sites a, b and c with one replica each."""

    def __init__(self, folder: Path) -> None:
        self.sites = Sites("abc", TRIPS_S, folder)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name in "abc":
            self.start(name)
        self.serve(ROUTE)

    def __getitem__(self, name: str) -> Site:
        return self.sites.all[name]

    def start(self, name: str) -> None:
        argv = [sys.executable, "-m", "tests.gateway.replica", "0", name]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.processes[name] = process
        assert process.stdout is not None
        port = int(process.stdout.readline())
        self[name].replicas = (Replica(id=f"{name}1", address="127.0.0.1", port=port),)

    def serve(self, *routes: Route, **more: Any) -> None:
        for site in self.sites.all.values():
            site.serve(*routes, **more)

    def look(self, name: str) -> dict[str, SiteLoad]:
        return self[name].look()["chat"].sites

    def rooms(self, name: str) -> set[str]:
        return {site for site, load in self.look(name).items() if load.room}

    def story(self) -> str:
        return "\n".join(f"{name}: {site.look()}" for name, site in self.sites.all.items())

    def seen(self, name: str, seers: str) -> bool:
        """Whether it has room, by the word of all others among `seers`."""
        return all(name in self.rooms(one) for one in seers if one != name)

    def get(self, name: str, path: str = "/chat/", **options: Any) -> Answer:
        return get(self[name].port, path, **options)

    def door(self, name: str, pem: str, path: str, **headers: str) -> tuple[int, str]:
        """A request at its door, by whoever has this certificate and key."""
        context = ssl._create_unverified_context()
        if pem:
            (self[name].folder / "stranger.pem").write_text(pem)
            context.load_cert_chain(self[name].folder / "stranger.pem")
        port = self[name].door
        made = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
        with contextlib.closing(made) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()

    def close(self) -> None:
        self.sites.close()
        for name in list(self.processes):
            self.stop(name)


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Three(Path(folder))
        try:
            until(lambda: all(len(made.rooms(name)) == 2 for name in "abc"), "room everywhere")
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def busy(
    three: Three, name: str, *, headers: dict[str, str] | None = None, seers: str = "abc"
) -> Iterator[None]:
    """The slots of this site are taken by requests of its own."""
    more = "".join(f"{key}: {value}\n" for key, value in (headers or {}).items())
    with contextlib.ExitStack() as stack:
        for _ in range(ROUTE.concurrency):
            text = f"GET /chat/stepped HTTP/1.1\nHost: x\n{more}\n"
            connection = stack.enter_context(raw(three[name].port, text))
            assert b" 200 " in read_until(connection, b"\r\n\r\n")
        yield
    until(lambda: three.seen(name, seers), "there is room again", three.story)


def reaches(three: Three, site: str, **options: Any) -> None:
    until(lambda: three.get("a", **options).body == site, f"a request reaches {site}", three.story)


def test_a_site_serves_its_own_requests_and_then_the_nearest_with_room_does(three: Three) -> None:
    assert three.get("a").body == "a"
    with busy(three, "a"):
        for method, body in (("GET", None), ("POST", b"{}"), ("PUT", b"x" * 100_000)):
            reaches(three, "b", method=method, body=body)
        with busy(three, "b"):
            reaches(three, "c", method="POST", body=b"{}")
    until(lambda: three.look("a")["c"].round_trip_ms > three.look("a")["b"].round_trip_ms > 0)


def test_when_all_are_full_a_request_waits_where_it_came_in(three: Three) -> None:
    three.serve(msgspec.structs.replace(ROUTE, queue_timeout_ms=600_000))
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(three.get("a")))
    with busy(three, "a"), busy(three, "b"), busy(three, "c"):
        waiting.start()
        until(lambda: three["a"].look()["chat"].queued == 1, "it waits here")
        assert [three[name].look()["chat"].queued for name in "bc"] == [0, 0]
        until(lambda: not three.rooms("a"), "nobody has room, and that is known")
        health = [get(three["a"].port, f"/-/health/{one}").status for one in ("chat", "x")]
        assert health == [200, 404]
    waiting.join(WAIT_S)
    assert answers[0].body == "a"
    three.serve(ROUTE)


def answered(three: Three, **options: Any) -> Answer:
    def found() -> Answer | None:
        answer = three.get("a", "/chat/echo", **options)
        return answer if answer.status == 200 else None

    answer = until(found, "an answer", three.story)
    assert answer is not None
    return answer


def test_what_goes_to_another_site_looks_there_as_at_home(three: Three) -> None:
    sent = {"X-Request-Id": "one", "X-Own": "kept"}
    lies = {"Shoal-For": "9.9.9.9", "Shoal-Turn": "7", "Shoal-Service": "x", "Shoal-Again": "1"}
    at_home = three.get("a", "/chat/echo", headers=sent, source="127.0.0.5")
    with busy(three, "a"):
        away = answered(three, headers={**sent, **lies}, source="127.0.0.5")
    assert away.headers["x-request-id"] == "one"
    assert sorted(away.body.splitlines()) == sorted(at_home.body.splitlines())
    assert "x-forwarded-for: 127.0.0.5" in away.body


def test_who_has_no_key_or_asks_too_often_gets_nowhere_elsewhere_either(three: Three) -> None:
    key = Caller(id="k1", hash=hashlib.sha256(b"s3").hexdigest(), services=("chat",), tenant="lab")
    route = msgspec.structs.replace(ROUTE, access=("lab",), rate_per_s=3)
    alien = Caller(id="k2", hash=hashlib.sha256(b"s4").hexdigest(), services=("x",), tenant="lab")
    three.serve(route, tenant="lab", callers=(key, alien))
    shown = {"Authorization": "Bearer shoal_k1_s3"}
    with busy(three, "a", headers=shown):
        assert three.get("a").status == 401
        other = {"Authorization": "Bearer shoal_k2_s4"}
        assert three.get("a", headers=other).status == 403
        assert "authorization" not in answered(three, headers=shown).body
        with ThreadPoolExecutor(8) as pool:

            def statuses() -> set[int]:
                return set(pool.map(lambda _: three.get("a", headers=shown).status, range(16)))

            until(lambda: {200, 429} <= statuses(), "more than three in a second")
    three.serve(ROUTE)


def test_a_door_opens_services_by_certificate_and_no_others(three: Three) -> None:
    """As a neighbor that wants more than it was given."""
    a, b, stranger = three["a"], three["b"], door_certificate("x")[1]
    own = msgspec.structs.replace(ROUTE, service="own")
    only_c = tuple(far for far in a.far if far.site == "c")
    a.serve(ROUTE, own, far={"chat": a.far, "own": only_c})
    assert three.door("a", b.pem, "/-/room/chat")[0] == 200
    assert three.door("a", b.pem, "/", **{"Shoal-Service": "chat"}) == (200, "a")
    assert (
        three.door("a", b.pem, "/-/room/own")[0] == three.door("a", b.pem, "/-/room/none")[0] == 503
    )
    for path, service in (("/", "own"), ("/own/", ""), ("/chat/", ""), ("/", "_home"), ("/", "")):
        assert three.door("a", b.pem, path, **{"Shoal-Service": service})[0] == 404, (path, service)
    assert three.door("a", three["c"].pem, "/", **{"Shoal-Service": "own"}) == (200, "a")
    for nobody in (stranger, ""):
        with pytest.raises(ssl.SSLError):
            three.door("a", nobody, "/-/room/chat")
    a.serve(ROUTE)


class Liar:
    """A door that says it has room, and treats what comes as it likes."""

    def __init__(self, pem: str, folder: Path) -> None:
        (folder / "liar.pem").write_text(pem)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "liar.pem")
        self._ear = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._ear.getsockname()[1])
        self.answer = b""
        self.met: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                plain, _ = self._ear.accept()
            except OSError:
                return
            threading.Thread(target=self._meet, args=(plain,), daemon=True).start()

    def _meet(self, plain: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            plain,
            self._context.wrap_socket(plain, server_side=True) as secure,
        ):
            head = read_until(secure, b"\r\n\r\n")
            if b"/-/room/" in head:
                secure.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                self.met.append(head)
                length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
                rest = int(length or 0) - len(head.partition(b"\r\n\r\n")[2])
                while rest > 0:
                    rest -= len(secure.recv(4096))
                secure.sendall(self.answer)

    def close(self) -> None:
        self._ear.shutdown(socket.SHUT_RDWR)
        self._ear.close()


def test_a_site_that_refuses_or_breaks_off_costs_another_turn(three: Three) -> None:
    a = three["a"]
    shown, pem = door_certificate("liar")
    liar = Liar(pem, a.folder)
    false = Far(site="b", address="127.0.0.1", port=liar.port, certificate=shown)
    honest = next(far for far in a.far if far.site == "c")
    a.serve(ROUTE, far={"chat": (false, honest)})
    with contextlib.closing(liar), busy(three, "a", seers="c"):
        until(lambda: three.rooms("a") == {"b", "c"})
        liar.answer = b"HTTP/1.1 425 Too Early\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        for method, body in (("GET", None), ("POST", b"{}"), ("POST", b"x" * 10_000)):
            reaches(three, "c", method=method, body=body)
        assert liar.met and all(b"shoal-again: 1" in head for head in liar.met)
        # What it cannot repeat, it does not say it could.
        large: dict[str, Any] = {"method": "POST", "body": b"x" * 100_000}
        until(lambda: three.get("a", **large).status == 425)
        assert b"shoal-again" not in liar.met[-1]
        liar.answer = b""
        reaches(three, "c")
        small: dict[str, Any] = {"method": "POST", "body": b"{}"}
        until(lambda: three.get("a", **small).status == 502)  # it may have been begun
    a.serve(ROUTE)


def test_a_site_that_is_gone_loses_its_requests_to_the_next(three: Three) -> None:
    a, b = three["a"], three["b"]
    hangs = "GET /chat/hang HTTP/1.1\nHost: x\n\n"
    with busy(three, "a"), raw(a.port, hangs):
        until(lambda: three.look("a")["b"].in_flight == 1, "it is at b")
        load = a.look()["chat"]
        assert (load.in_flight, load.work) == (2, 3)  # what overflows asks for replicas here
        b.kill()
        until(lambda: three.look("a")["c"].in_flight == 1, "it is at c")
        reaches(three, "c", method="POST", body=b"{}")
        until(lambda: three.rooms("a") == {"c"})
        b.look()
        until(lambda: three.rooms("a") == {"b", "c"})
    with busy(three, "a"), raw(a.port, hangs):  # its gateway lives, and its replica does not
        until(lambda: three.look("a")["b"].in_flight == 1, "it is at b")
        three.stop("b")
        reaches(three, "c", method="POST", body=b"{}")
        until(lambda: three.look("a")["c"].in_flight == 1, "it is at c")
        three.start("b")
        b.serve(ROUTE)
        reaches(three, "b")


def test_a_site_without_replicas_answers_with_those_of_others(three: Three) -> None:
    a = three["a"]
    kept, a.replicas = a.replicas, ()
    a.serve(ROUTE)
    reaches(three, "b")
    assert get(a.port, "/-/health/chat").status == 200
    a.serve(ROUTE, far={"chat": a.far[:0]})
    assert get(a.port, "/-/health/chat").status == 404  # nobody else is there
    a.replicas = kept
    a.serve(ROUTE)


def test_what_another_cluster_says_of_itself_breaks_nothing_here(three: Three) -> None:
    a = three["a"]
    b, c = a.far
    evil = "-----BEGIN CERTIFICATE-----\nx\n    bind :1\n-----END CERTIFICATE-----\n"
    for wrong, why in (
        (msgspec.structs.replace(b, certificate=evil), "certificate"),
        (msgspec.structs.replace(b, certificate=""), "certificate"),
        (
            msgspec.structs.replace(b, certificate=a.pem.partition("-----BEGIN PR")[2]),
            "certificate",
        ),
        (msgspec.structs.replace(b, address="1.2.3"), "address"),
    ):
        load = a.serve(ROUTE, far={"chat": (wrong, c)})["chat"]
        assert (load.trouble, load.sites["c"].rank) == ("", 1)
        assert why in load.sites["b"].trouble
        assert three.get("a").body == "a"
    assert not list(a.folder.glob("*bind*")) and "bind :1" not in configuration(a)
    a.serve(ROUTE)


def test_a_door_that_is_taken_costs_the_other_sites_and_nothing_else(three: Three) -> None:
    a = three["a"]
    own = msgspec.structs.replace(ROUTE, service="own", port=a.door)
    loads = a.serve(ROUTE, own, far={"chat": a.far, "own": ()})
    assert {load.trouble for load in loads["chat"].sites.values()} == {CLOSED}
    assert (loads["own"].trouble, get(a.door, "/").body) == ("", "a")
    assert three.get("a").body == "a"
    a.serve(ROUTE)


def configuration(site: Site) -> str:
    return (site.folder / "haproxy.cfg").read_text()


def test_prices_and_ranks_need_no_reload_and_the_next_controller_keeps_them(three: Three) -> None:
    a = three["a"]
    before = configuration(a)
    three.sites.price("a", "b", 2_000_000)
    three.sites.price("a", "c", 1_000_000)
    a.serve(ROUTE)
    assert configuration(a) == before
    (a.folder / RANKS).write_text("chat/1 c\nchat/2 b\n")  # as if an earlier one had found so
    a.balancer = HaproxyBalancer(a.folder)
    a.serve(ROUTE)
    with busy(three, "a"):
        until(lambda: three.look("a")["c"].rank == 2, "b is nearer")
        reaches(three, "b")
    assert (a.folder / RANKS).read_text() == "chat/1 b\nchat/2 c\n"


@pytest.mark.parametrize(
    ("trips", "prices", "order"),
    [
        ({"x": 80, "y": 5, "z": 30}, {}, "yzx"),
        ({"x": 50, "y": 55, "z": 58}, {"x": 3, "y": 2, "z": 1}, "zyx"),
        ({"x": 50, "y": 55, "z": 80}, {"y": 2}, "yxz"),  # what is not known is not cheap
        ({"x": 55, "y": 50, "z": 80}, {}, "xyz"),  # about the same: it stays
        ({"y": 900}, {"x": 1}, "yxz"),  # never reached
    ],
)
def test_the_nearest_is_first_and_the_cheaper_of_two_about_as_near(
    trips: dict[str, float], prices: dict[str, int], order: str
) -> None:
    assert "".join(ranked("xyz", trips, prices)) == order
