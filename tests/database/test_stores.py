"""The stores of a head beside the log: the same in files and in a real server; a head that was
deposed changes nothing, and the next one finds everything."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.postgres import Postgres

from shoal.cli.verbs.tenant import _checked
from shoal.control import audit_table
from shoal.control.alarms import Alarms
from shoal.control.audit import AuditBroken, AuditQueue
from shoal.control.audit_table import AuditTable, verify_table
from shoal.control.history.store import HistoryFile
from shoal.control.home import ClusterConfig, Home
from shoal.control.jointoken import standing, write_standing
from shoal.control.notices import outbox
from shoal.control.notices.outbox import Outbox
from shoal.control.service_certificates import FollowedSecrets, SecretKey, ServiceCertificates
from shoal.control.stores import Stores
from shoal.database.base import Database, Deposed, StoreAway
from shoal.database.postgres import PostgresDatabase
from shoal.database.settings import FileSettings, Settings, TableSettings
from shoal.database.sqlite import Place, opened
from shoal.model.notice import Notice, What
from shoal.model.people import AuditEntry
from shoal.model.service import Route, Served, Wanted
from shoal.ports import StoreError
from tests.database import two_heads
from tests.database.two_heads import Cluster


@pytest.fixture(params=two_heads.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with two_heads.place(request, tmp_path) as found:
        yield found


@pytest.fixture
def cluster(postgres_server: Postgres) -> Iterator[Cluster]:
    made = Cluster(postgres_server)
    yield made
    made.close()


def home_of(path: Path, name: str, keys_of: Home | None = None) -> Home:
    """`keys_of`: the head that has invited this one."""
    home = Home(path / name)
    home.create()
    for key in ("secrets.key", "notices.key") if keys_of is not None else ():
        assert keys_of is not None
        (home.path / key).write_bytes((keys_of.path / key).read_bytes())
    return home


def table(place: Place) -> TableSettings:
    database = opened(place)
    TableSettings.prepare(database)
    return TableSettings(database)


@pytest.mark.parametrize("kind", ["files", "table"])
def test_settings_are_bytes_by_name(kind: str, place: Place, tmp_path: Path) -> None:
    settings: Settings = FileSettings(tmp_path / "home") if kind == "files" else table(place)
    (tmp_path / "home").mkdir(exist_ok=True)
    values = {"a.json": b"1", "s/x/one": bytes(range(256)), "s/x/two": b"", "s/xy/one": b"3"}
    for name, value in values.items():
        settings.set(name, b"before")
        settings.set(name, value)
    assert {name: settings.get(name) for name in values} == values
    assert settings.get("b.json") is None
    assert [name for name, _ in settings.items("s")] == ["s/x/one", "s/x/two", "s/xy/one"]
    settings.remove("s/x")
    settings.remove("none")
    assert settings.items("s") == [("s/xy/one", b"3")]
    assert settings.get("a.json") == b"1"


def test_secrets_and_settings_go_to_the_next_head_and_no_value_is_in_the_database(
    tmp_path: Path, cluster: Cluster
) -> None:
    database, lease = cluster.head("a")
    home = home_of(tmp_path, "a")
    first = Stores(home, database, lease, "a")
    write_standing(first.settings, "shoal_1a_canary-join", "")
    kept = first.secrets(Alarms())
    kept.put("lab", 0, "token", b"canary-secret", by="ann", now_ms=1)
    second_home = home_of(tmp_path, "b", home)
    database, lease = cluster.head("b")
    second = Stores(second_home, database, lease, "b")
    assert standing(second.settings) == "shoal_1a_canary-join."
    secrets = second.secrets(Alarms())
    assert secrets.value("lab", 0, "token") == b"canary-secret"
    # The first has not noticed yet that it was deposed.
    with pytest.raises(Deposed):
        kept.put("lab", 0, "token", b"stale", by="ann", now_ms=2)
    with pytest.raises(Deposed):
        kept.remove("lab", 0, "token")
    with pytest.raises(Deposed):
        first.settings.set("join-token", b"stale")
    assert second.secrets(Alarms()).value("lab", 0, "token") == b"canary-secret"
    assert standing(second.settings) == "shoal_1a_canary-join."
    dump = cluster.sql("SELECT string_agg(encode(value, 'escape'), '') FROM shoal.settings")
    assert "token" in dump  # the names of secrets are there ...
    assert "canary" not in dump  # ... and values are not


def test_a_standbys_gateway_sees_the_certificates_that_the_leader_has(
    tmp_path: Path, cluster: Cluster
) -> None:
    home = home_of(tmp_path, "a")
    leading = Stores(home, *cluster.head("a")).secrets(Alarms())
    leading.put("lab", 0, "tls", b"first", by="ann", now_ms=1)
    lease = cluster.standby()
    waiting = PostgresDatabase(cluster.url, lease)
    cluster.opened.append(waiting)
    standby = Stores(home_of(tmp_path, "b", home), waiting, lease)
    now_s = 0.0
    seen = FollowedSecrets(lambda: standby.secrets(Alarms()), lambda: now_s)
    found = ServiceCertificates(seen)
    route = Route(service="web", port=9443, certificate="tls")
    wanted = Wanted(services=(Served(route=route),))

    def value() -> str:
        return found.fill(wanted, {"web": SecretKey("lab", 0, "tls")}).services[0].certificate

    assert value() == "first"
    leading.put("lab", 0, "tls", b"second", by="ann", now_ms=2)
    now_s = 60.0
    assert value() == "second"


def test_a_head_that_waits_before_any_has_led_finds_nothing_set(
    tmp_path: Path, cluster: Cluster
) -> None:
    lease = cluster.standby()
    lease.heads()  # which makes the first tables
    waiting = PostgresDatabase(cluster.url, lease)
    cluster.opened.append(waiting)
    home = home_of(tmp_path, "a")
    settings = Stores(home, waiting, lease).settings
    assert standing(settings) == ""
    Stores(home, *cluster.head("b")).settings.set("join-token", b"text")
    assert standing(settings) == "text"


def test_a_head_with_other_keys_is_refused_in_one_line(tmp_path: Path, cluster: Cluster) -> None:
    database, lease = cluster.head("a")
    home = home_of(tmp_path, "a")
    Stores(home, database, lease)
    other = home_of(tmp_path, "b", home)
    Stores(other, database, cluster.standby())  # a standby with the right ones
    (other.path / "notices.key").write_bytes(b"0" * 64)
    for leads in (lease, cluster.standby()):
        with pytest.raises(StoreError, match=r"notices\.key is not the key of the other heads"):
            Stores(other, database, leads)
    (other.path / "secrets.key").unlink()
    with pytest.raises(StoreError, match=r"secrets\.key is missing; put it back from a backup"):
        Stores(other, database, lease)


def notice(number: int, to: str = "mail:ann@x.org", tenant: str = "lab") -> Notice:
    return Notice(id=f"n{number}", what=What.ENDED, at_ms=number, tenant=tenant, to=to, text="done")


def test_notices_wait_in_order_each_once_within_bounds(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "WAITING_MAX", 3)
    box = Outbox(place)
    assert (box.cursor, box.next_ms()) == (None, None)
    box.take([notice(n) for n in (1, 2, 2)], 5, 100)
    assert (box.cursor, box.mark) == (5, 0)
    box.take([notice(n) for n in (2, 3, 4)] + [notice(9, "mail:bob@x.org")], 7, 100, 77)
    assert (box.cursor, box.mark) == (7, 77)
    assert [one.notice.id for one in box.due(100, [], 4)] == ["n2", "n9"]  # n1 made room
    first, other = box.due(100, [], 4)
    assert [one.notice.id for one in box.due(100, [first.receiver], 4)] == ["n9"]
    box.failed(first, "refused", 5_000, give_up=False)
    box.delivered(other, 100)
    assert (box.next_ms(), box.next_ms([first.receiver])) == (5_000, None)
    (again,) = box.due(5_000, [], 4)
    assert (again.notice.id, again.tries, again.in_row) == ("n2", 1, 1)
    box.failed(again, "refused", 0, give_up=True)
    seen = box.view("lab", "mail:ann@x.org")
    assert (seen.waiting, seen.failed, seen.dropped, seen.error) == (2, 2, 2, "refused")
    assert box.views("lab")[outbox.receiver_key("lab", "mail:bob@x.org")].delivered == 1
    box.forget("lab")
    assert (box.next_ms(), box.views("")) == (None, {})


def test_a_notice_that_a_deposed_head_has_sent_stays_for_the_next_one(cluster: Cluster) -> None:
    old = Outbox(cluster.head("a")[0])
    old.take([notice(1), notice(2)], 5, 100)
    (sent,) = old.due(100, [], 4)
    new = Outbox(cluster.head("b")[0])
    acts: list[Callable[[], None]] = [
        lambda: old.delivered(sent, 100),
        lambda: old.take([notice(3)], 9, 100),
        lambda: old.forget("lab"),
    ]
    for act in acts:
        with pytest.raises(Deposed):
            act()
    assert new.cursor == 5
    assert new.due(100, [], 4) == [sent]
    assert new.view("lab", "mail:ann@x.org").waiting == 2


def test_samples_are_read_as_they_were_written_and_the_oldest_make_room(place: Place) -> None:
    file = HistoryFile(place, bytes_max=100_000)
    wholes = [(f"j/{n}", n, os.urandom(300)) for n in range(1_000)]
    file.write(b"one", wholes)
    file.write(b"two", [("n/n1", None, b"living"), ("j/5", 5, b"again")])
    assert (file.tail(), file.living()) == ([b"one", b"two"], {"n/n1": b"living"})
    assert (file.read("j/5"), file.read("j/7"), file.read("j/x")) == (b"again", wholes[7][2], None)
    again = HistoryFile(place, bytes_max=100_000)
    assert (again.newest, again.size_bytes) == (file.newest, file.size_bytes)
    file.write(b"", [], file.newest)
    file.trim()
    assert file.size_bytes <= 100_000
    assert (file.tail(), file.read("j/5"), file.read("n/n1")) == ([], None, b"living")
    assert file.read("j/999") == wholes[999][2]
    file.drop(["j/999", "n/n1"])
    assert file.size_bytes == HistoryFile(place).size_bytes


def test_samples_of_one_tenant_do_not_push_out_those_of_others(place: Place) -> None:
    file = HistoryFile(place, bytes_max=100_000)
    file.write(b"", [(f"j/j{n}", n, os.urandom(300)) for n in range(1_000)])
    file.trim(lambda: {f"j{n}": "blue" if n < 20 else "red" for n in range(1_000)})
    assert file.size_bytes <= 100_000
    assert all(file.read(f"j/j{n}") is not None for n in range(20)), "the oldest of all"
    assert file.read("j/j20") is None
    assert file.read("j/j999") is not None


def test_samples_of_a_deposed_head_are_not_written(cluster: Cluster) -> None:
    old = HistoryFile(cluster.head("a")[0])
    old.write(b"one", [("n/n1", None, b"1")])
    new = HistoryFile(cluster.head("b")[0])
    with pytest.raises(Deposed):
        old.write(b"stale", [("n/n1", None, b"stale")])
    new.write(b"two", [])
    assert (new.tail(), new.living()) == ([b"one", b"two"], {"n/n1": b"1"})


# -- the audit log -----------------------------------------------------------------------------


def entry(number: int) -> AuditEntry:
    return AuditEntry(seq=0, at_ms=number, who="ann", verb="jobs.cancel", on=f"j{number}")


def write(log: AuditQueue, *numbers: int) -> None:
    async def work() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(log.write(entry(number)) for number in numbers))
            await log.close()

    asyncio.run(work())


def verified(database: Database) -> list[tuple[int, str]]:
    verify_table(database)
    rows = AuditTable(database, Alarms(), Path(), lambda _: None, leads=False).newest_first()
    return [(one.at_ms, one.via) for one in rows][::-1]


def test_one_chain_holds_the_lines_of_all_heads_also_of_one_that_was_deposed(
    tmp_path: Path, cluster: Cluster
) -> None:
    database, lease = cluster.head("a")
    home = home_of(tmp_path, "a")
    first = Stores(home, database, lease, "a").audit(Alarms())
    write(first, 1, 2)
    # A standby may not write the chain; its lines wait for the leader.
    other = home_of(tmp_path, "b", home)
    write(Stores(other, database, cluster.standby(), "b").audit(Alarms()), 3)
    assert verified(database) == [(1, "a"), (2, "a")]
    audit_table.collect(database)
    database_b, lease_b = cluster.head("b")
    second = Stores(other, database_b, lease_b, "b").audit(Alarms())
    write(first, 4)  # it leads no more, and has not noticed
    write(second, 5)
    audit_table.collect(database_b)  # unless it has happened already
    assert not audit_table.collect(database_b)
    assert sorted(verified(database_b)) == [(1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "b")]
    with pytest.raises(Deposed):
        audit_table.add(database, [("x", b"{}")])
    other.write_config(ClusterConfig(nodes=(), database=cluster.url))
    _, newest = _checked(other.path)  # `shoal audit verify`
    assert newest is not None
    assert newest.seq == 5
    cluster.sql("DELETE FROM shoal.audit WHERE seq = 5")
    with pytest.raises(AuditBroken, match="ends at number 4, but number 5 was written"):
        _checked(other.path)


def test_lines_wait_on_the_heads_disk_while_the_server_is_away(
    tmp_path: Path, cluster: Cluster
) -> None:
    database, lease = cluster.head("a")
    audit_table.prepare(database)
    spool, alarms = tmp_path / "audit.waiting", Alarms()

    def away(*_: object) -> None:
        raise StoreAway("the server does not answer")

    class Away:
        words, read, transaction, prepare = database.words, away, away, away

    lost = AuditTable(Away(), alarms, spool, away, leads=False)  # type: ignore[arg-type]
    write(lost, 1, 2)
    assert lost.stuck
    assert "the server does not answer" in alarms.texts[0]
    assert spool.stat().st_mode & 0o777 == 0o600
    # The next life of this head hands them in, with its first line at the latest.
    done = threading.Event()

    def hand_in(lines: object) -> None:
        lease.hand_in(lines)  # type: ignore[arg-type]
        done.set()

    async def next_life() -> None:
        log = AuditTable(database, Alarms(), spool, hand_in, leads=True)
        await log.write(entry(3))
        assert await asyncio.to_thread(done.wait, 30)
        await log.close()

    asyncio.run(next_life())
    audit_table.collect(database)
    assert sorted(verified(database)) == [(1, ""), (2, ""), (3, "")]
    assert not spool.exists()


DAMAGES: list[tuple[str, str]] = [
    (
        "UPDATE audit SET line = CAST(replace(CAST(line AS TEXT), 'ann', 'eve') AS BLOB) "
        "WHERE seq = 3",
        "was changed",
    ),
    ("DELETE FROM audit WHERE seq = 3", "row 4 .* has number 4 but follows 2"),
    ("DELETE FROM audit WHERE seq = 5", "ends at number 4, but number 5 was written"),
    ("DELETE FROM audit WHERE seq < 3", "the lines before it are missing"),
    ("DELETE FROM audit_end", "audit_end is empty, so the end cannot be verified"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_changed_past_shows_in_the_table(damage: str, words: str, tmp_path: Path) -> None:
    database = opened(tmp_path / "audit.db")
    audit_table.prepare(database)
    write(AuditTable(database, Alarms(), tmp_path / "s", lambda _: None, leads=True), *range(5))
    assert len(verified(database)) == 5
    with database.transaction() as cursor:
        cursor.execute(damage)
    with pytest.raises(AuditBroken, match=words):
        verified(database)


def test_the_table_is_bounded_and_its_rest_can_be_verified(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_table, "BLOCK", 10)
    monkeypatch.setattr(audit_table, "LINES_MAX", 30)
    database = opened(place)
    audit_table.prepare(database)
    for start in range(0, 95, 5):
        log = AuditTable(database, Alarms(), tmp_path / "s", lambda _: None, leads=True)
        write(log, *range(start, start + 5))
    kept = [number for number, _ in verified(database)]
    assert kept == list(range(60, 95))
    # What is handed in twice is in the chain once.
    twice: list[Callable[[], str]] = [
        lambda: audit_table.add(database, [("same", b'{"seq":0,"at_ms":99}')]) for _ in range(2)
    ]
    assert twice[0]() == twice[1]()
    assert [number for number, _ in verified(database)] == [*range(60, 95), 99]


def test_a_shared_folder_that_is_not_the_clusters_is_refused(tmp_path: Path) -> None:
    home, shared = home_of(tmp_path, "a"), tmp_path / "shared"
    shared.mkdir()  # as a mount point on which nothing is mounted
    with pytest.raises(OSError, match="it has no file cluster-id of this cluster"):
        home.share(str(shared))
    (shared / "cluster-id").write_text("cafe0001\n")
    with pytest.raises(OSError, match="it is of the cluster cafe0001, not this one"):
        home.share(str(shared))
    assert sorted(path.name for path in shared.iterdir()) == ["cluster-id"]
    assert home.logs == home.path / "logs"
    (shared / "cluster-id").write_text(f"{home.cluster_id()}\n")
    home.share(str(shared))
    assert {home.logs, home.packages, home.outputs} == {
        shared / name for name in ("logs", "packages", "outputs")
    }
    assert home.marks == shared / "marks.json"
