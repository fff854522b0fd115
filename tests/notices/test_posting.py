"""Notices reach real receivers: signed, in order, once, and whatever other receivers do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.api.notices import POSTING
from shoal.control.notices import posting, senders
from shoal.control.notices.outbox import Outbox
from shoal.model.job import MemberRef, Phase
from shoal.model.notice import Notice, What
from tests.api.server import OPERATORS, Server, serving
from tests.notices.receivers import MailServer, Receiver, is_signed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(posting, "BACKOFF_MS", 20)
    monkeypatch.setattr(posting, "BACKOFF_MS_MAX", 100)
    monkeypatch.setattr(posting, "TRIES_MAX", 1_000_000)
    monkeypatch.setattr(posting, "AGE_MS_MAX", 2**62)  # the server's clock is moved by hand
    with serving(tmp_path / "home") as server:
        yield server


def ask(server: Server, token: str, method: str, path: str, body: Any = None) -> Any:
    reply = server.call(token, method, path, body)
    assert reply.status < 300, reply.message
    return msgspec.json.decode(reply.body)


def end(server: Server, job: str, code: int) -> None:
    server.engine.book.exited(MemberRef(job, 1, 0), code)
    server.engine.inbox.heard(server.engine.book.report())


def finish(server: Server, token: str, *notify: str, code: int = 0, **fields: Any) -> str:
    """A job that runs and ends."""
    spec = {"command": ["work"], "cpu_milli": 100, "notify": notify, **fields}
    job: str = ask(server, token, "POST", "/v1/jobs", {"spec": spec})["id"]

    def phase() -> Phase | None:
        found = server.loop.tick.state.jobs.get(job)
        return found.phase if found is not None else None

    until(lambda: phase() is Phase.RUNNING, f"the start of {job}")
    server.run(lambda: end(server, job, code))
    until(lambda: phase() is None, f"the end of {job}")
    return job


def test_dead_receivers_cost_others_nothing_and_get_their_notices_when_they_are_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "SEND_S", 2.0)
    troubles = iter((500, 302, 429))
    with socket.create_server(("127.0.0.1", 0)) as door:
        free = door.getsockname()[1]
    good, hangs = Receiver(), Receiver(lambda: 0)
    moody = Receiver(lambda: next(troubles, 200))
    wishes = [f"started,ended={one.url}" for one in (hangs, moody, good)]
    gone = f"ended=http://127.0.0.1:{free}/"
    jobs = [finish(server, OPERATORS, *wishes, gone, name=f"run{n}") for n in range(3)]
    until(lambda: len(good.taken) == 6, "the good receiver's notices")
    assert [(one["job"], one["type"]) for one in good.notices] == [
        (job, what) for job in jobs for what in ("started", "ended")
    ]
    until(lambda: len(moody.taken) == 6, "those of the moody one")
    assert [one["id"] for one in moody.notices] != [one["id"] for one in good.notices]
    assert moody.asked == 9

    views = {one["to"]: one for one in ask(server, OPERATORS, "GET", "/v1/rules")["others"]}
    assert views[f"http://127.0.0.1:{good.port}"]["delivered"] == 6
    assert views[f"http://127.0.0.1:{hangs.port}"]["waiting"] == 6
    until(
        lambda: (
            "refused"
            in next(
                one["error"]
                for one in ask(server, OPERATORS, "GET", "/v1/rules")["others"]
                if str(free) in one["to"]
            )
        ),
        "the reason",
    )
    back = Receiver(port=free)
    until(lambda: len(back.taken) == 3, "the notices for the receiver that came back")
    assert [one["job"] for one in back.notices] == jobs
    for one in (good, hangs, moody, back):
        one.close()


def test_a_webhook_is_signed_by_its_tenant_and_names_what_happened(server: Server) -> None:
    server.tenant("lab")
    ada, eve = server.token("ada", "lab"), server.token("eve", "lab")
    ask(server, OPERATORS, "PUT", "/v1/rules/settings", {"allow": ["127.0.0.1/32"]})
    receiver, quiet = Receiver(), Receiver()
    ask(server, ada, "PUT", "/v1/secrets/hook", f"{receiver.url}T0/secret\n".encode())
    ask(server, ada, "POST", "/v1/rules", {"wish": "failed=@hook"})
    ask(server, eve, "POST", "/v1/rules", {"wish": f"ended={quiet.url}"})
    finish(server, ada, name="fine")
    bad = finish(server, ada, code=3, name="bad", labels={"run": "a"})
    until(lambda: receiver.taken, "the notice")
    (headers, body), notice = receiver.taken[0], receiver.notices[0]
    key = ask(server, ada, "GET", "/v1/rules/key")["key"]
    assert is_signed(key, headers, body)
    assert not is_signed(key, headers, body + b" ")
    assert not is_signed(ask(server, OPERATORS, "GET", "/v1/rules/key")["key"], headers, body)
    assert (notice["type"], notice["job"], notice["name"]) == ("failed", bad, "bad")
    assert (notice["user"], notice["tenant"], notice["state"]) == ("ada", "lab", "failed")
    assert (notice["exit_code"], notice["labels"]) == (3, {"run": "a"})
    assert notice["id"] == headers["webhook-id"]
    assert not quiet.asked, "a rule is about its owner's jobs"
    shown = server.call(OPERATORS, "GET", "/v1/events?limit=10000").body
    shown += server.call(ada, "GET", "/v1/rules").body
    wish = "failed=https://x.org/T0/secret"
    loud = finish(server, ada, wish)
    for path in ("", "/why", "/explanation"):
        shown += server.call(ada, "GET", f"/v1/jobs/{loud}{path}").body
    service = {"name": "web", "replica": {"command": ["serve"], "notify": [wish]}}
    shown += server.call(ada, "PUT", "/v1/services/web", service).body
    shown += server.call(ada, "GET", "/v1/events?limit=10000").body
    assert b"T0/secret" not in shown
    assert f"{quiet.port}/".encode() not in shown
    receiver.close()
    quiet.close()


def test_a_tenant_cannot_reach_the_head_itself_unless_an_admin_allows_it(server: Server) -> None:
    server.tenant("lab")
    ada = server.token("ada", "lab")
    receiver = Receiver()
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"):
        url = f"http://{host}:{receiver.port}/"
        said = ask(server, ada, "POST", "/v1/rules/test", {"to": url})
        assert "address of the head itself" in said["note"], (host, said)
    finish(server, ada, f"ended={receiver.url}")

    def error() -> str:
        found = ask(server, ada, "GET", "/v1/rules")["others"]
        return str(found[0]["error"]) if found else ""

    until(lambda: "head itself" in error(), "the refusal")
    assert not receiver.asked
    ask(server, OPERATORS, "PUT", "/v1/rules/settings", {"allow": ["127.0.0.0/8"]})
    until(lambda: receiver.taken, "the notice that was refused before")
    receiver.close()


def test_mail_goes_through_the_server_that_an_admin_sets(server: Server) -> None:
    mails = MailServer("correct horse")
    ask(server, OPERATORS, "PUT", "/v1/secrets/smtp-password", b"wrong")
    smtp = {
        "host": "127.0.0.1",
        "port": mails.port,
        "sender": "shoal@example.com",
        "encryption": "none",
        "user": "shoal",
        "password": "smtp-password",
    }
    ask(server, OPERATORS, "PUT", "/v1/rules/settings", {"smtp": smtp})
    to = {"to": "mail:me@example.com"}
    assert "wrong password" in ask(server, OPERATORS, "POST", "/v1/rules/test", to)["note"]
    ask(server, OPERATORS, "PUT", "/v1/secrets/smtp-password", b"correct horse")
    job = finish(server, OPERATORS, "ended=mail:me@example.com", name="nightly")
    until(lambda: mails.mails, "the mail")
    assert f"Subject: [shoal] {job} (nightly) succeeded" in mails.mails[0]
    assert "To: me@example.com" in mails.mails[0]
    mails.close()


def test_a_receiver_that_drips_is_left_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, but the answer never ends."""
    monkeypatch.setattr(senders, "SEND_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        over = threading.Event()

        def drip() -> None:
            peer, _ = door.accept()
            with peer, contextlib.suppress(OSError):
                while not over.wait(0.1):
                    peer.send(b"H")

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}/"
        assert ask(server, OPERATORS, "POST", "/v1/rules/test", {"to": url})["note"]
        over.set()


def test_an_outbox_that_has_read_another_log_begins_with_what_happens_now(server: Server) -> None:
    box = server.app.state[POSTING].outbox
    last, mark = server.loop.last_seq, server.store.mark(server.loop.last_seq)
    for known, begins in ((mark, last - 1), (7, last)):
        box.take((), last - 1, 1, server.store.mark(last - 1) if known == mark else known)
        assert server.run(server.app.state[POSTING]._begin) == begins


def test_a_full_outbox_drops_the_oldest_and_counts_them(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "notices.db")
    many = [
        Notice(id=f"n{number}", what=What.ENDED, at_ms=0, text="", to="https://x.org", tenant="lab")
        for number in range(1_100)
    ]
    outbox.take(many, 7, 1)
    view = outbox.view("lab", "https://x.org")
    assert (view.waiting, view.dropped) == (1_000, 100)
    assert outbox.due(1, (), 4)[0].notice.id == "n100"
    outbox.take(many[-1:], 8, 1)
    assert outbox.view("lab", "https://x.org").waiting == 1_000, "the same id waits once"
    outbox.close()
    again = Outbox(tmp_path / "notices.db")
    assert (again.cursor, again.view("lab", "https://x.org").waiting) == (8, 1_000)
    again.close()
