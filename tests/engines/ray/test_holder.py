"""What a holder starts is not Ray's, and is found again by its mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import WAIT_S, until

from shoal.engines.ray import holder

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def order() -> str:
    return f"o{os.getpid()}"


def test_it_outlives_its_parent_and_has_a_session_of_its_own(tmp_path: Path, order: str) -> None:
    mark = f"test/{order}"
    env = {holder.MARK: mark, "SHOAL_HOME": str(tmp_path)}
    (tmp_path / holder.ASK).write_text(json.dumps({"name": "mine"}))
    argv = [sys.executable, "-c", SLEEP, "join"]
    script = "import sys; from shoal.engines.ray.holder import start_detached as s; "
    script += (
        "from pathlib import Path; print(s(sys.argv[4:], eval(sys.argv[1]), Path(sys.argv[2])))"
    )
    run = [sys.executable, "-c", script, repr(env), str(tmp_path / "log"), "--", *argv]
    pid = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    try:
        assert os.getsid(pid) not in (os.getsid(0), os.getpid())
        assert holder.top_of(mark) == pid
        assert holder.marked(mark) == [pid]
        assert holder.orders_here("test")[order] == {"name": "mine"}
        assert holder.end_order("test", order) == 1
        until(lambda: not holder.marked(mark))
    finally:
        holder.end_order("test", order)
    assert holder.end_order("test", order) == 0


@pytest.fixture
def ask(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """For a program that stands in for the starter. There is no Ray to ask about its node, and what
    a holder does last, to end its process, would end the test's: it has done that before the test
    is over."""
    gone = threading.Event()
    monkeypatch.setattr(holder, "gpu_ids", list)
    monkeypatch.setattr(holder, "node_labels", dict)
    monkeypatch.setattr(holder, "LOOK_S", 0.01)
    monkeypatch.setattr(holder, "READ_WITHIN_S", 0)
    monkeypatch.setattr(os, "_exit", lambda _: gone.set())
    plan = {
        "cluster": "test",
        "order": order,
        "home": str(tmp_path / "home"),
        "python": sys.executable,
        "arguments": ["-c", SLEEP, "join"],
        "labels": {},
        "environment": {},
    }
    yield {"again": False, "plan": plan}
    assert gone.wait(WAIT_S)


def test_an_order_that_is_released_before_its_agent_starts_never_starts_it(
    ask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, go_on = threading.Event(), threading.Event()

    def look(_: str) -> None:
        looked.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(holder, "top_of", look)
    monkeypatch.setattr(holder, "start_detached", lambda *_: pytest.fail("it was started"))
    held = holder.Holder(ask)
    assert looked.wait(WAIT_S)
    held.end()
    go_on.set()
    until(lambda: held.status()["ended"])
    assert held.status() == {"ended": True, "reason": "", "failed": False}


def test_an_order_that_is_released_while_its_agent_starts_ends_it(
    ask: dict[str, Any], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter that detaches it carries the mark, too, and is gone a moment later."""
    really_start, detaching, go_on = holder.start_detached, threading.Event(), threading.Event()

    def start(*words: Any) -> int:
        detaching.set()
        assert go_on.wait(WAIT_S)
        return really_start(*words)

    monkeypatch.setattr(holder, "start_detached", start)
    held = holder.Holder(ask)
    assert detaching.wait(WAIT_S)
    held.end()
    go_on.set()
    try:
        until(lambda: held.status()["ended"])
        assert holder.marked(f"test/{order}") == []
        assert not held.status()["failed"]
    finally:
        holder.end_order("test", order)


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid = holder.start_detached(["/no/such/python"], {}, log)
    until(lambda: not holder.alive(pid))
    assert holder.last_line(log) == "error: cannot start /no/such/python: No such file or directory"


def test_the_last_error_is_the_reason_and_else_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert holder.last_line(log) == ""
    log.write_text("joined\n\nleft   the cluster\n\n")
    assert holder.last_line(log) == "left the cluster"
    log.write_text("error: no token\ngood bye\n")
    assert holder.last_line(log) == "error: no token"


def test_rays_labels_and_resources_become_labels() -> None:
    node = {
        "Labels": {"ray.io/node-id": "abc", "pool": "a", "ray.io/market-type": "spot"},
        "Resources": {
            "CPU": 4.0,
            "GPU": 8.0,
            "memory": 1e9,
            "object_store_memory": 1e9,
            "node:10.0.0.1": 1.0,
            "accelerator_type:H100": 1.0,
            "fast-disk": 2.0,
        },
    }
    found = holder.labels_of(node)
    assert found == {
        "pool": "a",
        "ray.io/market-type": "spot",
        "ray.io/accelerator-type": "H100",
        "ray.io/resource-fast-disk": "2",
    }
    flags = holder.label_flags(found, {"pool": "mine"})
    assert "pool=mine" in flags
    assert "pool=a" not in flags


def test_rays_variables_do_not_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("KEPT", "yes")
    assert holder.clean_environment()["KEPT"] == "yes"
    assert not {"RAY_JOB_ID", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & {
        *holder.clean_environment()
    }
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    assert "KEPT" not in holder.clean_environment()  # this process was started without it
