"""What runs on an instance: it joins with what the metadata service says, and nobody but root may
ask that service."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.engines.ec2 import machine
from shoal.engines.ec2.machine import Metadata, join_argv, keep_tenants_away, notice
from shoal.engines.ec2.options import Options
from shoal.engines.ec2.render import Settings, user_data
from shoal.model.supply import Provision, Supply
from tests.needs import need_program, need_root

ABOUT = {"ec2.instance": "i-1", "ec2.type": "g5.xlarge", "ec2.zone": "us-east-1a", "ec2.market": ""}


def settings(**fields: object) -> Settings:
    told = {"url": "https://head:7700", "token": "shoal_0_t", "order": "o1", "supply": "gpu"}
    return Settings(**{**told, "nodes": ("gpu-1",), "folder": "/x", **fields})  # type: ignore[arg-type]


@contextmanager
def metadata_service(answers: dict[str, str]) -> Iterator[str]:
    """Version 2: no answer without a session. Changes of `answers` count."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._send(200 if self.path == "/latest/api/token" else 404, "session")

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] != "session":
                self._send(401, "")
                return
            found = answers.get(self.path.removeprefix("/latest/meta-data/"))
            self._send(404 if found is None else 200, found or "")

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_it_joins_with_what_the_supply_and_the_machine_say() -> None:
    told = settings(gpus=8, gpu_model="A10G", gpu_memory_mb=24_000, labels={"a": "b"})
    argv = join_argv(told, "gpu-1", ABOUT, 1_800_000_000)[3:]
    assert argv == [
        *("join", "https://head:7700", "--foreground", "--home", "/x", "--name", "gpu-1"),
        *("--origin", "gpu", "--order", "o1", "--gpus", "8", "--gpu-model", "A10G"),
        *("--gpu-memory", "24000M", "--place", "us-east-1a", "--label", "ec2.instance=i-1"),
        *("--label", "ec2.type=g5.xlarge", "--label", "ec2.zone=us-east-1a"),
        *("--label", "ec2.market=", "--label", "a=b", "--ends-at", "1800000000"),
    ]
    assert "shoal_0_t" not in argv


def test_the_metadata_service_is_asked_with_a_session() -> None:
    with metadata_service({"instance-id": "i-1"}) as base:
        metadata = Metadata(base)
        assert metadata.ask("instance-id") == "i-1"
        assert metadata.ask(machine.NOTICE) == ""


def test_a_notice_says_when_it_ends() -> None:
    at_s, why = notice('{"action": "terminate", "time": "2026-11-19T08:22:00Z"}')
    assert at_s == datetime.datetime(2026, 11, 19, 8, 22, tzinfo=datetime.UTC).timestamp()
    assert why == "EC2 spot notice: terminate"
    with pytest.raises((ValueError, KeyError)):
        notice(json.dumps({"action": "terminate"}))


@pytest.mark.parametrize("works", ["iptables", "nft", ""])
def test_only_root_may_ask_the_metadata_service(
    works: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("iptables", "nft"):
        code = 0 if name == works else 1
        program(
            tmp_path,
            name,
            f'echo "{name} $*" >>{tmp_path}/said; cat >>{tmp_path}/said; exit {code}',
        )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert keep_tenants_away() is bool(works)
    said = (tmp_path / "said").read_text()
    assert "-d 169.254.169.254 -m owner ! --uid-owner 0 -j REJECT" in said
    assert ("ip daddr 169.254.169.254 meta skuid != 0 reject" in said) is (works != "iptables")


# -- the user data ---------------------------------------------------------------------------------


def booted(folder: Path, python: str, **words: str) -> subprocess.Popen[bytes]:
    """A machine that starts, with programs of ours in place of its own."""
    program(folder, "python", python)
    program(folder, "shutdown", f'echo "shutdown $*" >>{folder}/said')
    supply = Supply(name="gpu", engine="ec2", lasts_ms=90_000)
    command = Provision(order="o1", supply=supply, nodes=("gpu-1",))
    told = {"image": "ami-1", "types": ["a.1"], "python": f"{folder}/python", **words}
    (folder / "user-data").write_text(
        user_data(command, msgspec.convert(told, Options), "https://head:7700", "shoal_0_t")
    )
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(["sh", f"{folder}/user-data", "node"], env={"PATH": path})


def said(folder: Path) -> list[str]:
    path = folder / "said"
    return path.read_text().splitlines() if path.exists() else []


def test_a_machine_is_switched_off_when_its_node_has_ended(tmp_path: Path) -> None:
    machine = booted(tmp_path, f"cat >{tmp_path}/told; echo $0 >>{tmp_path}/said")
    assert machine.wait(WAIT_S) == 0
    assert said(tmp_path) == ["shutdown -P +2", f"{tmp_path}/python", "shutdown -P now"]
    assert msgspec.json.decode((tmp_path / "told").read_bytes(), type=Settings).order == "o1"


def test_a_machine_that_is_shut_down_lets_its_node_end_first(tmp_path: Path) -> None:
    works = f"trap 'echo left >>{tmp_path}/said; exit' TERM; echo up >>{tmp_path}/said"
    machine = booted(tmp_path, f"{works}; while :; do sleep 0.05; done")
    until(lambda: "up" in said(tmp_path), "the node to start")
    machine.terminate()
    machine.wait(WAIT_S)
    assert said(tmp_path) == ["shutdown -P +2", "up", "left", "shutdown -P now"]


def test_a_machine_whose_setup_fails_starts_no_node(tmp_path: Path) -> None:
    machine = booted(tmp_path, f"echo up >>{tmp_path}/said", setup="false\ntrue")
    machine.wait(WAIT_S)
    assert said(tmp_path) == ["shutdown -P +2", "shutdown -P now"]


ASKED_BY = """
import os, socket, subprocess
from shoal.engines.ec2.machine import keep_tenants_away
for words in ("link set lo up", "addr add 169.254.169.254/32 dev lo"):
    subprocess.run(["ip", *words.split()], check=True)
service = socket.create_server(("169.254.169.254", 80))
assert keep_tenants_away()
for user in (0, 61000):
    asks = os.fork()
    if not asks:
        os.setuid(user)
        try:
            socket.create_connection(("169.254.169.254", 80), timeout=60)
        except ConnectionRefusedError:
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(asks, 0)[1]))
"""


def test_the_kernel_keeps_the_users_of_tenants_from_the_metadata_service() -> None:
    need_root()
    need_program("iptables")
    need_program("ip")
    command = ["unshare", "--net", sys.executable, "-c", ASKED_BY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"no network namespace, or no iptables there: {done.stderr.strip()}")
    assert done.stdout.split() == ["0", "1"], done.stderr
