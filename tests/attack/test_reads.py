"""Long lists and replays: nobody waits for another's, and nothing of them outlives a controller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.api.jobs import Jobs
from shoal.api.principal import THE_OPERATOR
from shoal.api.reach import Reach
from shoal.api.simulate import BOUND, FOLDER, Simulator
from shoal.api.views import status_view
from shoal.control.store.sqlite import SqliteStore
from shoal.model.finding import EVERY_JOB
from shoal.model.job import Job
from shoal.model.report import Nothing, Submit
from shoal.model.views import JobRow
from tests.control.test_loop import SPEC, Rig
from tests.control.test_sqlite_store import history
from tests.live.cluster import all_pids

CLIENTS = 16


def test_the_loop_answers_while_long_lists_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    for done in history(30)[1]:
        rig.store.commit(done.events, done.finished)
    rig.loop.tick.load()
    go_on, real = threading.Event(), SqliteStore.finished

    def slow(store: SqliteStore, limit: int, **rest: Any) -> list[Job]:
        assert go_on.wait(60)
        return real(store, limit, **rest)

    monkeypatch.setattr(SqliteStore, "finished", slow)

    async def work() -> None:
        ask, reach = Jobs.listing.fn, Reach(rig.loop, THE_OPERATOR)
        lists: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(ask(None, reach, EVERY_JOB, finished=True, limit=10_000))
            for _ in range(CLIENTS)
        ]
        await rig.loop.request(Submit(SPEC))
        await rig.loop.request(Nothing())
        assert status_view(reach).submitted == 32
        assert not any(one.done() for one in lists), "they are still being read"
        go_on.set()
        for one in lists:
            rows = msgspec.json.decode((await one).content, type=list[JobRow])
            assert len(rows) == len({row.id for row in rows}) >= 31

    rig.run(work())


def test_a_replay_dies_with_its_controller(tmp_path: Path) -> None:
    waits = (
        BOUND.partition("from shoal.cli.app")[0] + "print('bound', flush=True)\nsys.stdin.read()"
    )
    parent = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-c', sys.argv[1], str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", parent, waits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        said = {controller.stdout.readline().strip(), controller.stdout.readline().strip()}
        (replay,) = (int(word) for word in said if word != "bound")
        assert replay in all_pids()
        controller.kill()
        until(lambda: replay not in all_pids())


def test_what_a_replay_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "left").mkdir(parents=True)
    Simulator(Rig(tmp_path).loop, tmp_path)
    assert not (tmp_path / FOLDER).exists()
