"""A member's ports are its own, or it does not start, or it ends at no cost and gets others."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys

import pytest

from shoal.machine.listening import Listener, hold, listeners, reaching
from shoal.model.commands import Limits
from shoal.model.job import Fault, MemberRef
from tests.agent.rig import Rig, rig

ONE, TWO = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
PORTS = Limits(ports=(20_000, 30_000))
PYTHON = (sys.executable, "-c")
LISTEN = """
import os, socket, sys, time
door = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
time.sleep(600)
"""
FAIL = "import sys; sys.exit('bind: Address already in use')"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a second user")


def a_port() -> int:
    """One that is free now, and that no outgoing connection gets."""
    for port in random.sample(range(30_000, 32_700), 50):
        try:
            hold("", port).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


def service(port: int) -> dict[str, str]:
    return {"SHOAL_SERVICE": "chat", "PORT": str(port)}


def stranger(port: int, address: str = "127.0.0.1", uid: int = 12_345) -> int:
    """Another user's process that listens there; its id."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            door = socket.create_server((address, port))
            os.write(write, b"." if door else b"")
            signal.pause()
        except OSError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    assert (said := os.read(read, 99)) == b".", said
    os.close(read)
    return pid


def listens(node: Rig) -> tuple[MemberRef, ...] | None:
    return node.report.listens if node.report is not None else None


@pytest.mark.parametrize("name", ["PORT", "MASTER_PORT"])
def test_a_member_whose_port_is_taken_does_not_start_and_its_node_is_to_blame(name: str) -> None:
    with rig() as node, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        env = service(port) if name == "PORT" else {name: str(port)}
        node.launch(ONE, "echo", "never", env=env, limits=PORTS)
        ended = node.exit(ONE)
        assert (ended.code, ended.fault) == (127, Fault.PORT)
        assert f"port {port} is not free on this node: process {os.getpid()}" in ended.why
        node.launch(TWO, "echo", "fine", env={"PORT": str(port)})
        assert node.exit(TWO).code == 0, "a job of any other kind may use the name as it likes"


def test_a_head_that_cannot_read_whose_fault_it_was_is_not_told() -> None:
    with rig() as node, socket.create_server(("127.0.0.1", 0)) as taken:
        node.launch(ONE, "echo", "never", env=service(taken.getsockname()[1]))
        ended = node.exit(ONE)
        assert (ended.code, ended.fault) == (127, Fault.NONE)


def test_only_a_replica_that_listens_itself_is_reported_to_listen() -> None:
    port = a_port()
    with rig() as node:
        node.until(lambda: node.report is not None)
        assert listens(node) == ()
        node.launch(ONE, *PYTHON, LISTEN, "127.0.0.1", str(port), env=service(port), limits=PORTS)
        assert node.until(lambda: listens(node) == (ONE,))
        node.stop(ONE)
        node.exit(ONE)
        assert node.until(lambda: listens(node) == ())


@AS_ROOT
def test_a_replica_whose_port_somebody_takes_while_it_loads_ends_at_no_cost() -> None:
    port = a_port()
    with rig() as node:
        node.launch(ONE, "sleep", "600", env=service(port), limits=PORTS)
        assert node.until(lambda: node.report is not None and node.report.alive == (ONE,))
        thief = stranger(port)
        try:
            ended = node.exit(ONE)
        finally:
            os.kill(thief, 9)
            os.waitpid(thief, 0)
        assert ended.fault is Fault.TAKEN
        assert f"port {port}, which is its own, is held by process {thief}" in ended.why
        assert listens(node) == ()


def test_another_member_of_the_node_that_takes_the_port_is_a_stranger_too() -> None:
    """Both are the same user's: the operator's own jobs, or those of an agent that is not root."""
    port = a_port()
    with rig() as node:
        node.launch(ONE, "sleep", "600", env=service(port), limits=PORTS)
        assert node.until(lambda: node.report is not None and node.report.alive == (ONE,))
        node.launch(TWO, *PYTHON, LISTEN, "127.0.0.1", str(port))
        ended = node.exit(ONE)
        assert ended.fault is Fault.TAKEN
        assert f"port {port}, which is its own, is held by process" in ended.why
        assert node.says(TWO, "listens")


@AS_ROOT
def test_whoever_listens_elsewhere_on_the_same_number_does_not_end_a_replica() -> None:
    """Else anybody could end any replica."""
    port = a_port()
    with rig() as node:
        node.launch(ONE, *PYTHON, LISTEN, "127.0.0.1", str(port), env=service(port), limits=PORTS)
        assert node.until(lambda: listens(node) == (ONE,))
        other = stranger(port, "127.0.0.2")
        try:
            node.launch(TWO, "sleep", "1.5")
            node.exit(TWO)
            assert listens(node) == (ONE,)
        finally:
            os.kill(other, 9)
            os.waitpid(other, 0)


def test_a_gang_that_found_its_port_taken_has_not_failed() -> None:
    port = a_port()
    wait = f"import os, time\nwhile not os.path.exists('go'): time.sleep(.05)\n{FAIL}"
    with rig() as node:
        folder = node.directory
        env = {"MASTER_PORT": str(port)}
        node.launch(ONE, *PYTHON, wait, env=env, limits=PORTS, workdir=str(folder))
        assert node.until(lambda: node.report is not None and node.report.alive == (ONE,))
        with socket.create_server(("127.0.0.1", port)):
            (folder / "go").touch()
            ended = node.exit(ONE)
        assert (ended.code, ended.fault) == (1, Fault.TAKEN)
        assert "Address already in use" in ended.why
        assert f"port {port}, which was its own, is held by process {os.getpid()}" in ended.why
        node.launch(TWO, *PYTHON, FAIL, env=env, limits=PORTS)
        assert node.exit(TWO).fault is Fault.NONE, "nobody has it: this failure is its own"


def test_the_kernel_and_its_list_name_the_same_listeners() -> None:
    from shoal.machine import listening

    families = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
    with socket.create_server(("", 0)) as here:
        port = here.getsockname()[1]
        asked = [one for one in listeners() if one.port == port]
        read = [one for two in families for one in listening._read(*two) if one.port == port]
        assert asked == read == [Listener("127.0.0.1", port, asked[0].inode, os.getuid(), True)]


def test_who_gets_a_connection_depends_on_its_address() -> None:
    anywhere, anywhere6 = Listener("127.0.0.1", 80, 1, 0, True), Listener("::1", 80, 2, 0, True)
    near, far = Listener("127.0.0.1", 80, 3, 0), Listener("10.0.0.7", 80, 4, 0)
    every = [anywhere, anywhere6, near, far, Listener("127.0.0.1", 81, 5, 0)]
    assert reaching(every, "127.0.0.1", 80) == [anywhere, near]
    assert reaching(every, "10.0.0.7", 80) == [anywhere, far]
    assert reaching([anywhere6, far], "127.0.0.1", 80) == [anywhere6]
    assert reaching([near], "10.0.0.7", 80) == []


@AS_ROOT
def test_a_port_that_is_held_is_nobody_elses() -> None:
    """Whatever options a socket has. Our own user's proxy still gets it."""
    port = a_port()
    with hold("127.0.0.1", port):
        for options in ([], ["REUSEADDR"], ["REUSEPORT"], ["REUSEADDR", "REUSEPORT"]):
            for uid in (0, 12_345):
                got = _tries(port, options, uid)
                assert got is (uid == 0 and "REUSEPORT" in options), (options, uid)
        with pytest.raises(OSError, match="in use"):
            hold("127.0.0.1", port)
        hold("127.0.0.1", port, shared=True).close()


def _tries(port: int, options: list[str], uid: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            with socket.socket() as door:
                for name in options:
                    door.setsockopt(socket.SOL_SOCKET, getattr(socket, f"SO_{name}"), 1)
                door.bind(("127.0.0.1", port))
                door.listen()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
