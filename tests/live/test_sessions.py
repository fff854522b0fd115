"""Into a running job, with real processes: forwarded ports, and what keeps others out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.ports import free_port
from harness.waiting import until

import shoal.sessions
from shoal.sessions import Forward
from tests.live.cluster import Live, live_cluster
from tests.needs import need, need_program

# Answers each connection with what it got, after the other side has said that it is done.
ECHO = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
print(listener.getsockname()[1], flush=True)
def answer(end):
    said = b""
    while data := end.recv(65536):
        said += data
    end.sendall(said)
    end.close()
while True:
    threading.Thread(target=answer, args=[listener.accept()[0]]).start()
"""
CONNECTIONS = 40
BYTES = 200_000


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(live: Live) -> tuple[str, int]:
    """A job that listens, and its port."""
    job = live.client.submit(live.spec("python3", "-c", ECHO)).id
    until(lambda: live.output(job).endswith("\n"))
    return job, int(live.output(job))


def say(port: int, data: bytes) -> bytes:
    """What comes back, after a half-close."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        got = b""
        while more := end.recv(65536):
            got += more
    return got


def test_many_connections_reach_a_job_and_new_ones_after_a_kill_of_the_controller(
    live: Live, echo: tuple[str, int]
) -> None:
    job, port = echo
    with shoal.sessions.forward(live.client, job, port) as forwarded:
        got: dict[int, bytes] = {}

        def one(number: int) -> None:
            got[number] = say(forwarded.port, bytes([number]) * BYTES)

        threads = [threading.Thread(target=one, args=[number]) for number in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: bytes([number]) * BYTES for number in range(CONNECTIONS)}
        live.kill_controller()
        assert say(forwarded.port, b"again") == b"again"


def test_only_ports_of_the_job_itself_are_reached(live: Live, echo: tuple[str, int]) -> None:
    job, port = echo
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        other = stranger.getsockname()[1]
        with (
            Forward(live.client, lambda: (job, 0), [(0, other)], told.append) as forwarded,
            socket.create_connection(("127.0.0.1", forwarded.port), timeout=60) as end,
        ):
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b""
            said = f"no process of {job}.0 listens on port {other}; it listens on {port}"
            until(lambda: told == [said], more=lambda: told)


def shoal_command(live: Live, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.main", *args],
        env={**os.environ, "SHOAL_HOME": str(live.home.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes], given: bytes = b"") -> tuple[int, bytes, bytes]:
    out, err = process.communicate(given, timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def sleeper(live: Live) -> str:
    job = live.run("sleep 3600", gpus=1)
    live.wait(job, "running")
    return job


def test_exec_runs_beside_the_job_with_its_variables_folder_streams_and_exit_code(
    live: Live, sleeper: str
) -> None:
    script = "echo $SHOAL_JOB_ID $CUDA_VISIBLE_DEVICES; pwd; echo apart >&2; cat; exit 7"
    data = os.urandom(20_000_000)
    one = shoal_command(live, "exec", "-i", sleeper, "--", "sh", "-c", script)
    other = shoal_command(live, "exec", sleeper, "--", "sh", "-c", "cat; kill -TERM $$")
    missing = shoal_command(live, "exec", sleeper, "nosuchprogram")
    folder = live.home.node("n1") / "members" / f"{sleeper}.1.0"
    assert finish(one, data) == (7, f"{sleeper} 0\n{folder}\n".encode() + data, b"apart\n")
    assert finish(other, b"nobody asked for it") == (128 + 15, b"", b"")
    code, _, err = finish(missing)
    assert (code, err) == (127, b"error: no program 'nosuchprogram' in PATH on this node\n")


def test_exec_loses_and_doubles_nothing_when_the_controller_is_killed(
    live: Live, sleeper: str
) -> None:
    script = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; read x; echo got $x"
    counting = shoal_command(live, "exec", "-i", sleeper, "--", "sh", "-c", script)
    assert counting.stdin and counting.stdout
    got = b""
    while got.count(b"\n") < 100:
        got += os.read(counting.stdout.fileno(), 1000)
    live.kill_controller()
    counting.stdin.write(b"while it was away\n")
    code, rest, err = finish(counting)
    wanted = b"".join(b"%d\n" % number for number in range(3000)) + b"got while it was away\n"
    assert (code, got + rest, err) == (0, wanted, b"")


def test_exec_says_in_one_line_why_a_job_cannot_be_entered(live: Live, sleeper: str) -> None:
    assert live.wait(sleeper, "running")  # it holds the only GPU
    waiting, done = live.run("true", gpus=1), live.run("true")
    live.wait(done)
    for job, why in (
        (waiting, "does not run yet, it is waiting: "),
        (done, "has ended (succeeded)"),
    ):
        code, out, err = finish(shoal_command(live, "exec", job, "--", "true"))
        assert (code, out, err.count(b"\n")) == (1, b"", 1)
        assert f"error: job: {job} {why}".encode() in err
    live.client.cancel(waiting)


@pytest.fixture
def ssh(live: Live, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """OpenSSH's own programs, with the entry that `shoal ssh-config` writes."""
    need_program("ssh")
    need("asyncssh")
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    env = {**os.environ, **home, "SHOAL_HOME": str(live.home.path)}
    write = [sys.executable, "-m", "shoal.main", "ssh-config", "--write"]
    for _ in range(2):  # the second time changes nothing
        subprocess.run(write, env=env, check=True, timeout=60, stdout=subprocess.DEVNULL)
    config = tmp_path / ".ssh" / "config"
    assert config.read_text().count("Include") == 1
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

    def start(program: str, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([program, "-F", str(config), *args], env=env, **pipes)  # type: ignore[call-overload, no-any-return]

    return start


def test_ssh_scp_and_an_editors_way_in_work_through_the_api_alone(
    live: Live, echo: tuple[str, int], ssh: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    job, port = echo
    host = f"shoal-{job}"
    local, socks = free_port(), free_port()
    script = ssh("ssh", "-T", "-D", str(socks), host, "bash")  # as VS Code begins
    here, there = tmp_path / "here", tmp_path / "there"
    here.write_bytes(os.urandom(2_000_000))
    copy = ssh("scp", str(here), f"{host}:{there}")
    tunnel = ssh("ssh", "-N", "-L", f"{local}:localhost:{port}", host)
    command = ssh("ssh", host, "echo $SHOAL_JOB_ID; echo apart >&2; exit 3")
    assert finish(command) == (3, f"{job}\n".encode(), b"apart\n")
    assert finish(script, b"echo from a script; exit 4\n")[:2] == (4, b"from a script\n")
    assert finish(copy)[0] == 0
    assert there.read_bytes() == here.read_bytes()

    def through() -> bool:
        try:
            return say(local, b"through ssh") == b"through ssh"
        except ConnectionError:
            return False

    try:
        until(through)
    finally:
        tunnel.terminate()
        tunnel.communicate(timeout=60)
    code, _, err = finish(ssh("ssh", "-o", f"HostKeyAlias={host}", host, "true"))
    assert (code, b"Host key verification failed" in err) == (255, True)


class Typist:
    """`shoal` at a terminal of its own."""

    def __init__(self, live: Live, *args: str) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            env = {**os.environ, "SHOAL_HOME": str(live.home.path), "TERM": "xterm"}
            os.execve(sys.executable, [sys.executable, "-m", "shoal.main", *args], env)
        self._got = b""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def sees(self, text: str) -> None:
        """Waits for it, then looks only at what follows."""
        while text.encode() not in self._got:
            ready, _, _ = select.select([self._terminal], [], [], 60)
            try:
                data = os.read(self._terminal, 65536) if ready else b""
            except OSError:
                data = b""
            assert data, f"no {text!r} in {self._got!r}"
            self._got += data
        self._got = self._got.partition(text.encode())[2]

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    @property
    def raw(self) -> bool:
        return not termios.tcgetattr(self._terminal)[3] & termios.ICANON

    def end(self) -> int:
        until(lambda: not self.raw, "the terminal stays raw")
        with contextlib.suppress(OSError):
            while os.read(self._terminal, 65536):
                pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_a_shell_with_a_terminal_follows_its_size_and_leaves_the_terminal_as_it_was(
    live: Live, sleeper: str
) -> None:
    user = Typist(live, "exec", sleeper, "-it", "--", "sh")
    user.sees("# ")
    assert user.raw
    user.resize(50, 123)
    user.type("until [ \"$(stty size)\" = '50 123' ]; do sleep 0.1; done; echo si''ze; sleep 60\r")
    user.sees("size")
    user.type("\x03")
    user.sees("# ")
    user.type("exit 9\r")
    assert user.end() == 9


def test_an_interactive_job_is_shared_left_and_found_again(live: Live) -> None:
    first = Typist(live, "run", "-it", "--", "sh")
    first.sees("[j")
    job = max((row.id for row in live.client.jobs()), key=lambda one: int(one[1:]))
    first.sees("# ")
    first.type("echo to''gether\r")
    first.sees("together")
    second = Typist(live, "attach", job)
    second.sees("together")
    first.type("\x10\x11")
    first.sees(f"[detached; {job} keeps running: shoal attach {job}]")
    assert first.end() == 0
    live.kill_controller()
    second.type("echo st''ill; exit 5\r")
    second.sees("still")
    assert second.end() == 5
    assert live.wait(job) == "failed"
    assert "still" in live.output(job)
