"""The proxy outlives who started it, is found again, and is started again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness.ports import free_port
from harness.waiting import until

from shoal.gateway import process
from shoal.gateway.binary import CHOICE, GatewayError, find_binary, holders
from shoal.gateway.gateway import Gateway
from shoal.machine.files import held
from shoal.model.service import GatewayEntry, Route, Served, Wanted
from tests.gateway.world import ROOT, Clients, World, raw

CHAT = Route(service="chat", concurrency=8)

OWNER = """
import sys, time
from pathlib import Path
import msgspec
from shoal.gateway.gateway import Gateway
from shoal.gateway.binary import holders
from shoal.model.service import Wanted
gateway = Gateway(Path(sys.argv[1]))
gateway.apply(msgspec.json.decode(sys.argv[2], type=Wanted))
print(gateway.pid(), flush=True)
while True:
    gateway.tick()
    time.sleep(0.05)
"""


def test_the_proxy_outlives_its_owner_and_the_next_one_takes_it_over(world: World) -> None:
    wanted = world.wanted(CHAT, *world.start("one", "two"))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(world.directory), msgspec.json.encode(wanted).decode()],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    with Clients(world.port, "/chat/?ms=1") as clients:
        clients.more()
        owner.kill()
        owner.wait()
        owner.stdout.close()
        clients.more(200)
        world.start("three")
        world.serve(CHAT, world.replica("two"), world.replica("three"))
        until(lambda: clients.of("three") > 0, "the replica that the next owner added")
    assert clients.failures == []
    assert world.gateway.pid() == pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("which", ["master", "worker"])
def test_a_proxy_that_was_killed_is_started_again(world: World, number: int, which: str) -> None:
    world.serve(CHAT, *world.start("one"))
    before = world.gateway.pid()
    assert before is not None
    info = world.gateway._proxy.runtime.info()
    os.kill(before if which == "master" else int(info["Pid"]), number)
    until(lambda: world.gateway.pid() != before, "its death")
    until(lambda: bool(world.gateway.tick()), "the next one")
    assert world.get("/chat/").body == "one"
    assert world.gateway.pid() not in (before, None)


def test_stop_lets_what_is_in_flight_finish_and_ends_the_proxy(world: World) -> None:
    world.serve(CHAT, *world.start("one"))
    request = "GET /chat/stream?n=3&every_ms=100 HTTP/1.1\nHost: x\nConnection: close\n\n"
    with raw(world.port, request) as connection:
        assert b"200" in connection.recv(100)
        assert world.gateway.stop(grace_s=20)
        said = b""
        while part := connection.recv(4096):
            said += part
        assert b"one 2" in said
    assert not world.gateway.stop()
    assert world.gateway.pid() is None
    assert world.gateway.tick() == (), "what was stopped stays so"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", world.port))


def test_a_stranger_whose_arguments_name_the_configuration_is_left_alone(world: World) -> None:
    (one,) = world.start("one")
    sleeper = "import sys; print(flush=True); sys.stdin.read()"
    stranger = subprocess.Popen(
        [sys.executable, "-c", sleeper, str(world.directory / "haproxy.cfg")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        (world.directory / "haproxy.pid").write_text(f"{stranger.pid}\n")
        assert world.gateway.pid() is None, "a pid alone says nothing"
        world.serve(CHAT, one)
        assert world.get("/chat/").body == "one"
        assert world.gateway.stop(grace_s=0)
        assert stranger.poll() is None


def test_a_gateway_whose_directory_moved_goes_on_and_is_stopped_there(world: World) -> None:
    (one,) = world.start("one")
    world.serve(CHAT, one)
    pid = world.gateway.pid()
    world.directory = world.directory.rename(world.directory.with_name("moved-gateway"))
    link = world.directory.with_name("link-to-gateway")
    link.symlink_to(world.directory)
    world.gateway = Gateway(link)
    world.serve(Route(service="other"), one)  # takes a reload
    assert world.gateway.pid() == pid and world.get("/other/").body == "one"
    name = world.get("/other/").headers["x-request-id"]
    until(lambda: name in world.logged(), "its line in the log that moved along")
    done = subprocess.run([sys.executable, "-m", "shoal.gateway", "stop", link], check=False)
    assert done.returncode == 0 and world.gateway.pid() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", world.port))


def test_a_port_that_is_taken_is_refused_in_one_line_and_the_rest_goes_on(world: World) -> None:
    (one,) = world.start("one")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        entry = Wanted(entry=GatewayEntry(port=taken))
        with pytest.raises(GatewayError, match=rf"^gateway: cannot listen .* port {taken}: .*"):
            world.gateway.apply(entry)
        assert world.gateway.pid() is None
        world.serve(CHAT, one)
        own = Route(service="own", port=taken)
        wanted = Wanted(
            entry=GatewayEntry(port=world.port),
            services=(Served(route=CHAT, replicas=(one,)), Served(route=own)),
        )
        for gateway in (world.gateway, Gateway(world.directory)):
            with pytest.raises(GatewayError, match=r"^service own: cannot listen .* another port$"):
                gateway.apply(wanted)
    assert world.get("/chat/").body == "one"


def test_other_bad_wishes_are_refused_in_one_line(world: World) -> None:
    (one,) = world.start("one")
    world.serve(CHAT, one)
    with pytest.raises(GatewayError, match="chat: replica one is named twice"):
        world.serve(CHAT, one, one)
    with pytest.raises(GatewayError, match=r"replica one: address '1.2' is not an IP address"):
        world.serve(CHAT, msgspec.structs.replace(one, address="1.2"))
    assert world.get("/chat/").body == "one"
    double = Wanted(services=(Served(route=CHAT), Served(route=CHAT)))
    with pytest.raises(GatewayError, match="service chat is already used"):
        world.gateway.apply(double)
    deep = Path("/tmp") / ("x" * 100)
    with pytest.raises(GatewayError, match="too long a path"):
        Gateway(deep, binary=find_binary()).apply(Wanted(entry=GatewayEntry(port=free_port())))


def test_a_missing_or_strange_binary_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CHOICE, str(tmp_path / "none"))
    with pytest.raises(GatewayError, match=r"cannot run .*none.*shoal\[serve\]"):
        find_binary()
    monkeypatch.setenv(CHOICE, "/bin/true")
    with pytest.raises(GatewayError, match="not a HAProxy"):
        find_binary()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho HAProxy version 2.2.9-1\n")
    old.chmod(0o755)
    monkeypatch.setenv(CHOICE, str(old))
    with pytest.raises(GatewayError, match=r"2\.2, too old"):
        find_binary()


def test_the_access_log_has_a_bound_and_a_keeper_that_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOG_BYTES_MAX", 2000)
    world.serve(CHAT, *world.start("one"))
    log = world.directory / "access.log"
    before = log.with_name("access.log.1")
    for number in range(4):
        ask_and_find(world)
        for _ in range(10):
            world.get("/chat/")
        until(before.exists, "the next file")
        if number == 1:
            kill_keeper(world)
            world.gateway.tick()
    ask_and_find(world)
    until(log.exists, "the file in use")  # the keeper may be between one and the next
    assert log.stat().st_size < 2000 + 4000 and before.stat().st_size < 2000 + 4000
    for line in world.logged().splitlines():
        assert msgspec.json.decode(line)["service"] == "chat", "every line is whole"
    # It ends with the proxy.
    world.gateway.stop(grace_s=0)
    until(lambda: not held(world.directory / "access.lock"), "the end of the keeper")


def ask_and_find(world: World) -> None:
    name = world.get("/chat/").headers["x-request-id"]
    until(lambda: name in world.logged(), "its line")


def kill_keeper(world: World) -> None:
    for pid in holders(world.directory / "access.lock"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not held(world.directory / "access.lock"), "its death")
