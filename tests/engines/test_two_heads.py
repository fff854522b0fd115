"""An agent finds the head that leads: two real doors, of which one may refuse its link."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.agent import dialling
from shoal.agent.dialling import Dialling, may_dial, read_link_file
from shoal.link.channel import Refused
from shoal.link.wire import Ask, Commands, Link, LinkFile, ToAgent
from shoal.machine.files import LINK_FILE, write_private

SWITCHING = (
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Accept: {accept}\r\n\r\n"
)
REFUSAL = "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n{more}\r\n"


class Door:
    """A head as an agent sees it when it dials."""

    def __init__(self) -> None:
        self.asked = 0
        self.status = ""  # with which it refuses; "": it leads
        self.leader = ""
        self._links: list[socket.socket] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._door.accept()
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        from websockets.utils import accept_key

        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += link.recv(65536) or b"\r\n\r\n"
        self.asked += 1
        if self.status:
            more = f"Shoal-Leader: {self.leader}\r\n" if self.leader else ""
            link.sendall(REFUSAL.format(status=self.status, more=more).encode())
            link.close()
            return
        key = seen.lower().partition(b"sec-websocket-key: ")[0]
        key = seen[len(key) :].partition(b": ")[2].partition(b"\r\n")[0]
        link.sendall(SWITCHING.format(accept=accept_key(key.decode())).encode())

    def die(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


@pytest.fixture
def doors() -> Iterator[tuple[Door, Door]]:
    found = Door(), Door()
    yield found
    for door in found:
        door.die()


class Dialler:
    """The part of an agent that keeps its link, in a thread of its own."""

    def __init__(self, directory: Path, *urls: str, heads: tuple[str, ...] = ()) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.opened = 0
        file = LinkFile(urls=urls, key="k", heads=heads)
        write_private(directory / LINK_FILE, msgspec.json.encode(file))
        self.dialling = Dialling(directory, self._link)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self.dialling.keep())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _link(self) -> Link:
        def opened(_: Link) -> None:
            self.opened += 1

        return Link(ToAgent, opened, lambda _: None, lambda _: None)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def __enter__(self) -> Dialler:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(120)


def test_a_standby_sends_an_agent_to_the_leader_at_once(
    tmp_path: Path, doors: tuple[Door, Door]
) -> None:
    one, two = doors
    one.status, one.leader = "503 no", two.url
    with Dialler(tmp_path / "n", one.url, "http://127.0.0.1:9", two.url) as agent:
        until(lambda: agent.opened == 1, "not linked")
        assert agent.dialling._problem == ""
    assert (one.asked, two.asked) == (1, 1)


def test_an_agent_moves_to_the_head_that_leads_next(
    tmp_path: Path, doors: tuple[Door, Door]
) -> None:
    one, two = doors
    two.status = "503 no"
    with Dialler(tmp_path / "n", one.url, heads=(one.url, two.url)) as agent:
        until(lambda: agent.opened == 1, "not linked")
        one.die()
        until(lambda: two.asked >= 2, "the standby was not asked again")
        two.status = ""
        until(lambda: agent.opened == 2, "not linked to the next leader")
        # The head that is down is tried last by now.
        assert agent.dialling._alive == [two.url]


def test_a_head_that_begins_to_lead_while_it_holds_a_link_is_dialled_first(
    tmp_path: Path, doors: tuple[Door, Door]
) -> None:
    one, two = doors
    one.die()
    two.status = "500 leaving"
    with Dialler(tmp_path / "n", one.url, two.url) as agent:
        until(lambda: two.asked >= 1, "not asked")
        two.status = ""
        until(lambda: agent.opened == 1, "not linked")


def test_an_agent_keeps_the_heads_that_it_is_told(tmp_path: Path, doors: tuple[Door, Door]) -> None:
    one, two = doors
    with Dialler(tmp_path / "n", one.url) as agent:
        until(lambda: agent.opened == 1, "not linked")
        agent.dialling.learn((one.url, two.url, "nonsense"))
        file = read_link_file(agent.directory)
        assert file.heads == (one.url, two.url)
        assert file.urls == (one.url,)
        one.die()
        until(lambda: agent.opened == 2, "not linked to the other")


def test_a_refused_key_is_still_refused_where_there_are_several_heads(
    tmp_path: Path, doors: tuple[Door, Door]
) -> None:
    one, two = doors
    one.status, two.status = "503 no", "401 no"
    with Dialler(tmp_path / "n", one.url, two.url) as agent:
        until(lambda: "does not accept this node's key" in agent.dialling._problem, "no problem")


def test_an_agent_never_dials_less_safely() -> None:
    assert may_dial("https://b:1", secure=True)
    assert not may_dial("http://b:1", secure=True)
    assert may_dial("http://b:1", secure=False)
    for odd in ("", "b:1", "ftp://b", "https://", "https://b:99999", "https://b:1/path"):
        assert not may_dial(odd, secure=False), odd


def test_pauses_between_several_heads_stay_short() -> None:
    """So that a node is linked soon after a fail-over, and a thousand of them not at one moment."""
    span_s = dialling.SPAN_FIRST_S
    for _ in range(20):
        span_s = dialling.next_span_s(span_s, dialling.SPAN_SHORT_S)
    pauses = [dialling.pause_s(span_s) for _ in range(1000)]
    assert 0 < min(pauses) < max(pauses) <= dialling.SPAN_SHORT_S


def test_an_older_agent_reads_a_message_that_names_heads() -> None:
    class OldAsk(msgspec.Struct, frozen=True, tag="Ask"):
        pass

    told = msgspec.msgpack.encode(Ask(("https://b:1",)))
    assert msgspec.msgpack.decode(told, type=OldAsk | Commands) == OldAsk()
    old = msgspec.json.decode(b'{"urls": ["https://a:1"], "key": "k", "name": "a"}', type=LinkFile)
    assert old.ways == {"https://a:1": "a"}
    assert issubclass(Refused, OSError)
