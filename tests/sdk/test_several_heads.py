"""A client of a cluster with several heads finds one that answers, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.client import Client, contexts
from shoal.client.contexts import Context, reached
from shoal.client.reaching import Reaching, acceptable
from shoal.client.transport import ShoalError, Unreachable, at, at_any

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"
NO_LEADER = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nshoal-standby: no leader\r\n"
    b"content-length: 25\r\n\r\n" + b'{"message":"nobody leads"}'[:25]
)
UNKNOWN = b"HTTP/1.1 502 Bad Gateway\r\nshoal-standby: outcome unknown\r\ncontent-length: 0\r\n\r\n"


def ok(*headers: str) -> bytes:
    return OK + "".join(f"{one}\r\n" for one in headers).encode() + b"\r\n[]"


class Head:
    """Gives each request the next answer of its list, and then the last one again. None: it closes
    the connection instead."""

    def __init__(self, *answers: bytes | None) -> None:
        self.asked: list[bytes] = []
        self._answers = list(answers)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._door.accept()
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link:
            while True:
                seen = b""
                while b"\r\n\r\n" not in seen:
                    piece = link.recv(65536)
                    if not piece:
                        return
                    seen += piece
                self.asked.append(seen)
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if answer is None:
                    return
                link.sendall(answer)

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def head() -> Iterator[Callable[..., Head]]:
    made: list[Head] = []

    def make(*answers: bytes | None) -> Head:
        made.append(Head(*answers))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(OSError):
            one.close()


def test_a_head_that_is_down_costs_one_attempt(head: Callable[..., Head]) -> None:
    down, up = head(ok()), head(ok())
    down.close()
    with Client(f"{down.url},{up.url}", "t") as client:
        assert client.nodes() == []
        assert client.url == up.url
        assert client.nodes() == []
    assert len(up.asked) == 2


def test_heads_without_a_leader_are_asked_in_turn_until_there_is_one(
    head: Callable[..., Head],
) -> None:
    one, two = head(NO_LEADER), head(NO_LEADER, NO_LEADER, ok())
    with Client(f"{one.url},{two.url}", "t") as client:
        assert client.nodes() == []
    assert (len(one.asked), len(two.asked)) == (3, 3)


def test_an_unknown_outcome_is_asked_again_as_after_a_lost_connection(
    head: Callable[..., Head],
) -> None:
    one, two = head(UNKNOWN), head(None, ok())
    with Client(f"{one.url},{two.url}", "t") as client:
        assert client.nodes() == []
    assert (len(one.asked), len(two.asked)) == (2, 2)


def test_when_no_head_answers_the_error_names_them(head: Callable[..., Head]) -> None:
    one, two = head(ok()), head(ok())
    one.close()
    two.close()
    with (
        Client(f"{one.url},{two.url}", "t", patience_s=0) as client,
        pytest.raises(Unreachable) as raised,
    ):
        client.nodes()
    assert one.url in str(raised.value)
    assert two.url in str(raised.value)


def test_a_client_shows_the_newest_event_that_it_has_seen(head: Callable[..., Head]) -> None:
    one = head(ok("Shoal-Seq: 7"), ok("Shoal-Seq: 5"), ok())
    with Client(one.url, "t") as client:
        for _ in range(3):
            client.lent(patience_s=1).nodes()
    assert b"shoal-seq" not in one.asked[0]
    assert [b"shoal-seq: 7" in asked for asked in one.asked[1:]] == [True, True]


def test_a_context_learns_the_heads_and_which_one_answers(
    head: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    two = head(ok())
    one = head(ok(f"Shoal-Heads: {two.url},http://10.0.0.1:1"))
    with contexts.changing() as kept:
        kept.contexts["lab"] = Context(url=one.url, token="t")
    with Client(context="lab") as client:
        client.nodes()
        assert contexts.find("lab").heads == (two.url,), "plain HTTP leaves no machine"
        one.close()
        client.nodes()
    assert contexts.find("lab").last == two.url
    with Client(context="lab") as client:
        assert client.url == two.url
        client.nodes()
    assert contexts.find("lab").url == one.url, "what the user typed stays"


def test_a_context_of_an_older_version_loads() -> None:
    old = msgspec.json.decode(b'{"url": "https://head:7700", "token": "t"}', type=Context)
    assert reached(old).all_urls == ("https://head:7700",)
    assert msgspec.json.encode(old) == b'{"url":"https://head:7700","token":"t"}'


def test_heads_that_are_less_safe_are_not_learned() -> None:
    secure, plain = at("https://a:1", "t"), at("http://127.0.0.1:1", "t")
    listed = "https://b:1, http://b:2,http://127.0.0.1:3,nonsense,https://b:1,ftp://x"
    assert acceptable(secure, listed) == ("https://b:1",)
    assert acceptable(plain, listed) == ("https://b:1", "http://127.0.0.1:3")
    assert acceptable(secure, "x" * 5000) == ()


def test_several_threads_that_fail_at_one_head_move_on_once() -> None:
    reaching = Reaching(at_any("http://127.0.0.1:1,http://127.0.0.1:2,http://127.0.0.1:3", "t"))
    reaching.next("http://127.0.0.1:1")
    reaching.next("http://127.0.0.1:1")
    assert reaching.current.url == "http://127.0.0.1:2"
    assert set(reaching.current.all_urls) == {f"http://127.0.0.1:{n}" for n in (1, 2, 3)}


def test_a_list_with_a_wrong_url_is_refused() -> None:
    with pytest.raises(ShoalError):
        at_any("https://a:1,nonsense", "t")
    with pytest.raises(ShoalError):
        at_any(",", "t")
