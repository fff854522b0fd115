"""`shoal check`: this machine by itself, and nodes through the API."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.client import SOCKET_NAME, Address
from shoal.model.health import CheckResult, Stand, Verdict
from shoal.model.views import CheckView
from tests.cli.conftest import Shoal, assert_one_clear_line

VERDICTS = {
    "n1": Verdict(
        passed=True,
        why="1 figures as expected",
        stands=(Stand(figure="memory_mbs", value=990, usual=1000, limit=700, of=3),),
    ),
    "n2": Verdict(
        passed=False,
        why="memory_mbs is 200; 3 others of its kind measured 1000",
        stands=(Stand(figure="memory_mbs", value=200, usual=1000, limit=700, of=3, low=True),),
    ),
}


class Api(http.server.BaseHTTPRequestHandler):
    """The part of the API that the verb needs; a check is under way until it is asked for."""

    def do_POST(self) -> None:
        node = self.path.split("/")[3]
        self._answer(CheckView(node=node, id="c1"), 200 if node in VERDICTS else 404)

    def do_GET(self) -> None:
        if self.path == "/v1/nodes":
            self._answer([], 200)
            return
        assert self.path.split("?")[0].endswith("/checks/c1")
        node = self.path.split("/")[3]
        self._answer(
            CheckView(node=node, id="c1", took_ms=2500, busy=True, verdict=VERDICTS[node]), 200
        )

    def _answer(self, value: object, status: int) -> None:
        body = msgspec.json.encode(value if status == 200 else {"message": "there is none"})
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    server = Server(str(tmp_path / SOCKET_NAME), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = Address(url="http://127.0.0.1:1", pid=1, socket=str(tmp_path / SOCKET_NAME))
    (tmp_path / "controller.json").write_bytes(msgspec.json.encode(address))
    (tmp_path / "token").write_text("secret")
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_this_machine_is_measured_without_a_cluster(shoal: Shoal) -> None:
    result = shoal("check", "--here", "--json")
    assert result.code in (0, 1)
    found = msgspec.json.decode(result.out, type=CheckResult)
    assert found.figures["cpu_one_mbs"] > 0
    assert result.code == (1 if found.faults else 0)


def test_a_healthy_node_is_compared_with_similar_nodes(shoal: Shoal, home: Path) -> None:
    result = shoal("check", "n1", home=home)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "n1: ok, 1 figures as expected (2.5 s, while jobs ran)"
    assert lines[1].split() == ["FIGURE", "HERE", "USUAL", "LIMIT", "COMPARED-WITH"]
    assert lines[2].split() == ["memory_mbs", "990", "1000", "700", "3", "similar", "nodes"]


def test_one_that_fails_among_several_makes_the_command_fail(shoal: Shoal, home: Path) -> None:
    result = shoal("check", "n1", "n2", "n1", "--json", home=home)
    assert result.code == 1
    assert [view["verdict"]["passed"] for view in json.loads(result.out)] == [True, False]
    assert "n2: FAILED, memory_mbs is 200" in shoal("check", "n2", home=home).out


def test_what_cannot_be_checked_is_said_in_one_line(shoal: Shoal, home: Path) -> None:
    for args in (["check", "n9"], ["check", "N 9"], ["check", "--here", "n1"]):
        assert_one_clear_line(shoal(*args, "--json", home=home))
    assert_one_clear_line(shoal("check", "n1"))
