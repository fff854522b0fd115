"""The hosts of the other tests are what they seem."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Host, Net
from harness.waiting import WAIT_S, until

SENT = b"x" * 300_000


@pytest.fixture(scope="module")
def pair(net: Net) -> tuple[Host, Host]:
    return net.add("ada"), net.add("bob")


@contextlib.contextmanager
def echo(host: Host) -> Iterator[int]:
    """A port of the host where what is sent is sent back."""
    with host.network():
        server = socket.create_server((host.address, 0))

    def serve() -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            with link:
                while data := link.recv(1 << 16):
                    link.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(WAIT_S)


def call(host: Host, address: str, port: int, data: bytes, patience_s: float = WAIT_S) -> bytes:
    """From the host: send it there, and return what comes back."""
    with host.network(), socket.create_connection((address, port), patience_s) as link:
        sender = threading.Thread(target=link.sendall, args=(data,))
        sender.start()
        back = b""
        while len(back) < len(data):
            more = link.recv(1 << 16)
            assert more, "the line broke"
            back += more
        sender.join()
        return back


def test_a_host_has_a_name_a_home_and_processes_of_its_own(pair: tuple[Host, Host]) -> None:
    ada, bob = pair
    script = 'echo "$(hostname) $(cd; pwd) $(getent passwd root | cut -d: -f6)"'
    script += "; ls /proc | grep -c ^[0-9]"
    for host in (ada, bob):
        told, processes = host.run("sh", "-c", script).stdout.splitlines()
        assert told.split() == [host.name, str(host.home), str(host.home)]
        assert int(processes) < 10


def test_hosts_reach_each_other_but_not_when_one_is_cut_off(pair: tuple[Host, Host]) -> None:
    ada, bob = pair
    with echo(bob) as port:
        assert call(ada, bob.address, port, b"hello") == b"hello"
        alive = bob.start("sleep", "600")
        bob.cut()
        with pytest.raises(OSError, match=r"timed out|No route to host"):
            call(ada, bob.address, port, b"hello", patience_s=0.5)
        assert alive.poll() is None
        assert call(bob, bob.address, port, b"to itself") == b"to itself"
        bob.mend()
        assert call(ada, bob.address, port, SENT) == SENT
        alive.kill()
        alive.wait(WAIT_S)


def test_a_slow_link_and_one_that_loses_packets_bring_everything_in_the_end(
    pair: tuple[Host, Host],
) -> None:
    ada, bob = pair
    with echo(bob) as port:
        bob.slow("4mbit")
        assert call(ada, bob.address, port, SENT) == SENT
        assert bob.held_up() > 0
        bob.mend()
        bob.lose(0.1)
        assert call(ada, bob.address, port, SENT) == SENT
        assert bob.lost_packets() > 0
        bob.mend()
        assert bob.lost_packets() == 0


def test_power_off_ends_everything_and_a_host_comes_up_again(pair: tuple[Host, Host]) -> None:
    ada, bob = pair
    note = bob.home / "pid"
    bob.run("sh", "-c", f"setsid sh -c 'echo $$ >{note}; exec sleep 600' >/dev/null 2>&1 &")
    until(lambda: note.exists() and bool(note.read_text()))
    direct = bob.start("sleep", "600")
    bob.power_off()
    assert direct.wait(WAIT_S) != 0
    bob.power_on()
    assert bob.run("sh", "-c", "grep -lx sleep /proc/[0-9]*/comm").stdout == ""
    with echo(bob) as port:
        assert call(ada, bob.address, port, b"again") == b"again"


def test_nothing_stays_of_the_hosts_of_a_test_that_was_killed(
    hosts_possible: None, tmp_path: Path
) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from harness.hosts import Net\n"
        f"net = Net(pathlib.Path({str(tmp_path)!r}))\n"
        "host = net.add('cat')\n"
        "print(host.namespace, host.start('sleep', '600').pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        namespace, pid = process.stdout.readline().split()
        assert Path(f"/run/netns/{namespace}").exists()
        process.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/run/netns/{namespace}").exists())
    until(lambda: not _runs(int(pid)))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
