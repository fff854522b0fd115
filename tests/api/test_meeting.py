"""Who may open a meeting, take part in it, and for how long: bounds, roles, tenants and tokens."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.client.transport import at
from shoal.link.meeting import Guest, Host, Invitation, NotAdmitted
from shoal.model.identity import Role, User
from shoal.model.report import RemoveToken, SetUser
from shoal.tick import Tick
from tests.api.server import OPERATORS, Server, serving


class People:
    """Hosts and guests of one server; all are closed at the end."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.server, self._stack = server, stack
        self.arrived: queue.Queue[socket.socket] = queue.Queue()

    def host(self, token: str, meeting: str = "", key: str = "") -> Host:
        def welcome(end: socket.socket, _: object) -> None:
            end.settimeout(WAIT_S)
            self._stack.callback(end.close)
            self.arrived.put(end)

        host = Host(at(f"http://127.0.0.1:{self.server.port}", token), welcome)
        host._meeting, host._key = meeting or host._meeting, key or host._key
        return host

    def open(self, token: str, meeting: str = "", key: str = "") -> Invitation:
        host = self.host(token, meeting, key)
        invitation = host.open()
        self._stack.callback(host.close)
        return invitation

    def enter(self, invitation: Invitation) -> socket.socket:
        guest = Guest(invitation)
        self._stack.callback(guest.close)
        end = guest.enter()
        end.settimeout(WAIT_S)
        self._stack.callback(end.close)
        return end

    def may_enter(self, invitation: Invitation) -> bool:
        try:
            self.enter(invitation)
        except NotAdmitted:
            return False
        return True

    def refused(self, act: Callable[[], object]) -> str:
        with pytest.raises(NotAdmitted) as error:
            act()
        return str(error.value)


@pytest.fixture
def people(tmp_path: Path) -> Iterator[People]:
    with serving(tmp_path / "home") as server, ExitStack() as stack:
        server.tenant("red")
        server.tenant("blue")
        yield People(server, stack)


def test_a_tenant_has_so_many_meetings_and_another_tenant_is_not_affected(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.meeting.MEETINGS_PER_TENANT_MAX", 2)
    monkeypatch.setattr("shoal.api.meeting.MEETINGS_MAX", 4)
    ann, bob = people.server.token("ann", "red"), people.server.token("bob", "blue")
    for _ in range(2):
        people.open(ann)
    people.refused(lambda: people.open(ann))
    for _ in range(2):
        people.open(bob)
    people.refused(lambda: people.open(OPERATORS))  # the bound on all of them


def test_a_meeting_has_so_many_guests_and_who_leaves_makes_room(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.meeting.GUESTS_PER_MEETING_MAX", 2)
    monkeypatch.setattr("shoal.api.meeting.GUESTS_MAX", 3)
    ann = people.server.token("ann", "red")
    first, second = people.open(ann), people.open(ann)
    ends = [people.enter(first) for _ in range(2)]
    people.refused(lambda: people.enter(first))
    people.enter(second)
    people.refused(lambda: people.enter(second))  # the bound on all of them
    for end in ends:
        end.close()
    until(lambda: people.may_enter(first))


def test_a_viewer_opens_no_meeting(people: People) -> None:
    people.refused(lambda: people.open(people.server.token("eve", "red", Role.VIEWER)))
    people.open(people.server.token("ann", "red"))


def test_another_tenant_who_knows_a_meeting_enters_with_its_key_and_never_hosts_it(
    people: People,
) -> None:
    """The key is the right to enter, as the nodes' workers have no token. Only its own tenant is
    its host, and a stranger learns no more than of a meeting that never was."""
    ann, bob = people.server.token("ann", "red"), people.server.token("bob", "blue")
    real = people.open(ann)
    unknown = msgspec.structs.replace(real, meeting="0" * 32)
    wrong = msgspec.structs.replace(real, key="x" * 43)
    said = {people.refused(lambda one=one: people.enter(one)) for one in (unknown, wrong)}  # type: ignore[misc]
    said.add(people.refused(lambda: people.open(bob, real.meeting)))
    said.add(people.refused(lambda: people.open(bob, real.meeting, real.key)))
    said.add(people.refused(lambda: people.open(ann, real.meeting)))  # its own tenant, no key
    assert len(said) == 1
    people.enter(real).sendall(b"hello")
    assert people.arrived.get(timeout=WAIT_S).recv(5) == b"hello"


def test_a_meeting_goes_on_when_its_hosts_token_is_looked_up_while_a_step_is_stored(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.watcher.TIMER_S_MAX", 0.05)
    monkeypatch.setattr("shoal.api.watcher.AGAIN_S", 0.05)
    storing, looks = threading.Event(), queue.SimpleQueue[bool]()

    def settled(tick: Tick) -> bool:
        if storing.is_set():
            looks.put(True)
        return not storing.is_set()

    until_ms = people.server.loop.clock.now_ms() + 3_600_000
    invitation = people.open(people.server.token("ann", "red", until_ms=until_ms))
    monkeypatch.setattr(Tick, "settled", property(settled))
    storing.set()
    assert looks.get(timeout=WAIT_S)
    storing.clear()
    people.server.run(people.server.loop._gate.set)
    people.enter(invitation).sendall(b"x")
    assert people.arrived.get(timeout=WAIT_S).recv(1) == b"x"


@pytest.mark.parametrize("how", ["removed", "viewer"])
def test_a_host_whose_token_was_revoked_loses_its_meeting_and_its_guests(
    people: People, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("shoal.api.meeting.AWAY_S_MAX", 0.05)
    ann = people.server.token("ann", "red")
    invitation = people.open(ann)
    theirs = people.enter(invitation)
    ours = people.arrived.get(timeout=WAIT_S)
    theirs.sendall(b"before")
    assert ours.recv(6) == b"before"
    if how == "removed":
        people.server.ask(RemoveToken(ann.split("_")[1]))
    else:
        people.server.ask(SetUser(User(name="ann", roles={"red": Role.VIEWER})))
    assert (ours.recv(1), theirs.recv(1)) == (b"", b""), "both ends are closed"
    people.refused(lambda: people.open(ann))
    until(lambda: not people.may_enter(invitation))
