"""A notebook on the cluster: started, used in a real browser, left alone, put away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.waiting import until

from tests.live.cluster import MARK, Live
from tests.needs import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

need("jupyterlab")

WAIT_S = 120
WAIT_MS = WAIT_S * 1000
CELL = "import os\nprint(6 * 7, 'on', os.environ['SHOAL_NODE'])"
NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": "one",
            "metadata": {},
            "outputs": [],
            "source": CELL,
        }
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "a.ipynb").write_text(json.dumps(NOTEBOOK))
    (made / "notes.txt").write_text("as sent\n")
    (made / "both.txt").write_text("as sent\n")
    return made


class Dev:
    """`shoal dev` in a folder, with a home of its own for what Jupyter keeps there."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"HOME": str(folder.parent), "XDG_CONFIG_HOME": str(folder.parent / "config")}
        self._env = {**os.environ, **own, "PATH": path, "SHOAL_HOME": str(live.home.path)}
        self._flags = [f"--env=HOME={folder.parent}", f"--env={MARK}={live.home.path}"]

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "shoal.main", "dev", *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def connected(self, *words: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
        """Where it is, and the command that holds the connection."""
        flags = [] if words[:1] == ("open",) else self._flags
        with (self.folder.parent / "errors").open("a") as errors:
            process = subprocess.Popen(
                self.words(*words, *flags, "--no-browser", "--json"),
                cwd=self.folder,
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (self.folder.parent / "errors").read_text()
            yield json.loads(line), process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def errors(self) -> str:
        return (self.folder.parent / "errors").read_text()


@pytest.fixture
def dev(live: Live, folder: Path) -> Dev:
    return Dev(live, folder)


@contextmanager
def somebody_writes(place: Path) -> Iterator[None]:
    """Which counts as use: the machine may take its time."""
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.5):
            place.touch()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run_cell(page: Page, url: str) -> str:
    """What the cell of the notebook prints, through the link."""
    page.goto(url.replace("/lab?", "/lab/tree/a.ipynb?"), timeout=WAIT_MS)
    page.get_by_text("| Idle").wait_for(timeout=WAIT_MS)
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    output = page.locator(".jp-OutputArea-output").first
    output.wait_for(timeout=WAIT_MS)
    return output.inner_text()


def ended(process: subprocess.Popen[str], live: Live, job: str, url: str) -> int:
    """Its exit status. If it does not end, what everybody thinks goes on."""
    try:
        return process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        kernels = url.replace("/lab?", "/api/kernels?no_track_activity=1&")
        with urllib.request.urlopen(kernels, timeout=WAIT_S) as answer:
            told = answer.read().decode()
        pytest.fail(f"it is not put away: {live.client.job(job)}\n{live.output(job)}\n{told}")


def test_a_notebook_is_used_through_its_link_and_put_away_when_nobody_uses_it(
    live: Live, browser: Browser, dev: Dev
) -> None:
    """A page that stays open does not keep it."""
    with dev.connected("-g", "1", "--idle", "6s") as (found, process):
        job = found["job"]
        with ExitStack() as stack:
            with somebody_writes(dev.folder / "notes.txt"):
                again, _ = stack.enter_context(dev.connected("open", "dev"))
                page = stack.enter_context(browser.new_page())
                assert dev.run("list").splitlines()[1].split()[:3] == ["dev", job, "running"]
                live.kill_controller()
                said = run_cell(page, again["url"])
            assert re.fullmatch(rf"42 on {found['node']}\s*", said)
            assert ended(process, live, job, again["url"]) == 0, dev.errors()
    view = live.client.job(job)
    assert view.state == "succeeded"
    assert found["url"].partition("token=")[2] not in live.output(job), "its output has the token"
    assert view.why == "every member exited 0: nobody has used it for 6s"
    assert "no dev environment" in dev.run("list")


def test_files_that_change_there_come_back_and_replace_nothing_that_changed_here(
    live: Live, dev: Dev
) -> None:
    """As on other machines: the folder is sent."""
    with dev.connected("--pack", "--name", "far", "--idle", "0") as (found, _):
        job, node = found["job"], found["node"]
        work = live.home.node(node) / "members" / f"{job}.1.0" / "work"
        (work / "notes.txt").write_text("changed there\n")
        (work / "new").mkdir()
        (work / "new" / "plot.txt").write_text("new\n")
        (dev.folder / "both.txt").write_text("changed here\n")
        (work / "both.txt").write_text("changed there, too\n")
        beside = dev.folder / f"both.from-{job}.txt"
        until(lambda: beside.exists(), more=lambda: dev.errors())
        until(lambda: (dev.folder / "new" / "plot.txt").exists())
        until(lambda: (dev.folder / "notes.txt").read_text() == "changed there\n")
        assert (dev.folder / "both.txt").read_text() == "changed here\n"
        assert beside.read_text() == "changed there, too\n"
        assert "both.txt has changed here, too" in dev.errors()
    (work / "notes.txt").write_text("and later\n")
    assert "far is stopped" in dev.run("stop", "far")
    assert (dev.folder / "notes.txt").read_text() == "and later\n"
    assert live.client.job(job).state == "cancelled"


def test_without_jupyterlab_one_line_says_what_to_do(live: Live, dev: Dev) -> None:
    done = subprocess.run(
        dev.words("--env=PATH=/usr/bin:/bin"),
        cwd=dev.folder,
        env=dev._env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 1
    assert "pip install jupyterlab" in done.stderr.splitlines()[-1]
