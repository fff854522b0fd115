"""Backups: whole and coherent while the cluster writes, private, and put back without a doubt."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sqlite3
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.cli.app import call
from shoal.control.backup import manifest as backups
from shoal.control.backup import restoring
from shoal.control.backup.manifest import BackupError
from shoal.control.backup.restoring import restore
from shoal.control.backup.saving import save
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import LifecycleError, bring_up
from shoal.control.store.marks import JOBS_AHEAD, Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ClockJumped
from shoal.core.state.state import State
from shoal.ledger.store import LedgerStore
from shoal.machine.files import lock
from shoal.model.job import JobSpec
from shoal.model.report import Submit
from tests.control.test_sqlite_store import as_bytes, history
from tests.core.build import Cluster
from tests.needs import need_program


def quiet(_what: str, _done: int, _total: int) -> None: ...


def place_at(path: Path, jobs: int = 6) -> Home:
    """A home with something in every place, as after a crash."""
    home = Home(path)
    home.create()
    home.write_config(ClusterConfig(nodes=()))
    home.cluster_id()
    store = SqliteStore(home.database, Numbers(home.marks))
    for done in history(jobs)[1]:
        store.commit(done.events, done.finished)
    store.close()
    LedgerStore(home.ledger).close()
    (home.tls).mkdir()
    (home.tls / "ca.key").write_text("key")
    (home.secrets / "lab").mkdir(parents=True)
    (home.secrets / "lab" / "HF").write_text("sealed")
    (home.path / "secrets.key").write_text("ab" * 32)
    for name in ("audit.log", "audit.log.1", "audit.mark", "notices.json"):
        (home.path / name).write_text(name)
    (home.nodes / "n1").mkdir()
    (home.nodes / "n1" / "big").write_text("not the head's")
    home.spare.write_text("room")
    home.controller_log.write_text("words")
    (home.logs / "j1").mkdir()
    (home.logs / "j1" / "1.0.log").write_text("said")
    home.outputs.mkdir()
    (home.outputs / "model").write_text("weights")
    (home.outputs / "newest").symlink_to("model")
    return home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return place_at(tmp_path / "home")


@pytest.fixture
def saved(home: Home, tmp_path: Path) -> Path:
    save(home, tmp_path / "b.tar", (), quiet)
    return tmp_path / "b.tar"


def loaded(home: Home) -> State:
    store = SqliteStore(home.database)
    try:
        return store.load()[0]
    finally:
        store.close()


def names_in(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return set(archive.getnames())


def test_a_backup_holds_what_the_head_remembers_and_nothing_else(home: Home, saved: Path) -> None:
    assert names_in(saved) == {
        *("shoal.db", "ledger.db", "marks.json", "cluster.json", "cluster-id", "token"),
        *("tls/ca.key", "secrets/lab/HF", "secrets.key", "notices.json", "manifest.json"),
        *("audit.log", "audit.log.1", "audit.mark"),
    }
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    found = backups.verify(saved, quiet)
    assert (found.cluster, found.live_jobs) == (home.cluster_id(), len(history(6)[0].jobs))
    assert found.seq == sum(len(done.events) for done in history(6)[1])
    assert sorted(path.name for path in saved.parent.iterdir()) == ["b.tar", "home"]


def test_parts_that_are_asked_for_are_in_it_and_come_back(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    save(home, path, ("logs", "outputs"), quiet)
    restore(path, Home(tmp_path / "new"), replace=False, progress=quiet)
    assert (tmp_path / "new/logs/j1/1.0.log").read_text() == "said"
    assert (tmp_path / "new/outputs/newest").read_text() == "weights"
    assert os.readlink(tmp_path / "new/outputs/newest") == "model"


def test_packages_of_live_jobs_are_always_in_it(tmp_path: Path) -> None:
    home = place_at(tmp_path / "home")
    home.database.unlink()
    cluster = Cluster()
    used, other = "a" * 64, "b" * 64
    cluster.ask(Submit(JobSpec(command=("x",), package=used)))
    store = SqliteStore(home.database)
    store.commit(cluster.log, [])
    store.close()
    (home.packages / "of" / "lab").mkdir(parents=True)
    for name in (used, other):
        (home.packages / name).write_text(name)
        os.link(home.packages / name, home.packages / "of" / "lab" / name)
    save(home, tmp_path / "b.tar", (), quiet)
    assert {name for name in names_in(tmp_path / "b.tar") if "packages" in name} == {
        f"packages/{used}",
        f"packages/of/lab/{used}",
    }
    restore(tmp_path / "b.tar", Home(tmp_path / "new"), replace=False, progress=quiet)
    new = tmp_path / "new" / "packages"
    assert (new / used).samefile(new / "of" / "lab" / used)


def test_the_ledger_in_a_backup_is_never_ahead_of_the_log(home: Home, tmp_path: Path) -> None:
    """While both are written, the ledger right behind the log."""
    store, ledger = SqliteStore(home.database), LedgerStore(home.ledger)
    store.load()
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            seq = store.commit([ClockJumped(at_ms=9_000, drift_ms=1, why="x" * 500)], [])
            ledger.put([], b"\x80", seq)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        places = []
        for number in range(4):
            path, new = tmp_path / f"{number}.tar", Home(tmp_path / f"new{number}")
            seq = save(home, path, (), quiet).seq
            restore(path, new, replace=False, progress=quiet)
            with contextlib.closing(sqlite3.connect(new.ledger)) as read:
                row = read.execute("SELECT seq FROM book").fetchone()
            places.append((row[0] if row else 0, seq))
    finally:
        done.set()
        writer.join()
        store.close()
        ledger.close()
    assert all(booked <= seq for booked, seq in places), places
    assert places[-1][1] > places[0][1], "it was written meanwhile"


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_a_backup_that_was_cut_off_is_refused_and_nothing_is_touched(
    saved: Path, tmp_path: Path, part: float
) -> None:
    with tarfile.open(saved) as archive:
        last = archive.getmembers()[-1]
    os.truncate(saved, int((last.offset_data + last.size - 1) * part))
    with pytest.raises(BackupError, match=r"not a backup of Shoal, or it is not complete"):
        restore(saved, Home(tmp_path / "new"), replace=False, progress=quiet)
    assert not (tmp_path / "new").exists()


def test_a_bit_that_changed_is_found_and_its_file_named(saved: Path, tmp_path: Path) -> None:
    with tarfile.open(saved) as archive:
        place = archive.getmember("shoal.db").offset_data + 5_000
    body = bytearray(saved.read_bytes())
    body[place] ^= 1
    saved.write_bytes(body)
    with pytest.raises(BackupError, match=r"damaged: shoal\.db is not what was saved"):
        restore(saved, Home(tmp_path / "new"), replace=False, progress=quiet)
    assert not (tmp_path / "new").exists()


def test_a_backup_of_a_newer_version_is_refused_in_one_line(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(home, tmp_path, lambda one: msgspec.structs.replace(one, version="99.1.0"))
    code = call(["restore", str(tmp_path / "b.tar"), "--home", str(tmp_path / "new")])
    assert code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "was written by shoal 99.1.0, and this is" in line


def rewrite(home: Home, tmp_path: Path, change: object, *more: tarfile.TarInfo) -> None:
    """A backup whose list somebody changed, with more members."""
    save(home, tmp_path / "a.tar", (), quiet)
    with tarfile.open(tmp_path / "a.tar") as old, tarfile.open(tmp_path / "b.tar", "w") as new:
        for info in old.getmembers():
            data = old.extractfile(info)
            assert data is not None
            body = data.read()
            if info.name == backups.MANIFEST:
                for one in more:
                    new.addfile(one, io.BytesIO(b"x" * one.size))
                found = msgspec.json.decode(body, type=backups.Manifest)
                body = msgspec.json.encode(change(found))  # type: ignore[operator]
                info.size = len(body)
            new.addfile(info, io.BytesIO(body))


def test_a_hostile_backup_cannot_write_outside_of_the_home(home: Home, tmp_path: Path) -> None:
    def info(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        made.type, made.linkname = kind, to
        return made

    more = [
        info("../out"),
        info(str(tmp_path / "out")),
        info("way", tarfile.SYMTYPE, ".."),
        info("secrets/way", tarfile.SYMTYPE, "../../.."),
        info("hard", tarfile.LNKTYPE, "../home/token"),
        info("pipe", tarfile.FIFOTYPE),
    ]
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    listed = tuple(backups.Member(one.name, 0, empty) for one in more)
    rewrite(
        home,
        tmp_path,
        lambda one: msgspec.structs.replace(one, members=(*one.members, *listed)),
        *more,
    )
    new = Home(tmp_path / "new")
    done = restore(tmp_path / "b.tar", new, replace=False, progress=quiet)
    assert set(done.left_out) == {one.name for one in more}
    assert not (tmp_path / "out").exists()
    assert not any(os.path.lexists(new.path / name) for name in ("way", "hard", "pipe"))


def test_a_home_that_is_up_or_in_use_is_refused(home: Home, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match=r"is not empty: use another --home, or --replace"):
        restore(saved, home, replace=False, progress=quiet)
    holding = lock(home.supervisor_lock)
    assert holding is not None
    with pytest.raises(BackupError, match=r"a cluster is up in .*; first: shoal down"):
        restore(saved, home, replace=True, progress=quiet)
    os.close(holding)
    other = place_at(tmp_path / "other")
    (other.nodes / "n1" / "agent.lock").touch()
    holding = lock(other.nodes / "n1" / "agent.lock")
    assert holding is not None
    with pytest.raises(BackupError, match="nodes of another cluster run in"):
        restore(saved, other, replace=True, progress=quiet)
    os.close(holding)


def test_what_is_replaced_is_put_aside_and_the_files_of_jobs_and_nodes_stay(
    home: Home, saved: Path
) -> None:
    store = SqliteStore(home.database, Numbers(home.marks))
    _, last = store.load()
    store.commit([ClockJumped(at_ms=9_999, drift_ms=1, why="after the backup")], [])
    store.close()
    given_out = Numbers(home.marks).written
    (home.secrets / "lab" / "LATER").write_text("sealed")
    done = restore(saved, home, replace=True, progress=quiet)
    assert done.aside is not None
    assert (done.aside / "secrets" / "lab" / "LATER").exists()
    with contextlib.closing(sqlite3.connect(done.aside / "shoal.db")) as old:
        assert old.execute("SELECT max(seq) FROM events").fetchone() == (last + 1,)
    assert not (home.secrets / "lab" / "LATER").exists()
    assert (home.secrets / "lab" / "HF").read_text() == "sealed"
    assert (home.nodes / "n1" / "big").exists()
    assert (home.logs / "j1" / "1.0.log").read_text() == "said"
    assert done.first_job == given_out.job, "the marks know which numbers were given out"
    state, seq = SqliteStore(home.database).load()
    assert (seq, state.next_job) == (last + 1, given_out.job)
    assert Numbers(home.marks).floor(state.next_job, state.epoch).first_job >= given_out.job


def test_another_cluster_is_put_aside_with_all_its_files(saved: Path, tmp_path: Path) -> None:
    other = place_at(tmp_path / "other")
    done = restore(saved, other, replace=True, progress=quiet)
    assert done.aside is not None
    assert (done.aside / "logs" / "j1" / "1.0.log").exists()
    assert not (other.logs / "j1").exists()
    assert done.first_job > restoring.JOBS


def test_each_restore_on_another_machine_begins_behind_the_one_before(
    home: Home, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them, heads that nobody here knows of have given out numbers."""
    before, seen = SqliteStore(home.database).load()[0], []
    at_ms = backups.read(saved).saved_ms
    for hours in (0, 5, 50):
        now_ns = (at_ms + hours * 3_600_000) * 1_000_000
        monkeypatch.setattr("time.time_ns", lambda now_ns=now_ns: now_ns)
        new = Home(tmp_path / f"new{hours}")
        restore(saved, new, replace=False, progress=quiet)
        state, _ = SqliteStore(new.database, Numbers(new.marks)).load()
        seen.append((state.epoch, state.next_job, state.restored_attempt, state.next_order))
        assert state.restored_job == state.next_job
        assert Numbers(new.marks).floor(1, 0).first_job == state.next_job + JOBS_AHEAD
    assert seen[0][0] >= before.epoch + 1_000
    assert all(
        a < b for one, two in itertools.pairwise(seen) for a, b in zip(one, two, strict=True)
    )


def test_the_restored_state_is_the_saved_one(home: Home, saved: Path, tmp_path: Path) -> None:
    new = Home(tmp_path / "new")
    restore(saved, new, replace=False, progress=quiet)
    state, before = loaded(new), loaded(home)
    for one in (state, before):
        one.epoch = one.next_job = one.next_order = 1
        one.restored_job = one.restored_attempt = 0
    assert as_bytes(state) == as_bytes(before)
    assert {path.name for path in new.path.iterdir()} >= {"tls", "secrets", "token", "audit.log"}
    for path in new.path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_restore_that_was_interrupted_must_be_repeated_before_the_cluster_comes_up(
    home: Home, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "sync_folder", crash)
        with pytest.raises(KeyboardInterrupt):
            restore(saved, home, replace=True, progress=quiet)
    with pytest.raises(LifecycleError, match=r"interrupted; repeat it with: shoal restore"):
        bring_up(home, None, lambda _: None)
    restore(saved, home, replace=True, progress=quiet)
    assert not home.restoring.exists()
    assert SqliteStore(home.database).load()[1] == backups.read(saved).seq + 1


def test_a_damaged_store_is_reported_in_one_line_and_leaves_no_backup(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(home.database)) as other, other:
        other.execute("UPDATE events SET body = 'x' WHERE seq = 5")
    folder = tmp_path / "backups"
    folder.mkdir()
    assert call(["backup", str(folder), "--home", str(home.path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "shoal.db is damaged (event 5 cannot be read" in line
    assert f"see: shoal salvage --home {home.path}" in line
    assert list(folder.iterdir()) == []


def test_older_backups_are_removed_by_their_names_alone(home: Home, tmp_path: Path) -> None:
    folder, cluster = tmp_path / "backups", home.cluster_id()
    folder.mkdir()
    ours = [f"shoal-{cluster}-2026010{day}T030000Z.tar" for day in range(1, 6)]
    others = ["shoal-00000000-20260101T030000Z.tar", "notes.tar", f"shoal-{cluster}-first.tar"]
    for name in (*ours, *others):
        (folder / name).touch()
    assert call(["backup", str(folder), "--keep", "3", "--home", str(home.path)]) == 0
    left = {path.name for path in folder.iterdir()}
    assert {*others, *ours[3:]} < left
    assert len(left) == len(others) + 3
    assert call(["backup", str(folder / "x.tar"), "--keep", "3", "--home", str(home.path)]) == 2


def test_a_file_of_somebody_else_is_not_overwritten(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert call(["backup", str(tmp_path / "train.py"), "--home", str(home.path)]) == 1
    assert "exists and is not a backup of Shoal" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine"
    os.mkfifo(tmp_path / "pipe")
    assert call(["backup", str(tmp_path / "pipe"), "--home", str(home.path)]) == 1
    assert "exists and is not a backup of Shoal" in capsys.readouterr().err
    assert call(["backup", str(home.path / "logs"), "--home", str(home.path)]) == 1
    assert "is inside of the cluster's home" in capsys.readouterr().err
    again = ["backup", str(tmp_path / "b.tar"), "--home", str(home.path)]
    assert (call(again), call(again)) == (0, 0), "a backup may be replaced"


def test_a_cluster_with_a_database_elsewhere_saves_the_heads_own_files(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_config(ClusterConfig(nodes=(), database="postgresql://u:hidden@db/shoal"))
    assert call(["backup", str(tmp_path / "b.tar"), "--home", str(home.path)]) == 0
    assert "pg_dump" in capsys.readouterr().out
    assert not any(name.endswith(".db") for name in names_in(tmp_path / "b.tar"))
    assert {"tls/ca.key", "token"} < names_in(tmp_path / "b.tar")
    assert call(["restore", str(tmp_path / "b.tar"), "--home", str(tmp_path / "new")]) == 0
    assert "hidden" not in capsys.readouterr().out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "shoal-test", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("where", ["the copy of the store", "the tar file"])
def test_a_full_disk_is_one_line_and_nothing_is_left_on_it(
    home: Home, small_disk: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "the tar file":
        (home.path / "secrets.key").write_bytes(b"x" * (2 << 20))
    else:
        store = SqliteStore(home.database)
        store.load()
        for _ in range(4):
            store.commit([ClockJumped(at_ms=9_000, drift_ms=1, why="x" * 500_000)], [])
        store.close()
    assert call(["backup", str(small_disk), "--home", str(home.path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the disk of {small_disk} is full" in line
    assert list(small_disk.iterdir()) == []


def test_the_commands_of_the_page_work(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
    found = re.findall(r"\bshoal (?:backup|restore) [-\w/.,= ]+", page)
    monkeypatch.setenv("SHOAL_HOME", str(home.path))
    folder = tmp_path / "backups"
    folder.mkdir()
    for text in dict.fromkeys(command.strip() for command in found):
        newest = max(map(str, folder.iterdir()), default="")
        words = re.sub(r"/mnt/backups/shoal-\S+|\bFILE\b", newest, text)
        words = words.replace("/mnt/backups", str(folder))
        if words.startswith("shoal restore") and "--replace" not in words:
            words += f" --home {tmp_path / 'new'}"
        assert call(words.split()[1:]) == 0, words
    assert len(found) >= 7
    assert (tmp_path / "new" / "shoal.db").exists()


def test_the_units_of_the_page_are_sound(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    page = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
    units = re.findall(r"```ini\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in units] == ["shoal-backup.service", "shoal-backup.timer"]
    for name, text in units:
        (tmp_path / name).write_text(text.replace("User=shoal", "User=root"))
    paths = [str(tmp_path / name) for name, _ in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
