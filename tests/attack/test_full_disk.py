"""A full disk under the controller: nothing new is taken, but what runs can still be ended."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.control import audit
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.marks import Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.model.job import JobSpec, MemberRef
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Cancel, LogChunk, Nothing, SetIntent, Submit
from shoal.ports import StoreError, StoreFull
from tests.api.server import OPERATORS, Server, serving
from tests.control.test_loop import BookEngine, HandClock, Rig

SPEC = JobSpec(command=("true",), env={"FILL": "x" * 5000})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "shoal-test", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def rig_on(place: Path) -> Rig:
    rig = Rig.__new__(Rig)
    rig.store = SqliteStore(place / "db", Numbers(place / "marks"), place / "spare")  # type: ignore[assignment]
    rig.engine = BookEngine()
    logs = LogStore(place / "logs")
    rig.loop = ControlLoop(
        rig.store, rig.engine, HandClock(), Policy(), logs, alarms=rig.store.alarms
    )
    return rig


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def test_on_a_full_disk_cancel_and_drain_work_and_submissions_are_refused(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    rig = rig_on(small_disk)
    assert (small_disk / "spare").stat().st_size == 1 << 20

    async def work() -> None:
        jobs = [await rig.loop.request(Submit(SPEC)) for _ in range(60)]
        fill(small_disk / "junk")

        async def submit_on() -> None:
            for _ in range(2_000):
                await rig.loop.request(Submit(SPEC))

        with pytest.raises(StoreFull, match="free some space"):
            await submit_on()
        assert "is full" in rig.loop.alarms.texts[0]
        for job in jobs[:50]:
            assert isinstance(job, Accepted)
            assert isinstance(await rig.loop.request(Cancel(job.id)), Accepted)
        await rig.loop.request(SetIntent("n1", NodeIntent.DRAINING))
        (small_disk / "junk").unlink()
        await rig.loop.request(SetIntent("n1", NodeIntent.OPEN))
        await rig.loop.request(Nothing())
        assert rig.loop.alarms.texts == ()
        assert isinstance(await rig.loop.request(Submit(SPEC)), Accepted)

    rig.run(work())
    rig.store.close()
    assert SqliteStore(small_disk / "db").load()[0].jobs


def test_a_home_that_cannot_be_written_is_told_in_one_line(small_disk: Path) -> None:
    SqliteStore(small_disk / "db").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="check its owner and the disk") as told:
        SqliteStore(small_disk / "db", Numbers(small_disk / "marks"), small_disk / "spare")
    assert "\n" not in str(told.value)


def test_at_the_api_a_full_disk_is_507_loses_nothing_and_ends_by_itself(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an upload, a log, an audit line, a token and a submission."""
    monkeypatch.setattr("shoal.control.packages.SPARE_BYTES", 0)
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0.01)
    monkeypatch.setattr("shoal.control.audit.RETRY_S", 0.05)
    home = small_disk / "home"
    with serving(home) as server:
        server.tenant("red")
        ann = server.token("ann", "red")
        junk = small_disk / "junk"
        accepted = [_submit(server, OPERATORS, number) for number in range(20)]
        assert all(accepted)
        data = os.urandom(1 << 20)
        package = f"/v1/packages/{hashlib.sha256(data).hexdigest()}"
        fill(junk)
        reply = server.call(OPERATORS, "PUT", package, data)
        assert (reply.status, "disk" in reply.message or "No space" in reply.message) == (507, True)
        assert not list(home.glob("packages/.*.part")), "nothing of it is left"
        for number in range(20, 2_000):
            accepted.append(_submit(server, OPERATORS, number))
            if not accepted[-1]:
                break
        refused = server.call(OPERATORS, "POST", "/v1/jobs", {"spec": {"command": ["true"]}})
        assert (refused.status, "free some space" in refused.message) == (507, True)
        made = server.call(OPERATORS, "POST", "/v1/tokens", {"user": "ann", "tenant": "red"})
        assert made.status in (201, 507), made.body
        chunk = LogChunk(MemberRef("j1", 1, 0), 0, b"x" * 100_000)
        kept = server.run(lambda: server.loop.log(chunk))
        assert kept == 0, "its node keeps it"
        assert server.call(ann, "GET", "/v1/jobs").status == 200, "whoever reads is answered"
        junk.unlink()
        until(lambda: bool(_submit(server, ann, 5_000)), "by itself")
        assert server.call(OPERATORS, "PUT", package, data).status == 200
        assert server.run(lambda: server.loop.log(chunk)) == 100_000
        until(lambda: server.loop.alarms.texts == ())
        if made.status == 201:
            token = msgspec.json.decode(made.body)["secret"]
            assert server.call(token, "GET", "/v1/jobs").status == 200, "a token that was shown"
        stored = {job.id for job in server.loop.tick.state.jobs.values()}
    assert {job for job in accepted if job} <= stored | {"j1"}
    assert set(SqliteStore(home / "shoal.db").load()[0].jobs) >= {job for job in accepted if job}
    audit.verify(home / audit.AUDIT_NAME)


def _submit(server: Server, token: str, number: int) -> str:
    """The job's id, or nothing if it was refused."""
    spec = {"command": ["true"], "gpus": 4, "env": {"FILL": "x" * 5000}}
    body = {"spec": spec, "key": f"k{number}"}
    reply = server.call(token, "POST", "/v1/jobs", body)
    assert reply.status in (201, 503, 507), reply.body
    return str(msgspec.json.decode(reply.body)["id"]) if reply.status == 201 else ""
