"""What each process of a cluster may load: packages of others, rooms of ours, and how many modules.

Real processes say it themselves: an interpreter with PYTHONPROFILEIMPORTTIME writes a line for each
module that it loads or looks for to its standard error: the log of a controller or an agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.waiting import until

from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.engines.agentlink import write_spec
from shoal.machine.files import LINK_FILE
from tests.live.cluster import Live, virtual_nodes

SAY_IMPORTS = "PYTHONPROFILEIMPORTTIME"


class Lean(NamedTuple):
    """`packages` of others and `rooms` of ours, each with a space between them. `most`: as many
    modules, all in all, with those that every Python has."""

    packages: str
    rooms: str
    most: int


HELP = Lean("", "cli forms main", 60)
VERB = Lean("click msgspec typing_extensions", "cli forms main client calls machine model", 260)
STARTER = Lean("", "agent machine", 80)
AGENT = Lean("msgspec typing_extensions pynvml", "agent machine model core link database", 340)
HEAD = Lean(
    "msgspec typing_extensions uvloop uvicorn httptools websockets click watchfiles a2wsgi",
    "agent api calls client control core cron database engines extensions forms head ledger link "
    "machine main model ports tick",
    820,
)
# Of the interpreter's surroundings. `copy` looks for `org`, which is Jython's.
NO_PACKAGE = {
    "_distutils_hack",
    "__mp_main__",
    "cython_runtime",
    "sitecustomize",
    "usercustomize",
    "org",
}


def breaches(lean: Lean, report: str) -> list[str]:
    """What the process has loaded beyond its list."""
    names = dict.fromkeys(re.findall(r"^import time:[^|]*\|[^|]*\| +([\w.]+)$", report, re.M))
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    packages = {
        top
        for top in tops
        if top not in sys.stdlib_module_names | NO_PACKAGE
        and not top.startswith(("_cython", "_sysconfig", "__editable__"))
    }
    rooms = dict.fromkeys(name.split(".")[1] for name in names if name.startswith("shoal."))
    found = [f"the package {one}" for one in packages - {"shoal", *lean.packages.split()}]
    found += [f"shoal.{one}" for one in rooms if one not in lean.rooms.split()]
    assert "site" in names, "the report is there"
    return [*found, *([f"{len(names)} modules"] if len(names) > lean.most else [])]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    home = Home(tmp_path_factory.mktemp("lean") / "home")
    os.environ[SAY_IMPORTS] = "1"
    try:
        bring_up(home, ClusterConfig(nodes=virtual_nodes(1, 1), port=0), lambda _: None)
        live = Live(home)
        assert live.wait(live.run("true")) == "succeeded"
        yield live
        live.client.close()
    finally:
        del os.environ[SAY_IMPORTS]
        take_down(home, lambda _: None)


def command(live: Live, *words: str) -> str:
    env = {**os.environ, "SHOAL_HOME": str(live.home.path)}
    argv = [sys.executable, "-X", "importtime", "-m", "shoal.main", *words]
    run = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=120)
    return run.stderr


def test_the_first_help_page(live: Live) -> None:
    assert breaches(HELP, command(live, "--help")) == []


@pytest.mark.parametrize("words", ["ps -a", "status", "events", "nodes", "why j1", "logs j1"])
def test_a_verb(words: str, live: Live) -> None:
    assert breaches(VERB, command(live, *words.split())) == []


def test_the_supervisor_and_its_controller(live: Live) -> None:
    live.client.status()
    assert breaches(HEAD, live.home.controller_log.read_text()) == []


def test_the_next_controller_loads_nothing_that_the_supervisor_has_not(live: Live) -> None:
    before = len(live.home.controller_log.read_text())
    last = live.kill_controller()
    until(lambda: live.controller_pid() != last)
    live.client.status()
    said = live.home.controller_log.read_text()[before:]
    loaded = re.findall(r"\| +(shoal[\w.]*)$", said, re.M)
    assert loaded in ([], ["shoal.main"]) and "Traceback" not in said


def test_an_agent_that_was_forked_loads_nothing_of_its_own(live: Live) -> None:
    said = (live.home.node("n1") / "agent.log").read_text()
    assert "is up as incarnation" in said
    assert set(re.findall(r"\| +(shoal[\w.]*)$", said, re.M)) <= {
        "shoal.agent",
        "shoal.agent.__main__",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a node on another machine, whose head does not answer."""
    write_spec(tmp_path, virtual_nodes(1, 1)[0])
    return tmp_path


def test_the_keeper_and_agent_of_a_machine_that_joined(folder: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "shoal.agent", str(folder)]
    with (folder / "agent.log").open("w") as output:
        keeper = subprocess.Popen(words, stdout=output, stderr=output)
    until((folder / "agent.json").exists)
    keeper.send_signal(signal.SIGTERM)
    keeper.wait(60)
    assert breaches(AGENT, (folder / "agent.log").read_text()) == []


def test_the_starter_of_a_machine_that_joined(folder: Path) -> None:
    (folder / LINK_FILE).write_text("{}")
    words = [sys.executable, "-X", "importtime", "-m", "shoal.agent.starter", str(folder)]
    with (folder / "starter.log").open("w") as output:
        starter = subprocess.Popen([*words, "--foreground"], stdout=output, stderr=output)
    until(lambda: "starting the agent" in (folder / "starter.log").read_text())
    said = (folder / "starter.log").read_text()
    starter.send_signal(signal.SIGTERM)
    starter.wait(60)
    assert breaches(STARTER, said) == []
