"""Brings a cluster up and takes it down, from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.client import Address, Client, ShoalError
from shoal.control.home import ClusterConfig, Home
from shoal.machine.cgroups import end_groups
from shoal.machine.files import AGENT_LOCK, LINK_FILE, STARTER_LOCK, held, require_own
from shoal.machine.kernel import AGENT_MARK, NODE_MARK, kill_marked, memory_folder, variable
from shoal.model.views import NodeView

Progress = Callable[[str], None]

UP_TIMEOUT_S = 60.0
DOWN_TIMEOUT_S = 12.0  # longer than an agent gives its members
NODE_TIMEOUT_S = 60.0  # longer than a starter gives its agent, and takes to report the end
POLL_S = 0.02


class LifecycleError(Exception):
    """The cluster could not be brought up or down; the message says why and what to do."""


class NodesMissing(LifecycleError):
    """The cluster is up and works, but some of its nodes are not ready."""

    def __init__(self, message: str, up: Up) -> None:
        super().__init__(message)
        self.up = up


class Up(msgspec.Struct, frozen=True):
    """`already`: it was up before, and nothing was changed."""

    address: Address
    already: bool


def is_up(home: Home) -> bool:
    return held(home.supervisor_lock) or held(home.controller_lock)


def bring_up(
    home: Home,
    config: ClusterConfig | None,
    progress: Progress,
    start_nodes: Progress = lambda _: None,
) -> Up:
    """Start the controller and the nodes, and return when all of them are ready.

    Without a config, the last one is used. On a cluster that is up, an equal config (or none)
    changes nothing and another one is refused. `start_nodes` gets the controller's URL: with a
    database the nodes of this machine dial in, because no head starts them.
    """
    try:
        home.create()
        before = home.read_config()
    except PermissionError as error:
        raise LifecycleError(f"cannot use {error.filename}: {error.strerror}") from None
    except (OSError, ValueError) as error:  # what cannot be decoded is a ValueError
        raise LifecycleError(f"cannot use {home.path}: {error}") from None
    already = is_up(home)
    if already and config is not None and config != before:
        raise LifecycleError(
            f"a cluster with another configuration is already up in {home.path}; "
            "take it down first with: shoal down"
        )
    config = config or before
    if config is None:
        raise LifecycleError("this is the first start: say which nodes the cluster has")
    log_start = home.controller_log.stat().st_size if home.controller_log.exists() else 0
    if not already:
        ours = {spec.id for spec in config.nodes} if config.database else set()
        _refuse_member(home, ours)
        _refuse_half_restored(home)
        home.write_config(config)
        for spec in () if config.database else config.nodes:
            # An agent that finds this file dials another head.
            (home.node(spec.id) / LINK_FILE).unlink(missing_ok=True)
        _start(home)
    elif not held(home.supervisor_lock):
        # Nothing would start the controller again, and nothing else holds its sockets. Jobs go on:
        # they belong to the agents.
        progress("the supervisor is gone; starting it again, with a new controller")
        _end(home.controller_lock, lambda: _controller_pid(home))
        _start(home)
    answer = Up(_wait_for_controller(home, log_start, progress), already)
    start_nodes(answer.address.url)
    missing = _wait_for_nodes(home, config, progress)
    if missing:
        message = f"{', '.join(missing)} did not become ready; see agent.log in {home.nodes}"
        raise NodesMissing(message, answer)
    return answer


def _refuse_member(home: Home, ours: set[str]) -> None:
    for folder in home.nodes.iterdir():
        if folder.name not in ours and held(folder / STARTER_LOCK):
            message = f"this machine is in another cluster as {folder.name} ({home.path})"
            raise LifecycleError(f"{message}; first: shoal leave, or use another --home")


def _refuse_half_restored(home: Home) -> None:
    if home.restoring.exists():
        message = f"a restore into {home.path} was interrupted"
        raise LifecycleError(f"{message}; repeat it with: shoal restore FILE --replace")


def take_down(home: Home, progress: Progress, note: Progress = lambda _: None) -> int:
    """Stop the controller, then the nodes with all that runs on them; returns how many processes
    (controller and nodes) were stopped. Jobs stay in the store and go on at the next `up`. `note`
    gets what could not be removed: even on a sick disk, processes have to end."""
    try:
        require_own(home.path)  # its files say which processes to end
    except PermissionError as error:
        raise LifecycleError(f"cannot use {error.filename}: {error.strerror}") from None
    stopped = 0
    if is_up(home):
        progress("stopping the controller")
        _end_head(home)
        stopped += 1
    for path in (home.address, home.socket):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            note(f"cannot remove {path}: {error.strerror or error}")
    folders = sorted(home.nodes.iterdir()) if home.nodes.is_dir() else []
    for directory in folders:
        if held(directory / STARTER_LOCK):  # it would start the agent again
            progress(f"stopping {directory.name}")
            end_node(directory)
            stopped += 1
    agents = [directory for directory in folders if held(directory / AGENT_LOCK)]
    for directory in agents:
        _signal(_agent_pid(directory), signal.SIGTERM)
    for directory in agents:
        progress(f"stopping {directory.name}")
        end_agent(directory)
        stopped += 1
    if home.gateway.is_dir():
        progress("stopping the gateway")
        stop = [sys.executable, "-m", "shoal.gateway", "stop", str(home.gateway)]
        try:
            subprocess.run(stop, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            note(f"the gateway may still run: {error}")
    # An agent that the controller had just started may not hold its lock yet.
    for mark in (AGENT_MARK, NODE_MARK):
        kill_marked(mark, lambda value: _is_same(Path(value).parent, home.nodes))
    for directory in home.nodes.iterdir() if home.nodes.is_dir() else ():
        if (folder := memory_folder(directory)) is not None:  # of an agent that was killed
            shutil.rmtree(folder, ignore_errors=True)
        end_groups(directory)  # of an agent that died with its keeper
    return stopped


def replace_head(home: Home, progress: Progress) -> None:
    """End the supervisor and the controller, and start those of this program. They listen where
    the old ones did; nodes and jobs go on."""
    config = home.read_config()
    if config is None:
        raise LifecycleError(f"{home.config} is missing; start with: shoal up")
    log_start = home.controller_log.stat().st_size if home.controller_log.exists() else 0
    progress("replacing the head; jobs keep running")
    _end_head(home)
    home.write_config(config)  # with fields that an older version does not know, and so refuses
    _start(home)
    _wait_for_controller(home, log_start, progress)
    _wait_for_nodes(home, config, progress)


def _is_same(one: Path, other: Path) -> bool:
    """The same directory, perhaps by different links."""
    return one.resolve() == other.resolve()


def end_node(directory: Path) -> None:
    """End a node that dials its head: its starter ends the agent, and reports that it has."""
    lock_file = directory / STARTER_LOCK
    _end(lock_file, lambda: _pid_in(lock_file), NODE_TIMEOUT_S)
    end_agent(directory)


def end_agent(directory: Path) -> None:
    """End an agent and all that runs on its node; members get a moment to end well."""
    _end(directory / AGENT_LOCK, lambda: _agent_pid(directory))


def _end_head(home: Home) -> None:
    """The supervisor first: it would start the controller again."""
    _end(home.supervisor_lock, lambda: _pid_in(home.supervisor_lock))
    _end(home.controller_lock, lambda: _controller_pid(home))


def _start(home: Home) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with os.fdopen(os.open(home.controller_log, flags, 0o600), "ab") as output:
        subprocess.run(
            [sys.executable, "-m", "shoal.control.supervise", str(home.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            check=True,
        )


def _wait_for_controller(home: Home, log_start: int, progress: Progress) -> Address:
    progress("starting the controller")
    deadline = time.monotonic() + UP_TIMEOUT_S
    grace = time.monotonic() + 5  # the supervisor takes a moment to hold its lock
    while time.monotonic() < deadline:
        address = read_address(home)
        up = held(home.controller_lock) and held(home.supervisor_lock)
        if address is not None and up and _alive(address.pid):
            return address
        if time.monotonic() > grace and not is_up(home):
            break
        if _said_hopeless(home, log_start):
            break
        time.sleep(POLL_S)
    raise LifecycleError(f"the controller did not start: {_last_words(home.controller_log)}")


def _wait_for_nodes(home: Home, config: ClusterConfig, progress: Progress) -> list[str]:
    """Wait until every node is ready, and return those that are not."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    wanted = {spec.id for spec in config.nodes}
    with Client.at_home(home.path, patience_s=UP_TIMEOUT_S) as client:
        while time.monotonic() < deadline:
            try:
                ready = {node.id for node in client.nodes() if _is_ready(home, node)}
            except ShoalError as error:
                raise LifecycleError(str(error)) from None
            progress(f"{len(ready & wanted)} of {len(wanted)} nodes are ready")
            if wanted <= ready:
                break
            time.sleep(POLL_S)
    return sorted(wanted - ready)


def _is_ready(home: Home, node: NodeView) -> bool:
    """A controller that has just started believes its log, so look at the node's agent, too."""
    directory = home.node(node.id)
    return (
        node.health == "ready"
        and held(directory / AGENT_LOCK)
        and _agent_info(directory).get("incarnation") == node.incarnation
    )


def read_address(home: Home) -> Address | None:
    try:
        return msgspec.json.decode(home.address.read_bytes(), type=Address)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _said_hopeless(home: Home, log_start: int) -> bool:
    """The controller said why it gave up; there is no need to wait longer."""
    with contextlib.suppress(OSError):
        return b"\nshoal: " in b"\n" + home.controller_log.read_bytes()[log_start:]
    return False


def _last_words(path: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        line = path.read_text(errors="replace").strip().splitlines()[-1]
        return line.removeprefix("shoal: ")
    return f"see {path}"


def _end(lock_file: Path, pid_of: Callable[[], int], timeout_s: float = DOWN_TIMEOUT_S) -> None:
    """SIGTERM, then SIGKILL after `timeout_s`, until no process holds the lock. One that has just
    taken it has not yet said who it is, so `pid_of` may name the one before: it is asked again."""
    told, number = 0, signal.SIGTERM
    deadline = time.monotonic() + timeout_s
    while held(lock_file):
        if (pid := pid_of()) != told:
            _signal(pid, number)
            told = pid
        if time.monotonic() > deadline:
            if number is signal.SIGKILL:
                raise LifecycleError(f"process {pid} does not end; inspect it with: ps -fp {pid}")
            told, number = 0, signal.SIGKILL
            deadline = time.monotonic() + DOWN_TIMEOUT_S
        time.sleep(POLL_S)


def _signal(pid: int, number: int) -> None:
    if pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _pid_in(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _controller_pid(home: Home) -> int:
    address = read_address(home)
    return address.pid if address else 0


def _agent_pid(directory: Path) -> int:
    """0 if the file is of an agent that is gone: its number may be another program's by now."""
    pid = _agent_info(directory).get("pid", 0)
    own = variable(pid, AGENT_MARK) if pid else None
    return pid if own is not None and _is_same(Path(own), directory) else 0


def _agent_info(directory: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / "agent.json").read_bytes(), type=dict[str, int])
    return {}


# `shoal up --foreground`: stays for as long as the cluster's supervisor lives, as containers and
# systemd expect it. It may be the first process of a container, which has to wait for orphans.


LOOK_S = 0.2
PIECE_BYTES = 64 * 1024


class Staying:
    """From here on, SIGTERM ends the supervisor and its controller; nodes and jobs go on."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._told = False
        self._notify = os.environ.pop("NOTIFY_SOCKET", "")  # not for the jobs
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def run(self) -> int:
        """Show the controller's log until it ends. 0: it was told to, by us or by `shoal down`."""
        self._log = self._home.controller_log.open("rb")
        self._log.seek(0, os.SEEK_END)
        if self._told:
            self._end()
        self._tell_systemd(b"READY=1")
        while held(self._home.supervisor_lock):
            self._show()
            _reap()
            time.sleep(LOOK_S)
        self._show()
        self._log.close()
        return 0 if self._told or not self._supervisor() else 1

    def _end(self, *_: object) -> None:
        self._told = True
        self._tell_systemd(b"STOPPING=1")
        with contextlib.suppress(OSError):
            if pid := self._supervisor():
                os.kill(pid, signal.SIGTERM)

    def _supervisor(self) -> int:
        """Its process id; 0 when it has ended on purpose."""
        try:
            return int(self._home.supervisor_lock.read_bytes().split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def _tell_systemd(self, state: bytes) -> None:
        """If it asked for that with Type=notify."""
        if self._notify:
            name = "\0" + self._notify[1:] if self._notify.startswith("@") else self._notify
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way,
            ):
                way.sendto(state, name)

    def _show(self) -> None:
        if self._home.controller_log.stat().st_ino != os.fstat(self._log.fileno()).st_ino:
            self._log.close()
            self._log = self._home.controller_log.open("rb")
        if os.fstat(self._log.fileno()).st_size < self._log.tell():
            self._log.seek(0)  # it was full, and begins again
        while piece := self._log.read(PIECE_BYTES):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
