"""Members of a gang on two hosts talk through a network that is theirs alone."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.hosts import Host, Net

from shoal.model.node import NodeIntent
from tests.needs import need_encryption
from tests.netns.cluster import SHOAL, Cluster

HERE = Path(__file__).parent
PROGRAMS = ["secretive.py", pytest.param("secretive_gloo.py", marks=pytest.mark.soak)]
WORDS = b"attack at dawn, says the member"
ETH_P_ALL = 3


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    need_encryption()
    made = Cluster(net, ("h1", "h2"))
    made.ask(lambda client: client.set_intent("n1", NodeIntent.CORDONED))
    yield made
    made.close()


class Seen:
    def __init__(self) -> None:
        self.packets = 0
        self.words = False


@contextmanager
def listening(net: Net) -> Iterator[Seen]:
    """Everything that goes over the switch, as a stranger there sees it."""
    with net.network():
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    ear.settimeout(0.1)
    seen, over = Seen(), threading.Event()

    def listen() -> None:
        while True:
            try:
                packet = ear.recv(1 << 16)
            except TimeoutError:
                if over.is_set():
                    return
                continue
            seen.packets += 1
            seen.words = seen.words or WORDS in packet

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        ear.close()


def talk(program: str) -> str:
    return f"{sys.executable} {HERE / program}"


def left(host: Host) -> str:
    """What there is of tunnels on it."""
    links = host.run("ip", "-o", "link").stdout.splitlines()
    rules = host.run("ip", "-6", "rule").stdout.splitlines()
    notes = host.run("sh", "-c", f"ls {host.home}/.shoal/nodes/*/tunnels 2>/dev/null").stdout
    found = [line for line in links if ": sw" in line]
    return "\n".join([*found, *(line for line in rules if " fd" in line), notes]).strip()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("encrypt", [False, True])
def test_what_members_say_crosses_the_switch_in_clear_only_if_nobody_encrypts_it(
    cluster: Cluster, encrypt: bool, program: str
) -> None:
    with listening(cluster.net) as seen:
        script = talk(program) if encrypt else f"GLOO_SOCKET_IFNAME=eth0 {talk(program)}"
        job = cluster.submit(script, members=2, gpus=1, encrypt_network=encrypt)
        done = cluster.wait(job)
    output = [cluster.output(job, member).decode() for member in range(2)]
    print(output)
    assert done.state == "succeeded", cluster.story() + output[0]
    assert seen.packets > 20
    assert seen.words is not encrypt
    assert [text.split()[-1] for text in output] == ["heard", "heard"]
    for name in ("h1", "h2"):
        host = cluster.hosts[name]
        cluster.until(lambda host=host: not left(host), "the tunnel stays")  # type: ignore[misc]


def test_members_of_one_node_share_its_end_until_the_last_has_ended(cluster: Cluster) -> None:
    fields = {"members": 4, "members_per_node": 2, "cpu_milli": 100, "encrypt_network": True}
    with listening(cluster.net) as seen:
        job = cluster.submit(talk("secretive.py"), **fields)
        done = cluster.wait(job)
    assert done.state == "succeeded", cluster.story() + cluster.output(job, 0).decode()
    assert not seen.words
    assert len({member.node for member in done.gang}) == 2
    for name in ("h1", "h2"):
        host = cluster.hosts[name]
        cluster.until(lambda host=host: not left(host), "the tunnel stays")  # type: ignore[misc]


def test_a_tenants_gang_talks_in_a_tunnel_as_its_own_user(cluster: Cluster) -> None:
    cluster.ask(lambda client: client.add_tenant("lab"))
    text = (HERE / "secretive.py").read_text()
    command = [sys.executable, "-c", f"{text}\nprint('as', os.getuid())"]
    with listening(cluster.net) as seen:
        job = cluster.submit(
            "", command=command, tenant="lab", members=2, gpus=1, encrypt_network=True, workdir="/"
        )
        done = cluster.wait(job)
    output = cluster.output(job, 0).decode()
    assert done.state == "succeeded", cluster.story() + output
    assert not seen.words
    assert int(output.split()[-1]) > 0


def test_a_gang_goes_on_in_another_tunnel_when_an_agent_was_killed(cluster: Cluster) -> None:
    script = f"{talk('secretive.py')} && until [ -e $SHARED/go ]; do sleep 0.1; done"
    job = cluster.submit(
        script, members=2, gpus=1, encrypt_network=True, restart="on-node-loss", retries=3
    )
    host = cluster.hosts["h1"]
    cluster.until(lambda: b"heard" in cluster.output(job, 1), "they do not talk")
    before = left(host)
    assert "fd" in before
    host.run("pkill", "-KILL", "-f", "shoal.agent")  # the agent, its keeper, its end, its starter
    assert left(host), "the kill took everything along: this test shows nothing"
    host.start(
        *SHOAL,
        "join",
        cluster.url,
        "--name",
        "h1",
        "--gpus",
        "1",
        env={"SHOAL_JOIN_TOKEN": cluster.token},
    )
    (cluster.shared / "go").touch()
    done = cluster.wait(job)
    assert (done.state, done.attempt) == ("succeeded", 2), cluster.story()
    cluster.until(lambda: not left(host), f"something stays: {before}")
