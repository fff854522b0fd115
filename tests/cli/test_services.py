"""The verbs about services, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.cli.request import assemble
from shoal.cli.verbs.services import _unexpanded
from shoal.client import ShoalError
from shoal.forms.request import SERVICE
from shoal.model.service import Routing
from shoal.model.views import ServiceView
from tests.cli.conftest import Result, Shoal, assert_one_clear_line
from tests.gateway.world import ROOT, get
from tests.live.cluster import Live
from tests.live.serving import Serving, serving_cluster

REPLICA = f"exec {sys.executable} -m tests.gateway.replica $PORT"
NO_BROWSER = "a page with absolute links needs --path /chat, --port or --host"
FLAGS = ("--cpus", "0.1", "--workdir", str(ROOT))


@pytest.fixture(scope="module")
def serving_home() -> Iterator[Live]:
    with serving_cluster() as live:
        yield live


@pytest.fixture
def at_home(shoal: Shoal, serving_home: Live) -> Shoal:
    return lambda *args: shoal(*args, home=serving_home.home.path)


def serve(shoal: Shoal, name: str, script: str, *flags: str) -> Result:
    return shoal("serve", name, *FLAGS, *flags, "--", "sh", "-c", script)


def stop(live: Live, name: str) -> None:
    live.client.stop_service(name)
    until(Serving(live, name).gone)


def last_line(result: Result) -> str:
    return result.err.splitlines()[-1]


def test_a_service_from_its_start_to_its_end(at_home: Shoal, serving_home: Live) -> None:
    assert at_home("services") == (
        0,
        "",
        "no services yet; start one with: shoal serve NAME -- COMMAND\n",
    )
    result = serve(at_home, "chat", f"echo hello; {REPLICA} v1", "--replicas", "2", "--gpus", "1")
    assert result.code == 0, result.err
    url = result.out.strip()
    assert "chat is starting, 0 of 2 ready" in result.err
    port = int(url.split(":")[2].split("/")[0])
    assert (url, get(port, "/chat/").body) == (f"http://127.0.0.1:{port}/chat/", "v1")

    listing = at_home("services").out.splitlines()
    assert listing[0].split()[:4] == ["NAME", "STATE", "READY", "VERSION"]
    assert listing[1].split()[:4] == ["chat", "ready", "2/2", "1"]
    assert listing[1].split()[-1] == url
    assert json.loads(at_home("services", "--json").out)[0]["name"] == "chat"

    whole = at_home("service", "chat").out
    assert whole.startswith("chat is ready\n")
    assert "version 1: 2 replicas with 1 GPU, 0.1 CPUs" in whole
    assert "service chat starts version 1" in whole
    assert "2 of 2 ready" in whole
    view = json.loads(at_home("service", "chat", "--json").out)
    assert [replica["state"] for replica in view["replicas"]] == ["ready", "ready"]

    assert at_home("logs", "chat").out.startswith("hello\n")
    assert at_home("why", "chat").out.startswith("chat is ready\n")
    node = view["replicas"][0]["node"]
    told = at_home("why", node).out
    assert told.startswith(f"node {node} is ready\n")
    assert "jobs there: " in told
    unknown = at_home("why", "nobody").err
    assert "there is no job, service, node, user or tenant named nobody" in unknown

    assert at_home("service", "chat", "--stop") == (0, "chat is being stopped\n", "")
    until(Serving(serving_home, "chat").gone)
    assert "there is no job or service named chat" in at_home("logs", "chat").err
    for args in (["service", "chat"], ["service", "chat", "--stop"]):
        result = at_home(*args)
        assert_one_clear_line(result)
        assert "there is no service chat; there are no services yet" in result.err


def test_a_version_that_fails_is_told_and_the_old_one_stays(
    at_home: Shoal, serving_home: Live
) -> None:
    assert serve(at_home, "roll", f"{REPLICA} v1").code == 0
    result = serve(at_home, "roll", "exit 3")
    assert (result.code, result.out) == (1, "")
    assert last_line(result).startswith("error: roll is version 1, not 2: version 2 failed 3 times")
    assert "it exited 3" in last_line(result)
    result = serve(at_home, "roll", f"{REPLICA} v3")
    assert result.code == 0, result.err
    assert at_home("services").out.splitlines()[1].split()[3] == "3"
    told = "roll goes back: version 4 is being rolled out\n"
    assert at_home("service", "roll", "--rollback") == (0, told, "")
    assert serving_home.client.service("roll").spec.replica.command[-1].endswith("v1")
    stop(serving_home, "roll")


def test_a_service_that_cannot_start_is_told(at_home: Shoal, serving_home: Live) -> None:
    result = serve(at_home, "never", "exit 3")
    assert (result.code, result.out) == (1, "")
    assert last_line(result).startswith("error: never is failing: j")
    assert last_line(result).endswith("it exited 3")
    stop(serving_home, "never")


def test_what_no_node_has_is_refused_at_once(at_home: Shoal) -> None:
    result = serve(at_home, "huge", "true", "--gpus", "200")
    assert_one_clear_line(result)
    assert "error: gpus: " in result.err


def test_an_interrupt_leaves_the_service_alone(serving_home: Live) -> None:
    command = [sys.executable, "-m", "shoal.main", "serve", "slow", *FLAGS, "--probe", "/hang"]
    with subprocess.Popen(
        [*command, "--", "sh", "-c", f"{REPLICA} v1"],
        env={**os.environ, "SHOAL_HOME": str(serving_home.home.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("slow is starting")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "[slow keeps running; see: shoal service slow]"
    assert serving_home.client.service("slow").state == "starting"
    stop(serving_home, "slow")


def test_without_waiting_it_returns_at_once(at_home: Shoal, serving_home: Live) -> None:
    result = serve(at_home, "later", f"{REPLICA} v1", "--no-wait", "--json")
    view = json.loads(result.out)
    assert (result.code, view["name"], view["version"], view["ready"]) == (0, "later", 1, 0)
    stop(serving_home, "later")
    with pytest.raises(ShoalError):
        serving_home.client.service("later")


def test_the_command_keeps_its_own_flags_and_ours_may_stand_anywhere(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def build(form: object, words: list[str], flags: dict[str, object], from_words: object) -> None:
        seen.append([*words, f"port={flags['port']}", f"gpus={flags['gpus']}"])
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.request.assemble", build)
    command = ["python", "server.py", "--port", "3"]
    shoal("serve", "chat", "-g", "1", "--", *command)
    shoal("serve", "-g", "1", "chat", "--", *command)
    shoal("serve", "-g", "1", "chat", *command)
    shoal("serve", "-g", "1", "--", "chat", *command)
    assert seen == [["chat", *command, "port=None", "gpus=1"]] * 4
    shoal("serve", "service.yaml", "-g", "1", "--port", "3")
    assert seen[-1] == ["service.yaml", "port=3", "gpus=1"]


def test_the_example_is_a_service_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / "serve" / "service.yaml"
    spec = assemble(SERVICE, [str(file)], {"replicas": "2", "env": ["CHECKPOINT=/x"]}).spec
    assert (spec.name, spec.scale.least, spec.scale.most) == ("chat", 2, 2)
    assert (spec.way.routing, spec.way.concurrency) == (Routing.PREFIX, 4)
    assert spec.replica.workdir == str(file.parent)
    assert spec.replica.env["CHECKPOINT"] == "/x"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("python", "-m", "http.server", "$PORT"), True),
        (("vllm", "serve", "--port=${PORT}"), True),
        (("sh", "-c", "exec python -m http.server $PORT"), False),
        (("/bin/bash", "-c", "serve $PORT"), False),
        (("python", "server.py"), False),
    ],
)
def test_a_port_that_no_shell_will_fill_in_is_noticed(
    command: tuple[str, ...], found: bool
) -> None:
    assert _unexpanded(command) is found


@pytest.mark.parametrize(
    ("browser", "lines"),
    [
        ("http://chat.localhost:1/", ["in a browser: http://chat.localhost:1/", "for programs: U"]),
        ("U", ["in a browser: U"]),
        ("", ["for programs: U", NO_BROWSER]),
    ],
)
def test_at_a_terminal_the_url_for_browsers_comes_first(
    browser: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.cli.screen import show
    from shoal.cli.verbs.services import _print

    shown: list[str] = []
    monkeypatch.setattr(show, "at_terminal", lambda: True)
    monkeypatch.setattr(show, "line", lambda text, *_: shown.append(text))
    numbers = dict.fromkeys(
        ("version", "least", "most", "wanted", "ready", "in_flight", "queued", "response_ms"), 1
    )
    replica = {"name": "chat", "replica": {"command": ["true"]}}
    view = msgspec.convert(
        {**numbers, "name": "chat", "state": "ready", "url": "U", "browser_url": browser}
        | {"requests_per_s": 0.0, "failed_per_s": 0.0, "why": "", "replicas": [], "spec": replica},
        ServiceView,
    )
    _print(view, json=False)
    assert shown == ["chat is ready", *lines, "look at it with: shoal service chat"]
