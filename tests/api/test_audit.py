"""What the audit log has of requests: who, what, from where and how it ended; and no secrets."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from harness.waiting import until

from shoal.api.audit import REFUSED_MAX
from shoal.client import Client, ShoalError
from shoal.control.audit import verify
from shoal.model.identity import Role
from shoal.model.people import AuditEntry, NewToken
from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as made:
        for tenant in ("lab", "art"):
            made.client.add_tenant(tenant)
        made.client.add_user("ann", {"lab": Role.MEMBER})
        made.client.add_user("bob", {"art": Role.VIEWER})
        yield made
        verify(made.home.path / "audit.log")


@pytest.fixture
def sign(live: Live) -> Iterator[Callable[[str], Client]]:
    clients: list[Client] = []

    def make(user: str) -> Client:
        secret = live.client.add_token(NewToken(user=user)).secret
        clients.append(Client(live.client.url, secret))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def line(entry: AuditEntry) -> tuple[str, str, str, str, int, str]:
    return entry.who, entry.tenant, entry.verb, entry.on, entry.status, entry.source


def newest(live: Live, count: int, **filters: str) -> list[AuditEntry]:
    return live.client.audit(limit=count, **filters).entries


def refused(act: Callable[[], object]) -> int:
    with pytest.raises(ShoalError) as caught:
        act()
    return caught.value.status


def test_changes_and_refusals_are_noted_with_their_sender(
    live: Live, sign: Callable[[str], Client]
) -> None:
    ann, bob = sign("ann"), sign("bob")
    job = ann.submit(live.spec("sleep", "600")).id
    assert ann.job(job).id == job  # reading leaves no line
    assert not ann.has_package("0" * 64)  # nor does the question before each package
    assert refused(lambda: bob.cancel(job)) == 403
    assert refused(lambda: bob.job(job)) == 404
    ann.cancel(job)
    live.client.set_user("bob", {"art": Role.MEMBER})
    assert [line(entry) for entry in newest(live, 5)][::-1] == [
        ("ann", "lab", "jobs.submit", job, 201, "127.0.0.1"),
        ("bob", "art", "jobs.cancel", job, 403, "127.0.0.1"),
        ("bob", "art", "jobs.one", job, 404, "127.0.0.1"),
        ("ann", "lab", "jobs.cancel", job, 200, "127.0.0.1"),
        ("operator", "*", "users.change", "bob", 200, "socket"),
    ]
    assert {entry.who for entry in newest(live, 100, user="ann")} == {"ann"}
    assert {entry.tenant for entry in newest(live, 100, tenant="art")} == {"art"}
    assert {entry.verb for entry in newest(live, 100, verb="jobs.cancel")} == {"jobs.cancel"}
    assert {entry.verb.split(".")[0] for entry in newest(live, 100, verb="jobs")} == {"jobs"}


def test_only_admins_read_it(sign: Callable[[str], Client]) -> None:
    assert refused(sign("ann").audit) == 403


def test_sign_ins_are_noted_whether_they_work_or_not(live: Live) -> None:
    where = urlsplit(live.client.url)
    token = live.home.token.read_text().strip()
    for given, status in ((token, 200), ("wrong", 401)):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/session", f'{{"token":"{given}"}}', headers)
        assert connection.getresponse().status == status
        connection.close()
    wrong, right = newest(live, 2)
    assert line(right) == ("operator", "*", "sessions.sign_in", "", 200, "127.0.0.1")
    assert line(wrong) == ("", "", "sessions.sign_in", "", 401, "127.0.0.1")


def test_a_flood_of_wrong_tokens_does_not_push_the_rest_out(live: Live) -> None:
    before = newest(live, 1)[0].seq
    with Client(live.client.url, "shoal_abcd1234_nonsense") as stranger:
        for _ in range(REFUSED_MAX + 70):
            assert refused(stranger.status) == 401
    live.client.set_user("bob", {"art": Role.VIEWER})
    last = newest(live, 1)[0]
    assert last.seq - before <= REFUSED_MAX + 1
    assert last.skipped >= 70


def test_no_secret_and_no_body_ever_gets_into_it(live: Live, sign: Callable[[str], Client]) -> None:
    made = live.client.add_token(NewToken(user="ann", note="a note of ann's"))
    secret = made.secret
    assert refused(lambda: live.client.remove_token(secret)) == 404  # the whole of it in the path
    with Client(live.client.url, secret) as ann:
        ann.submit(live.spec("true", env={"PASSWORD": "hunter2"}))
        ann.remove_token(made.token.id)
    told = (live.home.path / "audit.log").read_text()
    assert secret.split("_", 2)[2] not in told
    assert f"shoal_{made.token.id}_..." in told
    for word in ("hunter2", "a note of", live.home.token.read_text().strip()):
        assert word not in told


def test_the_log_survives_a_controller_that_is_killed(live: Live) -> None:
    before = newest(live, 1)[0].seq
    live.client.set_user("bob", {"art": Role.MEMBER})
    live.kill_controller()
    live.client.set_user("bob", {"art": Role.VIEWER})
    entries = newest(live, 50)
    assert [entry.seq for entry in entries] == list(range(entries[0].seq, entries[-1].seq - 1, -1))
    assert entries[0].seq >= before + 2
    verify(live.home.path / "audit.log")


def test_while_the_log_cannot_be_written_only_the_operator_changes_something(
    live: Live, sign: Callable[[str], Client]
) -> None:
    ann, path = sign("ann"), live.home.path / "audit.log"
    aside = path.with_name("aside")
    os.kill(live.controller_pid(), signal.SIGSTOP)  # it writes nothing meanwhile
    path.rename(aside)
    path.mkdir()
    pid = live.kill_controller()
    until(lambda: live.controller_pid() != pid)
    live.client.set_user("bob", {"art": Role.MEMBER})
    assert any("audit.log cannot be written" in text for text in live.client.status().alarms)
    assert refused(lambda: ann.submit(live.spec("true"))) == 507
    assert ann.me().user == "ann"  # to look is allowed
    path.rmdir()
    aside.rename(path)
    until(lambda: not any("cannot" in t for t in live.client.status().alarms))
    assert ann.submit(live.spec("true")).id
    told = [entry.verb for entry in newest(live, 3)]
    assert told == ["jobs.submit", "jobs.submit", "users.change"]  # the refused one, too
    verify(path)
