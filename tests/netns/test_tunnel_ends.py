"""Two ends of an encrypted network: who may use it, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from harness.hosts import Host, Net
from harness.waiting import until

from shoal.agent.tunnel.end import name_of
from tests.needs import need_encryption

OWNER, OTHER = 70_001, 70_002
NETWORK = "fd11:2233:4455:6677::/64"
ANSWERS = """
import socket
server = socket.create_server(("::", 7000), family=socket.AF_INET6)
print("listens", flush=True)
while True:
    server.accept()[0].sendall(b"hello")
"""
CONNECTS = """
import socket, sys
line = socket.socket(socket.AF_INET6)
line.settimeout(5)
if sys.argv[2]:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[2].encode())
if sys.argv[3]:
    line.bind((sys.argv[3], 0))
line.connect((sys.argv[1], 7000))
print(line.recv(5).decode())
"""
SENDS = """
import socket, sys
line = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
line.sendto(b"hello", (sys.argv[1], 7000, 0, socket.if_nametoindex(sys.argv[2])))
"""


class Side:
    def __init__(self, host: Host, number: int, uid: int) -> None:
        self.host = host
        self.node = host.home / "node"
        self.node.mkdir(exist_ok=True)
        self.name = name_of(self.node, "j1", 1)
        self.address = f"fd11:2233:4455:6677::{number}"
        self.process = subprocess.Popen(
            host.command(sys.executable, "-P", "-m", "shoal.agent.tunnel.end"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=host.environment(),
            text=True,
        )
        note = str(self.node / "tunnels" / self.name)
        self.say({"name": self.name, "note": note, "uid": uid, "ports": (0, 0), "own": host.name})
        self.key = self.hear()

    def say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()

    @property
    def far(self) -> dict[str, Any]:
        place = {"node": self.host.name, "host": self.host.address, "address": self.address}
        return {**place, "public": self.key["public"], "port": self.key["port"]}

    def left(self) -> str:
        """What there is of it on its host."""
        links = self.host.run("ip", "-o", "link").stdout
        rules = self.host.run("ip", "-6", "rule").stdout
        found = [line for line in links.splitlines() if self.name in line]
        found += [line for line in rules.splitlines() if "fd11" in line]
        found += [str(path) for path in (self.node / "tunnels").iterdir()]
        return "\n".join(found)

    def tries(self, uid: int, script: str, *words: str) -> str:
        become = f"import os\nos.setgroups([]), os.setresgid({uid}, {uid}, {uid})\n"
        become += f"os.setresuid({uid}, {uid}, {uid})\n"
        head, _, rest = script.lstrip().partition("\n")
        done = self.host.run(sys.executable, "-c", f"{head}\n{become}{rest}", *words)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def hosts(net: Net) -> tuple[Host, Host]:
    need_encryption()
    return net.add("one"), net.add("two")


@pytest.fixture
def sides(hosts: tuple[Host, Host]) -> Iterator[tuple[Side, Side]]:
    with contextlib.ExitStack() as stack:
        one, two = (Side(host, number, OWNER) for number, host in enumerate(hosts, 1))
        stack.callback(one.close)
        stack.callback(two.close)
        for side in (one, two):
            side.say({"network": NETWORK, "ends": [one.far, two.far]})
        assert one.hear() == two.hear() == {"up": True}
        yield one, two


def test_the_tenant_whose_it_is_and_root_use_it_and_nobody_else(sides: tuple[Side, Side]) -> None:
    one, two = sides
    two.host.start(sys.executable, "-c", ANSWERS)
    answers = ("ss", "-Hltn", "sport = :7000")
    until(lambda: bool(two.host.run(*answers).stdout.strip()), "it does not listen")
    assert one.tries(OWNER, CONNECTS, two.address, "", "") == "hello"
    assert one.tries(0, CONNECTS, two.address, "", "") == "hello"
    for way in (("", ""), (one.name, ""), ("", one.address), (one.name, one.address)):
        said = one.tries(OTHER, CONNECTS, two.address, *way)
        assert "Network is unreachable" in said or "No route to host" in said, (way, said)
    assert "nreachable" in one.tries(OTHER, SENDS, two.address, one.name)


def test_a_closed_port_inside_refuses_as_any_other_does(sides: tuple[Side, Side]) -> None:
    one, two = sides
    script = CONNECTS.replace("7000", "7003")
    assert "Connection refused" in one.tries(OWNER, script, two.address, "", "")


def test_nothing_stays_when_the_agent_closes_it(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    assert one.name in one.left()
    assert "fd11" in one.left()
    assert one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait() == 0
    assert one.left() == ""


def test_what_a_kill_leaves_is_gone_when_the_agent_starts_again(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.host.run("pkill", "-KILL", "-f", "shoal.agent.tunnel.end")
    one.process.wait()
    assert one.left(), "a kill takes rules along: this test shows nothing"
    code = "import sys, pathlib; from shoal.agent.tunnel import end; "
    code += "end.clear(pathlib.Path(sys.argv[1]))"
    done = one.host.run(sys.executable, "-c", code, str(one.node))
    assert done.returncode == 0, done.stderr
    assert one.left() == ""


def test_an_end_whose_program_dies_says_so_and_leaves_nothing(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    pids = one.host.run("pgrep", "-x", "wireguard-go").stdout.split()
    if not pids:
        pytest.skip("the kernel has WireGuard: no program to end")
    one.host.run("kill", "-KILL", *pids)
    assert one.hear() == {"problem": "wireguard-go has ended on this node"}
    one.process.wait()
    assert one.left() == ""


@pytest.mark.parametrize(
    "host", ["evil\n[Peer]\nPublicKey = x", "", "a b"], ids=["lines", "empty", "space"]
)
def test_an_address_that_is_none_does_not_reach_the_configuration(
    sides: tuple[Side, Side], host: str
) -> None:
    one, two = sides
    one.say({"network": NETWORK, "ends": [one.far, {**two.far, "host": host}]})
    assert one.hear() == {"problem": "two has no address"}
