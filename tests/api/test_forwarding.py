"""A standby forwards to the leader what it cannot answer itself: over real sockets, with a real API
at both ends, or a leader that dies at a chosen moment."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from harness.waiting import until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from shoal.api.forwarded import HEADER, SERVED, Forwarded, read
from shoal.api.forwarding import at_standby
from shoal.api.routing import App
from shoal.client.transport import trust_in
from shoal.link.meeting import KEY_HEADER, key_hash
from shoal.model.job import JobSpec
from shoal.model.policy import Policy
from shoal.model.views import Submission
from tests.api.server import OPERATORS, Reply, Server, exchange, serving


class Row(NamedTuple):
    name: str
    url: str


class KnownHeads:
    """What a test says that the standby knows."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.last_seq = 0
        self.as_of_ms = 1_700_000_000_000
        self.waited: list[int] = []

    def leader(self) -> Row | None:
        return Row("a", self.url) if self.url else None

    async def wait_for(self, seq: int, timeout_s: float) -> bool:
        self.waited.append(seq)
        await asyncio.sleep(0)
        return seq <= self.last_seq


class Standby(Server):
    def __init__(self, path: Path, heads: KnownHeads) -> None:
        super().__init__(path, Policy())
        self.heads = heads

    def served(self, app: App) -> Any:
        async def ended(job: str) -> bool:
            return job == "j7"

        self.forwarding = at_standby(app, self.heads, OPERATORS, lambda: trust_in(""), ended)
        return app.state[SERVED]


@contextlib.contextmanager
def standby(path: Path, url: str = "") -> Iterator[Standby]:
    server = Standby(path, KnownHeads(url))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Standby]]:
    path = tmp_path_factory.mktemp("pair")
    with serving(path / "a") as leader:
        url = f"http://127.0.0.1:{leader.port}"
        with standby(path / "b", url) as other:
            yield leader, other


SPEC = Submission(spec=JobSpec(command=("true",), name="through"), key="k1")


def test_a_request_at_a_standby_is_done_by_the_leader(pair: tuple[Server, Standby]) -> None:
    leader, other = pair
    made = other.call(OPERATORS, "POST", "/v1/jobs", SPEC)
    assert made.status == 201, made
    assert 0 < int(made.headers["shoal-seq"]) <= leader.loop.last_seq
    again = leader.call(OPERATORS, "POST", "/v1/jobs", SPEC)
    assert json.loads(again.body)["id"] == json.loads(made.body)["id"]
    assert not other.loop.tick.state.jobs, "the standby itself must not have it"


def test_a_user_is_who_they_are_at_either_head(pair: tuple[Server, Standby]) -> None:
    leader, other = pair
    leader.tenant("lab")
    ann = leader.token("ann", "lab")
    assert json.loads(other.call(ann, "GET", "/v1/me").body)["user"] == "ann"
    assert other.call("wrong", "GET", "/v1/me").status == 401
    assert other.call(ann, "POST", "/v1/nodes/n1/drain").status == 403


def test_the_audit_log_names_the_callers_own_address(pair: tuple[Server, Standby]) -> None:
    leader, other = pair
    said = Forwarded(client="10.9.8.7").signed(OPERATORS)
    own = {HEADER.decode(): said.decode()}
    forged = {HEADER.decode(): Forwarded(client="6.6.6.6").signed("x" * 32).decode()}
    # As a head sends it, as somebody without the token does, and through a standby.
    leader.call(OPERATORS, "POST", "/v1/jobs/one/cancel", **own)
    leader.call(OPERATORS, "POST", "/v1/jobs/two/cancel", **forged)
    other.call(OPERATORS, "POST", "/v1/jobs/three/cancel", **forged)
    listed = leader.call(OPERATORS, "GET", "/v1/audit?verb=jobs.cancel").body
    sources = {entry["on"]: entry["source"] for entry in json.loads(listed)["entries"]}
    assert sources == {"one": "10.9.8.7", "two": "127.0.0.1", "three": "127.0.0.1"}


def test_a_header_that_no_head_has_signed_is_not_believed() -> None:
    signed = Forwarded(client="1.2.3.4").signed("t" * 32)
    assert read(signed, "t" * 32) == Forwarded(client="1.2.3.4")
    assert read(signed, "u" * 32) is None
    assert read(signed[:-1] + b"0", "t" * 32) in (None, Forwarded(client="1.2.3.4"))
    for odd in (b"", b".", b"a.b", b"\xff.\xff", signed.partition(b".")[0]):
        assert read(odd, "t" * 32) is None


def test_a_forwarded_request_is_not_forwarded_again(tmp_path: Path) -> None:
    with standby(tmp_path / "a") as one, standby(tmp_path / "b") as two:
        one.heads.url = f"http://127.0.0.1:{two.port}"
        two.heads.url = f"http://127.0.0.1:{one.port}"
        reply = one.call(OPERATORS, "GET", "/v1/status")
    assert reply.status == 503
    assert reply.message == "this head does not lead"
    assert reply.headers["retry-after"] == "1"


def test_a_large_package_passes_in_pieces(pair: tuple[Server, Standby]) -> None:
    import hashlib

    leader, other = pair
    data = b"0123456789abcdef" * (512 * 1024)  # 8 MiB, more than any buffer on the way
    name = hashlib.sha256(data).hexdigest()
    connection = other.connect()
    headers = {"Authorization": f"Bearer {OPERATORS}", "Content-Type": "application/x-tar"}
    headers["Content-Length"] = str(len(data))
    pieces = (data[start : start + 100_000] for start in range(0, len(data), 100_000))
    connection.request("PUT", f"/v1/packages/{name}", pieces, headers)
    with connection.getresponse() as answer:
        assert answer.status in (200, 201), answer.read()
    connection.close()
    assert leader.call(OPERATORS, "GET", f"/v1/packages/{name}").status == 200


def test_a_body_of_unknown_length_passes(pair: tuple[Server, Standby]) -> None:
    _, other = pair
    body = msgspec.json.encode(SPEC)
    connection = other.connect()
    headers = {"Authorization": f"Bearer {OPERATORS}", "Content-Type": "application/json"}
    pieces = iter([body[:10], body[10:]])
    connection.request("POST", "/v1/jobs", pieces, headers, encode_chunked=True)
    with connection.getresponse() as answer:
        assert answer.status == 201, answer.read()
    connection.close()


def test_the_pages_feed_comes_from_the_leader(pair: tuple[Server, Standby]) -> None:
    leader, other = pair
    connection = other.connect()
    connection.request("GET", "/v1/stream", headers={"Authorization": f"Bearer {OPERATORS}"})
    answer = connection.getresponse()
    assert answer.status == 200
    seen = b""
    while b"snapshot" not in seen:
        seen += answer.read1(4096)
    named = msgspec.structs.replace(SPEC, spec=JobSpec(command=("true",), name="seen"), key="k2")
    leader.call(OPERATORS, "POST", "/v1/jobs", named)
    while b'"seen"' not in seen:
        seen += answer.read1(4096)
    answer.close()
    connection.close()


def test_a_waiting_call_ends_at_the_leader_when_the_caller_leaves(
    pair: tuple[Server, Standby],
) -> None:
    leader, other = pair
    seq = leader.loop.last_seq + 1_000_000  # whatever other tests do
    connection = other.connect()
    path = f"/v1/events?after={seq}&wait_s=30"
    connection.request("GET", path, headers={"Authorization": f"Bearer {OPERATORS}"})
    until(lambda: leader.run(lambda: len(leader.loop._watchers)) > 0)
    connection.close()
    until(lambda: other.run(lambda: other.forwarding._under_way) == 0)


def test_the_page_itself_comes_from_the_standby(tmp_path: Path) -> None:
    with standby(tmp_path / "b", "http://127.0.0.1:9") as other:
        assert other.call("", "GET", "/").status == 200
        assert other.call("", "GET", "/web/app.js").status == 200
        refused = other.call(OPERATORS, "GET", "/v1/status")
    assert refused.status == 503
    assert "the head that leads (a) cannot be reached" in refused.message


def test_without_a_leader_reads_are_answered_and_dated_and_writes_are_refused(
    tmp_path: Path,
) -> None:
    with standby(tmp_path / "b") as other:
        other.heads.last_seq = 5
        status = other.call(OPERATORS, "GET", "/v1/status")
        assert status.status == 200
        assert status.headers["shoal-as-of"] == "2023-11-14T22:13:20.000Z"
        assert status.headers["shoal-seq"] == "5"
        write = other.call(OPERATORS, "POST", "/v1/jobs", SPEC)
        assert (write.status, write.headers["retry-after"]) == (503, "1")
        assert write.message == "no head leads at the moment; try again in a few seconds"
        assert write.headers["shoal-standby"] == "no leader"
        newer = other.call(OPERATORS, "GET", "/v1/status", **{"Shoal-Seq": "6"})
        assert newer.status == 503, "its reader has seen more"
        assert other.heads.waited == [6]
        older = other.call(OPERATORS, "GET", "/v1/status", **{"Shoal-Seq": "5"})
        assert older.status == 200


def test_a_standby_answers_from_the_log_only_what_its_reader_has_not_passed(
    pair: tuple[Server, Standby],
) -> None:
    leader, other = pair
    other.heads.last_seq, other.heads.waited = 1, []

    def source(path: str, **more: str) -> str:
        """The leader's clock has moved, so its events are others."""
        return other.call(OPERATORS, "GET", path, **more).headers["shoal-seq"]

    leader.call(OPERATORS, "POST", "/v1/jobs", SPEC)
    at_leader = str(leader.loop.last_seq)
    assert source("/v1/events") == at_leader, "the first request of a client"
    assert source("/v1/events", **{"Shoal-Seq": "1"}) == "1"
    assert source("/v1/jobs/j7", **{"Shoal-Seq": "1"}) == "1", "the store has it"
    assert source("/v1/jobs/j8", **{"Shoal-Seq": "1"}) == at_leader
    assert source("/v1/status", **{"Shoal-Seq": "1"}) == at_leader
    assert source("/v1/events", **{"Shoal-Seq": "2"}) == at_leader, "it has seen more"
    assert other.heads.waited == [2]


def test_another_hosts_name_is_refused_by_the_standby(pair: tuple[Server, Standby]) -> None:
    _, other = pair
    assert other.call(OPERATORS, "GET", "/v1/status", Host="evil.example").status == 421


# -- a leader that dies --------------------------------------------------------------------------


class FakeLeader:
    """Answers each connection with `act`, which gets the socket and what was sent before it."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.heads: list[bytes] = []
        self._act = act
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._door.accept()
                seen = b""
                while b"\r\n\r\n" not in seen:
                    piece = link.recv(65536)
                    if not piece:
                        break
                    seen += piece
                self.heads.append(seen)
                self._act(link)
                link.close()

    def close(self) -> None:
        self._door.close()


def asked(tmp_path: Path, act: Callable[[socket.socket], None]) -> tuple[Reply, FakeLeader]:
    leader = FakeLeader(act)
    with standby(tmp_path / "b", leader.url) as other:
        reply = other.call(OPERATORS, "POST", "/v1/jobs", SPEC)
    leader.close()
    return reply, leader


def test_a_request_to_a_leader_that_dies_is_sent_once(tmp_path: Path) -> None:
    reply, leader = asked(tmp_path, lambda _: None)
    assert reply.status == 502
    assert "whether it did this is not known" in reply.message
    assert len(leader.heads) == 1
    head = leader.heads[0].lower()
    assert b"authorization: bearer " + OPERATORS.encode() in head
    assert b"shoal-forwarded: " in head


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    def half(link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n[1,2\r\n")

    with pytest.raises(http.client.IncompleteRead):
        asked(tmp_path, half)


def test_a_leader_that_hangs_is_given_up_when_it_no_longer_leads(tmp_path: Path) -> None:
    asked_, over = threading.Event(), threading.Event()

    def hang(_: socket.socket) -> None:
        asked_.set()
        over.wait(120)

    leader = FakeLeader(hang)
    with standby(tmp_path / "b", leader.url) as other:
        connection = other.connect()
        replies: list[Reply] = []
        thread = threading.Thread(
            target=lambda: replies.append(exchange(connection, OPERATORS, "GET", "/v1/status"))
        )
        thread.start()
        assert asked_.wait(120)
        other.heads.url = ""
        thread.join(120)
        connection.close()
    over.set()
    leader.close()
    assert [reply.status for reply in replies] == [502]


# -- websockets ----------------------------------------------------------------------------------


def test_a_standby_that_ends_answers_in_our_words_what_it_has_forwarded(tmp_path: Path) -> None:
    """As one does that begins to lead: its server waits for a moment, and no longer."""
    forwarded, over = threading.Event(), threading.Event()

    def hang(_: socket.socket) -> None:
        forwarded.set()
        over.wait(120)

    leader = FakeLeader(hang)
    with standby(tmp_path / "b", leader.url) as other:
        connection = other.connect()
        replies: list[Reply] = []
        thread = threading.Thread(
            target=lambda: replies.append(exchange(connection, OPERATORS, "POST", "/v1/jobs", SPEC))
        )
        thread.start()
        assert forwarded.wait(120)
        other.server.config.timeout_graceful_shutdown = 0
        other.server.should_exit = True
        thread.join(120)
        connection.close()
    over.set()
    leader.close()
    (reply,) = replies
    assert (reply.status, reply.headers["shoal-standby"]) == (502, "outcome unknown")
    assert "whether it did this is not known" in reply.message


def test_a_meeting_is_held_through_a_standby(pair: tuple[Server, Standby]) -> None:
    leader, other = pair
    key, name = "secret", "a" * 32
    here, there = (f"ws://127.0.0.1:{one.port}/v1/meetings/{name}" for one in (other, leader))
    host = {"Authorization": f"Bearer {OPERATORS}", KEY_HEADER: key_hash(key)}
    with connect(f"{here}/host", additional_headers=host, proxy=None) as held:
        opening = json.loads(held.recv(30))
        assert opening["urls"] == [f"http://127.0.0.1:{leader.port}"]
        with connect(f"{here}/enter", additional_headers={KEY_HEADER: key}, proxy=None) as guest:
            number = json.loads(held.recv(30))["guest"]
            with connect(f"{there}/guests/{number}", additional_headers=host, proxy=None) as ours:
                guest.send(b"hello " * 1000)
                assert ours.recv(30) == b"hello " * 1000
                ours.send(b"back")
                assert guest.recv(30) == b"back"
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{here}/enter", additional_headers={KEY_HEADER: "wrong"}, proxy=None)
        assert refused.value.response.status_code == 403


def test_a_link_is_refused_with_the_leaders_address(tmp_path: Path) -> None:
    with standby(tmp_path / "b", "http://127.0.0.1:9") as other:
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://127.0.0.1:{other.port}/v1/link", proxy=None)
        answer = refused.value.response
        assert answer.status_code == 503
        assert answer.headers["Shoal-Leader"] == "http://127.0.0.1:9"
        other.heads.url = ""
        threading.Timer(0.3, lambda: setattr(other.heads, "url", "http://127.0.0.1:7")).start()
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://127.0.0.1:{other.port}/v1/link", proxy=None)
        assert refused.value.response.headers["Shoal-Leader"] == "http://127.0.0.1:7"
