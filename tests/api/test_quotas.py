"""What one sender may ask of the API at a time, and that others do not notice."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.api import quotas as books
from shoal.api.limits import SILENT_S, Gate, Guard
from shoal.api.principal import THE_OPERATOR, Principal
from shoal.api.problems import Refusal
from shoal.api.quotas import Ask, Limits, Quotas, Ticket
from shoal.client import Client, ShoalError
from shoal.model.identity import Role
from shoal.model.policy import Policy, Tenant
from tests.api.server import OPERATORS, Server, exchange, serving
from tests.core.build import job_spec

PLAIN = Ask()
JOB = {"spec": {"command": ["true"], "gpus": 4}}


def member(user: str, tenant: str, token: str) -> Principal:
    return Principal(user=user, tenant=tenant, role=Role.MEMBER, token=token)


ANN = member("ann", "red", "ann11111")
BOB = member("bob", "blue", "bob11111")


class Hand:
    """A clock that only the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def small(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> Quotas:
    monkeypatch.setattr(books, "TOKEN", Limits(2, 4, 3, 100, 2))
    monkeypatch.setattr(books, "TENANT", Limits(4, 6, 4, 150, 3))
    monkeypatch.setattr(books, "SERVER", Limits(8, 9, 6, 200, 4))
    return Quotas(hand)


def enter(quotas: Quotas, who: Principal, ask: Ask = PLAIN, session: str = "") -> Ticket:
    ticket = Ticket()
    quotas.enter(ticket, ask, who, session=session)
    return ticket


def refused(quotas: Quotas, who: Principal, ask: Ask = PLAIN, session: str = "") -> Refusal:
    with pytest.raises(Refusal) as caught:
        enter(quotas, who, ask, session)
    assert caught.value.retry_s >= 1
    return caught.value


def test_a_burst_is_allowed_then_so_many_a_second(small: Quotas, hand: Hand) -> None:
    for _ in range(4):
        enter(small, ANN).close()
    said = refused(small, ANN)
    assert (said.status, str(said)) == (
        429,
        "token ann11111 of ann sends more than 2 requests a second; try again in 1 s",
    )
    enter(small, BOB).close()  # others do not notice
    hand.now_s += 0.5
    enter(small, ANN).close()
    refused(small, ANN)
    hand.now_s += 60
    for _ in range(4):
        enter(small, ANN).close()
    refused(small, ANN)


def test_requests_under_way_bodies_and_streams_are_bounded_and_free_again(small: Quotas) -> None:
    under_way = [enter(small, ANN) for _ in range(3)]
    assert "ann has 3 requests under way" in str(refused(small, ANN))
    under_way.pop().close()
    body = enter(small, ANN, Ask(body_bytes=60))
    body.close()
    body.close()  # twice is once


def test_bodies_are_counted_by_their_bytes(small: Quotas) -> None:
    held = enter(small, ANN, Ask(body_bytes=60))
    assert "request bodies under way" in str(refused(small, ANN, Ask(body_bytes=60)))
    enter(small, ANN, Ask(body_bytes=40)).close()
    held.close()
    enter(small, ANN, Ask(body_bytes=60)).close()


def test_a_stream_does_not_count_as_a_request_under_way(small: Quotas) -> None:
    streams = [enter(small, ANN, Ask(stream=True)) for _ in range(2)]
    said = refused(small, ANN, Ask(stream=True))
    assert "ann has 2 streams open, the most it may have; try again in 10 s" in str(said)
    enter(small, ANN).close()
    streams.pop().close()
    enter(small, ANN, Ask(stream=True)).close()


def test_a_tenant_with_many_tokens_is_bounded_as_well(small: Quotas) -> None:
    held = [enter(small, member("ann", "red", f"token{n:03}")) for n in range(4)]
    said = refused(small, member("ann", "red", "token999"))
    assert (said.status, str(said)[:40]) == (429, "tenant red has 4 requests under way, the")
    enter(small, BOB).close()
    for ticket in held:
        ticket.close()
    enter(small, member("ann", "red", "token999")).close()


def test_the_whole_server_is_bounded_and_the_operator_is_not_locked_out(small: Quotas) -> None:
    held = [enter(small, member("ann", f"t{n}", f"token{n:03}")) for n in range(6)]
    said = refused(small, BOB)
    assert (said.status, str(said)[:42]) == (503, "the server has 6 requests under way, the m")
    enter(small, THE_OPERATOR).close()
    ticket = Ticket()
    small.enter(ticket, Ask(), THE_OPERATOR, local=True)
    ticket.close()
    for ticket in held:
        ticket.close()
    enter(small, BOB).close()


def test_the_books_are_bounded_and_the_operator_has_one_always(hand: Hand) -> None:
    quotas = Quotas(hand, books_max=8)
    for number in range(100):
        hand.now_s += 10
        enter(quotas, member("ann", "red", f"token{number:03}")).close()
        assert len(quotas) <= 8
    hand.now_s += 10
    held: list[Ticket] = []
    with pytest.raises(Refusal, match="too many senders at a time"):
        held += (enter(quotas, member("ann", f"t{n}", f"held{n:04}")) for n in range(9))
    enter(quotas, THE_OPERATOR).close()
    held[0].close()
    hand.now_s += 10
    enter(quotas, member("ann", "t1", "other111")).close()


def test_a_session_has_a_book_of_its_own(small: Quotas) -> None:
    for _ in range(4):
        enter(small, ANN, session="abcdef").close()
    assert "session abcdef of ann" in str(refused(small, ANN, session="abcdef"))
    enter(small, ANN).close()


# -- over real sockets -------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    caps = (Tenant(name="red", jobs_max=2, waiting_max=1),)
    with serving(tmp_path / "home", Policy(tenants=caps)) as made:
        made.tenant("red")
        made.tenant("blue")
        yield made


def test_a_cap_answers_429_with_a_line_and_when_to_try_again(server: Server) -> None:
    body = {"spec": {**JOB["spec"], "tenant": "red"}}
    first = server.call(OPERATORS, "POST", "/v1/jobs", body)
    assert first.status == 201, first.body
    assert server.call(OPERATORS, "POST", "/v1/jobs", body).status == 201
    reply = server.call(OPERATORS, "POST", "/v1/jobs", body)
    assert (reply.status, reply.headers["retry-after"]) == (429, "30")
    assert reply.message.startswith("red has 2 of at most 2 live jobs (jobs_max in the policy)")
    with Client(f"http://127.0.0.1:{server.port}", OPERATORS, patience_s=0) as client:
        with pytest.raises(ShoalError, match="red has 2 of at most 2 live jobs") as caught:
            client.submit(job_spec(tenant="red", gpus=4))
        assert caught.value.status == 429


def test_slots_are_free_again_when_clients_vanish(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "TOKEN", books.TOKEN._replace(streams=3))
    token = server.token("eve", "*", Role.ADMIN)
    links = [_stream(server, token) for _ in range(3)]
    reply = server.call(token, "GET", "/v1/stream")
    assert (reply.status, reply.headers["retry-after"]) == (429, "10")
    assert "has 3 streams open, the most it may have" in reply.message
    assert server.call(token, "GET", "/v1/status").status == 200, "only streams are refused"
    for link in links:  # no goodbye: the kernel resets the connection, as for a killed client
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        link.close()

    def free() -> bool:
        link = _stream(server, token, expect=False)
        taken = link.recv(100).startswith(b"HTTP/1.1 200")
        link.close()
        return taken

    until(free)


def _stream(server: Server, token: str, *, expect: bool = True) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
    link.sendall(head.encode())
    if expect:
        assert link.recv(100).startswith(b"HTTP/1.1 200")
    return link


def test_one_token_is_hammered_and_another_tenant_works(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "TOKEN", books.TOKEN._replace(per_s=20, burst=20))
    loud, calm = server.token("ann", "red"), server.token("bob", "*", Role.ADMIN)
    over = threading.Event()
    statuses: list[int] = []

    def hammer() -> None:
        connection = server.connect()
        while not over.is_set():
            statuses.append(exchange(connection, loud, "GET", "/v1/session").status)
            statuses.append(exchange(connection, loud, "GET", "/v1/jobs").status)
        connection.close()

    threads = [threading.Thread(target=hammer) for _ in range(50)]
    for thread in threads:
        thread.start()
    until(lambda: statuses.count(429) > 100)
    for _ in range(5):
        assert server.call(calm, "GET", "/v1/jobs").status == 200
    assert server.call(OPERATORS, "GET", "/v1/status").status == 200
    over.set()
    for thread in threads:
        thread.join(60)
    assert set(statuses) <= {200, 403, 429}
    until(lambda: server.call(loud, "GET", "/v1/jobs").status != 429, "by itself")


def test_the_client_waits_as_long_as_it_is_told_and_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(books, "TOKEN", books.TOKEN._replace(per_s=1, burst=1))
    token = server.token("ann", "*", Role.ADMIN)
    with Client(f"http://127.0.0.1:{server.port}", token) as client:
        for _ in range(4):
            client.status()
    said = capfd.readouterr().err
    assert said.count("of ann sends more than 1 requests a second; waiting") <= 4
    with Client(f"http://127.0.0.1:{server.port}", token, patience_s=-20) as client:
        statuses = [_status(client) for _ in range(3)]
    assert 429 in statuses, "a client without patience is not paced"


def _status(client: Client) -> int:
    try:
        client.status()
    except ShoalError as error:
        return error.status
    return 200


def test_a_tenant_may_hold_only_a_part_of_the_connections(tmp_path: Path) -> None:
    with serving(tmp_path / "home", gate=Gate(16)) as server:
        server.tenant("red")
        loud, calm = server.token("ann", "red"), server.token("bob", "*", Role.ADMIN)
        links = [server.connect() for _ in range(6)]
        replies = [exchange(link, loud, "GET", "/v1/jobs") for link in links]
        assert [reply.status for reply in replies] == [200] * 4 + [429] * 2
        assert replies[-1].message.startswith("tenant red has too many connections open")
        assert server.call(calm, "GET", "/v1/status").status == 200
        for link in links:
            link.close()
        until(lambda: server.call(loud, "GET", "/v1/jobs").status == 200)


def test_wrong_tokens_are_counted_for_their_address(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "ADDRESS", books.ADDRESS._replace(per_s=1, burst=5))
    guesses = [server.call("guess", "GET", "/v1/jobs").status for _ in range(7)]
    assert guesses == [401] * 5 + [429] * 2
    assert server.call(OPERATORS, "GET", "/v1/jobs").status == 200, "a right one is not refused"


def test_status_and_queue_show_the_caps_of_tenants_that_the_sender_sees(server: Server) -> None:
    for path in ("/v1/status", "/v1/queue"):
        seen = msgspec.json.decode(server.call(OPERATORS, "GET", path).body)["caps"]
        assert seen == ["red: 0 of at most 2 live jobs, 0 of at most 1 waiting jobs"]
        own = server.token(f"red-{path[4:]}", "red"), server.token(f"blue-{path[4:]}", "blue")
        red, blue = (msgspec.json.decode(server.call(one, "GET", path).body) for one in own)
        assert (red["caps"], blue["caps"]) == (seen, [])


def test_a_connection_whose_link_is_cut_ends(server: Server) -> None:
    """The kernel ends it: after a minute without an answer to what was sent, or to its probes."""
    link = server.connect()
    exchange(link, OPERATORS, "GET", "/v1/status")
    (guest,) = server.gate.guests
    assert isinstance(guest, Guard)
    kept = guest.transport.get_extra_info("socket")
    level = socket.IPPROTO_TCP
    assert kept.getsockopt(level, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_S
    probes = kept.getsockopt(level, socket.TCP_KEEPINTVL) * kept.getsockopt(
        level, socket.TCP_KEEPCNT
    )
    assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert kept.getsockopt(level, socket.TCP_KEEPIDLE) + probes <= SILENT_S
    link.close()


def test_slow_senders_take_only_their_own_slots(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then: the body never ends, and the bounds of `limits.py` end it much later."""
    monkeypatch.setattr(books, "TOKEN", books.TOKEN._replace(under_way=3))
    slow, calm = server.token("ann", "red"), server.token("bob", "blue")
    head = "POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {slow}\r\ncontent-length: 1000\r\n\r\n{{"
    links = []
    for _ in range(3):
        links.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        links[-1].sendall(head.encode())

    def refused() -> bool:
        reply = server.call(slow, "GET", "/v1/jobs")
        return reply.status == 429 and "has 3 requests under way" in reply.message

    until(refused)
    for link in links:
        link.sendall(b" ")
    assert server.call(calm, "GET", "/v1/jobs").status == 200
    for link in links:
        link.close()
    until(lambda: server.call(slow, "GET", "/v1/jobs").status == 200, "by itself")


def test_a_slow_reader_holds_one_slot_and_little_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not read stays in the kernel's buffers; then the connection is given up."""
    monkeypatch.setattr("shoal.api.limits.STALL_S", 0.5)
    monkeypatch.setattr("shoal.api.limits.PIPELINE_MAX", 1000)
    token = server.token("ann", "*", Role.ADMIN)
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect(("127.0.0.1", server.port))
    head = f"GET /schema/openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}"
    for _ in range(64):  # more than the kernel buffers
        link.sendall(f"{head}\r\n\r\n".encode())
    assert server.call(token, "GET", "/v1/status").status == 200
    until(lambda: len(server.gate.guests) == 0, "it never reads: given up")
    link.close()


def test_a_long_body_that_is_refused_at_once_still_gets_its_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not read all of what it does not want."""
    monkeypatch.setattr("shoal.control.packages.STORE_BYTES_MAX", 10)
    data = bytes(30 * books.MIB)
    name = hashlib.sha256(data).hexdigest()
    with (
        Client(f"http://127.0.0.1:{server.port}", OPERATORS, patience_s=0) as client,
        pytest.raises(ShoalError, match="of packages, the maximum") as caught,
    ):
        client.send_package(name, len(data), io.BytesIO(data))
    assert caught.value.status == 507
