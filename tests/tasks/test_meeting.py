"""Connections through the head: what passes, who is let in, and what happens when a part dies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.waiting import WAIT_S, until

import shoal
from shoal.client import contexts
from shoal.client.transport import Endpoint, at
from shoal.core.state.events.queue import JobSubmitted
from shoal.link.meeting import Guest, Host, Invitation, NotAdmitted, Way
from shoal.tasks import Cluster
from tests.live.cluster import Live, live_cluster
from tests.tasks.test_cluster import hosts_of, in_the_middle


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=0) as cluster:
        yield cluster


def endpoint(live: Live, token: str = "") -> Endpoint:
    return at(live.client.url, token or live.home.token.read_text().strip())


class Party:
    """A host and what arrives at it."""

    def __init__(self, live: Live) -> None:
        self.arrived: queue.Queue[tuple[socket.socket, Way]] = queue.Queue()
        self.ends: list[socket.socket] = []
        self.guests: list[Guest] = []
        self.host = Host(endpoint(live), self._take)
        self.invitation = self.host.open()

    def _take(self, end: socket.socket, way: Way) -> None:
        self.ends.append(end)
        self.arrived.put((end, way))

    def guest(self, invitation: Invitation | None = None) -> Guest:
        self.guests.append(Guest(invitation or self.invitation))
        return self.guests[-1]

    def enter(self, guest: Guest) -> socket.socket:
        self.ends.append(guest.enter())
        return self.ends[-1]

    def close(self) -> None:
        self.host.close()
        for guest in self.guests:
            guest.close()
        for end in self.ends:
            end.close()

    def meet(self) -> tuple[socket.socket, socket.socket, Way]:
        """Both ends of a connection."""
        theirs = self.enter(self.guest())
        ours, way = self.arrived.get(timeout=WAIT_S)
        for end in (ours, theirs):
            end.settimeout(WAIT_S)
        return ours, theirs, way


@pytest.fixture
def party(live: Live) -> Iterator[Party]:
    made = Party(live)
    yield made
    made.close()


def received(end: socket.socket) -> bytes:
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def test_bytes_arrive_whole_in_both_directions_and_the_end_is_passed_on(party: Party) -> None:
    ours, theirs, way = party.meet()
    sent = os.urandom(5_000_000)
    for one, other in ((ours, theirs), (theirs, ours)):
        sender = threading.Thread(target=one.sendall, args=(sent,))
        sender.start()
        got = b""
        while len(got) < len(sent):
            got += other.recv(1 << 16)
        sender.join(WAIT_S)
        assert got == sent
    theirs.close()
    assert ours.recv(1) == b""
    assert not way.broken, "the other end went away, the way to it did not"


def test_a_reader_that_does_not_read_slows_its_sender_down(live: Live, party: Party) -> None:
    """Whatever is sent, the head holds little of it."""
    ours, theirs, _ = party.meet()
    theirs.settimeout(2.0)
    sent, piece = 0, bytes(1 << 16)
    with contextlib.suppress(TimeoutError):
        while sent < 1 << 28:
            sent += theirs.send(piece)
    assert sent < 32 << 20, "the sender was not held back"
    other, others, _ = party.meet()  # nobody else is
    others.sendall(b"hello")
    assert other.recv(5) == b"hello"
    theirs.close()
    assert len(received(ours)) <= sent


def test_only_whoever_knows_the_key_is_let_in_and_nobody_learns_more(
    live: Live, party: Party
) -> None:
    right = party.invitation
    wrong = msgspec.structs.replace(right, key="x" * 43)
    unknown = msgspec.structs.replace(right, meeting="0" * 32)
    said = set()
    for invitation in (wrong, unknown):
        with pytest.raises(NotAdmitted) as refused:
            party.guest(invitation).enter()
        said.add(str(refused.value))
    assert len(said) == 1
    for token in ("wrong", "shoal_00000000_x"):
        with pytest.raises(NotAdmitted):
            Host(endpoint(live, token), lambda *_: None).open()


def test_another_host_cannot_take_a_meeting_over(live: Live, party: Party) -> None:
    thief = Host(endpoint(live), lambda *_: None)
    thief._meeting = party.invitation.meeting
    with pytest.raises(NotAdmitted):
        thief.open()
    ours, theirs, _ = party.meet()
    theirs.sendall(b"still here")
    assert ours.recv(10) == b"still here"


def test_a_meeting_outlives_the_controller_and_ends_with_its_host(live: Live, party: Party) -> None:
    ours, _, way = party.meet()
    live.kill_controller()
    assert received(ours) == b""
    assert way.broken
    guest = party.guest()

    def entered() -> bool:
        try:
            party.enter(guest).sendall(b"again")
        except OSError:
            return False
        return True

    until(entered)
    again, _ = party.arrived.get(timeout=WAIT_S)
    again.settimeout(WAIT_S)
    assert again.recv(5) == b"again"
    party.host.close()

    def over() -> bool:
        try:
            party.enter(guest)
        except NotAdmitted:
            return True
        except OSError:
            return False
        return False

    until(over)


def test_a_request_for_a_websocket_is_bounded_like_any_other(live: Live) -> None:
    """What comes before the token: a body, a second request, a strange path, endless headers."""
    parts = urlsplit(live.client.url)
    assert parts.hostname and parts.port
    upgrade = "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    first = "GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    asked = {
        f"GET /v1/meetings/{'0' * 32}/enter HTTP/1.1\r\n{upgrade}{key}\r\n": b"403",
        f"GET /v1/meetings/x/enter HTTP/1.1\r\n{upgrade}{key}\r\n": b"403",
        f"GET /v1/jobs HTTP/1.1\r\n{upgrade}{key}\r\n": b"403",
        f"GET /v1/jobs HTTP/1.1\r\n{upgrade}\r\n": b"400",
        f"GET / HTTP/1.1\r\n{upgrade}{key}Content-Length: 5\r\n\r\nhello": b"400",
        f"{first}GET / HTTP/1.1\r\n{upgrade}{key}\r\n": b"40",
        f"GET / HTTP/1.1\r\n{upgrade}X: {'y' * 40_000}\r\n\r\n": b"4",
    }
    for request, status in asked.items():
        with socket.create_connection((parts.hostname, parts.port), WAIT_S) as end:
            end.sendall(request.encode())
            answer = received(end)
        assert answer.startswith(b"HTTP/1.1 " + status), (request[:80], answer[:200])
    assert live.client.status()


# -- maps ------------------------------------------------------------------------------------


@pytest.fixture
def away(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster as another machine sees it: an empty home, another folder, an address."""
    (tmp_path / "project").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("SHOAL_HOME", raising=False)
    with contexts.changing() as known:
        token = live.home.token.read_text().strip()
        known.contexts["far"] = contexts.Context(url=live.client.url, token=token)
    yield Cluster(context="far")
    until(lambda: not live.client.jobs(), "the job of a map outlived it")


def large(number: int) -> bytes:
    return bytes([number]) * 3_000_000


def slowly(number: int) -> int:
    time.sleep(0.02)
    return number


def test_a_map_from_elsewhere_brings_its_folder_and_its_data(away: Cluster) -> None:
    Path("beside.py").write_text("def double(x): return 2 * x\n")

    def use(data: bytes) -> tuple[int, str, str]:
        import beside  # type: ignore[import-not-found]

        return beside.double(len(data)), hashlib.sha256(data).hexdigest(), os.getcwd()

    sent = [large(number) for number in range(4)]
    found = list(shoal.map(use, sent, cluster=away, workers=2))
    assert [one[:2] for one in found] == [
        (2 * len(data), hashlib.sha256(data).hexdigest()) for data in sent
    ]
    assert all("/packages/" in one[2] for one in found)
    assert list(shoal.map(large, range(4), cluster=away, workers=2)) == sent


def test_workers_and_the_controller_may_die_and_each_result_comes_once(
    live: Live, away: Cluster
) -> None:
    def kill_host() -> None:
        hosts = hosts_of(live)
        assert hosts
        os.kill(hosts[0], signal.SIGKILL)

    for act in (kill_host, live.kill_controller):
        results = shoal.map(slowly, range(300), cluster=away, workers=3)
        assert in_the_middle(results, act) == list(range(300))  # type: ignore[arg-type]


def test_tasks_see_neither_the_key_nor_the_users_token(live: Live, away: Cluster) -> None:
    def environment(_: int) -> str:
        parents = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        return parents + str(dict(os.environ))

    (found,) = shoal.map(environment, [0], cluster=away, workers=1)
    assert live.home.token.read_text().strip() not in found
    assert "SHOAL_TASKS_INVITATION" not in found
    assert "SHOAL_TASKS_SECRET" not in found


def test_no_view_shows_the_keys_of_a_map(live: Live, away: Cluster) -> None:
    """Whoever reads jobs could otherwise pose as a worker."""
    shown = []

    def look() -> None:
        (job,) = live.client.jobs()
        shown.append(live.client.job(job.id).spec.env)
        events = [one.event for one in live.client.events(job=job.id).events]
        shown.extend(one.spec.env for one in events if isinstance(one, JobSubmitted))

    results = shoal.map(slowly, range(60), cluster=away, workers=1)
    assert in_the_middle(results, look) == list(range(60))
    names = ("SHOAL_TASKS_SECRET", "SHOAL_TASKS_INVITATION")
    assert [[env[name] for name in names] for env in shown] == [["(hidden)"] * 2] * 2


def test_an_invitation_says_where_the_head_is(live: Live, party: Party) -> None:
    assert party.invitation.urls == (live.client.url,)
    assert isinstance(party.invitation, Invitation)
