"""An agent of this machine as its engine sees it: started, connected, or known to be dead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.link.wire import CHECKPOINT_ROOT, Ask, FromAgent, Heard, Link, ToAgent
from shoal.machine.cgroups import end_groups
from shoal.machine.exits import MEMBERS, read_exits
from shoal.machine.files import AGENT_LOCK, SPEC, held, short_path, write_private
from shoal.machine.kernel import AGENT_MARK, Usual, limit_cores, variable
from shoal.machine.leftovers import end_marked, end_node
from shoal.machine.template import Asking
from shoal.model.node import NodeSpec
from shoal.model.report import NodeGone

log = logging.getLogger("shoal.engine")

CONNECT_PAUSE_S = 0.02
DEATH_POLL_S = 0.01
WATCH_PAUSE_S = 0.2
# An agent that dies is restarted: soon at first, later and later if it keeps dying.
RESTART_FIRST_S = 2.0
RESTART_MAX_S = 60.0
HEALTHY_AFTER_S = 10.0
SWEEP_S = 4.0  # for a keeper to end the processes that an agent left


class Starting(Protocol):
    """The keeper of an agent, as whoever started it knows it."""

    def poll(self) -> int | None:
        """None while it lives."""


Start = Callable[[], Starting]
StartAgent = Callable[[Path, dict[str, str]], Starting]  # of a directory, with an environment


class Ear(Protocol):
    """Receives what an agent sends, and the news of its death."""

    def said(self, message: FromAgent) -> None: ...

    def died(self, gone: NodeGone) -> None: ...


class AgentLink:
    """The connection to the agent of a directory, restored forever. Without `start`, another
    process starts the agent."""

    def __init__(self, node: str, directory: Path, ear: Ear, start: Start | None) -> None:
        self._node = node
        self._directory = directory
        self._ear = ear
        self._start = start
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._process: Starting | None = None
        self._incarnation = 0
        self._death: NodeGone | None = None
        self._fencing: asyncio.Future[None] | None = None

    async def keep(self) -> None:
        """For ever: stay connected to the agent, or start one."""
        restart_s = RESTART_FIRST_S
        while True:
            if self._start is not None and not self._held():
                self._process = self._start()
            since = time.monotonic()
            if await self._connect():
                await self._lost.wait()
            if time.monotonic() - since > HEALTHY_AFTER_S:
                restart_s = RESTART_FIRST_S
            if await self._died():
                self._announce_death()
                await asyncio.sleep(WATCH_PAUSE_S if self._start is None else restart_s)
                restart_s = min(RESTART_MAX_S, restart_s * 2)

    def send(self, message: ToAgent) -> None:
        if self._link is not None:
            self._link.send(message)

    @property
    def up(self) -> bool:
        return self._link is not None

    @property
    def backlog_bytes(self) -> int:
        return self._link.backlog_bytes if self._link is not None else 0

    def tell_again(self) -> None:
        self.send(Ask())
        if self._death is not None:
            self._ear.died(self._death)

    def fence(self, incarnation: int) -> None:
        """End this life of the node: it does not answer, and its jobs should run elsewhere. Its end
        is reported like any other death, when its lock is free."""
        if self._incarnation in (0, incarnation) and (not self._fencing or self._fencing.done()):
            work = asyncio.to_thread(end_by_force, self._directory, incarnation)
            self._fencing = asyncio.ensure_future(work)
            self._fencing.add_done_callback(_tell)

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def _held(self) -> bool:
        return held(self._directory / AGENT_LOCK)

    async def _connect(self) -> bool:
        """Returns when connected, or when the agent is gone."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        while True:
            with contextlib.suppress(OSError), short_path(self._directory / "agent.sock") as path:
                await loop.create_unix_connection(self._new_link, path)
                return True
            await asyncio.sleep(CONNECT_PAUSE_S)
            starting = self._process is not None and self._process.poll() is None
            if not starting and not self._held():
                return False

    def _new_link(self) -> Link:
        return Link(FromAgent, self._opened, self._received, self._closed)

    def _opened(self, link: Link) -> None:
        self._link = link

    def _closed(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._lost.set()

    def _received(self, message: FromAgent) -> None:
        if isinstance(message, Heard):
            self._incarnation = message.report.incarnation
            self._death = None
        self._ear.said(message)

    async def _died(self) -> bool:
        """The keeper releases the lock when every process of the node is gone. If the keeper was
        killed, too, they are ended here, before anybody knows of the death. A connection can also
        break without a death; then the agent answers again."""
        while self._held():
            if self._process is not None:
                self._process.poll()  # reap the keeper
            await asyncio.sleep(DEATH_POLL_S)
            with contextlib.suppress(OSError), short_path(self._directory / "agent.sock") as path:
                _, writer = await asyncio.open_unix_connection(path)
                writer.close()
                return False
        return await asyncio.to_thread(end_node, self._directory)

    def _announce_death(self) -> None:
        """A life that never connected may have ended too: its number is on disk."""
        incarnation = self._incarnation or last_incarnation(self._directory)
        if not incarnation or (self._death and self._death.incarnation == incarnation):
            return
        log.warning("the agent of %s is dead", self._node)
        why = "its agent died, and its processes with it"
        exits = read_exits(self._directory / MEMBERS)
        self._death = NodeGone(self._node, incarnation, why, exits)
        self._ear.died(self._death)


def _tell(ended: asyncio.Future[None]) -> None:
    if not ended.cancelled() and ended.exception() is not None:
        log.error("a node that does not answer could not be ended: %s", ended.exception())


def end_by_force(directory: Path, incarnation: int) -> None:
    """Kill an agent that may be frozen. Its keeper, woken if it is frozen too, then ends what is
    left and releases the lock. A keeper that does not is killed, after every process that carries
    the node's mark, because the lock is released with the keeper."""
    said = msgspec.json.decode((directory / "agent.json").read_bytes())
    if int(said["incarnation"]) != incarnation:
        return
    agent, keeper = int(said["pid"]), int(said["keeper"])
    log.warning("ending the agent in %s, which does not answer", directory)
    _signal(agent, signal.SIGKILL, directory)
    _signal(keeper, signal.SIGCONT, directory)
    deadline = time.monotonic() + SWEEP_S
    while held(directory / AGENT_LOCK) and time.monotonic() < deadline:
        time.sleep(DEATH_POLL_S)
    if held(directory / AGENT_LOCK):
        end_groups(directory)
        end_marked(directory, SWEEP_S)
        _signal(keeper, signal.SIGKILL, directory)


def _signal(pid: int, number: int, directory: Path) -> None:
    """Only to processes of this node: the file may be old, and its process ids reused."""
    if variable(pid, AGENT_MARK) == str(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def write_spec(directory: Path, spec: NodeSpec) -> None:
    """The agent of this directory reads the file when it starts. An equal file is not written
    again: on a full disk that would keep away a node that could still report its problem."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, data = directory / SPEC, msgspec.json.encode(spec)
    if not path.exists() or path.read_bytes() != data:
        write_private(path, data)


def start_agent(
    directory: Path,
    env: dict[str, str],
    usual: Usual | None = None,
    template: Asking | None = None,
) -> Starting:
    """In a session of its own, so that it outlives the process that starts it. Forked by a template
    that has the environment `env` but for our own variables, or executed."""
    words = [sys.executable, "-m", "shoal.agent", str(directory)]
    log_file = directory / "agent.log"
    if template is not None:
        own = {CHECKPOINT_ROOT: env[CHECKPOINT_ROOT], AGENT_MARK: str(directory)}
        if (forked := template.start(words, own, str(log_file))) is not None:
            return forked
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={**env, AGENT_MARK: str(directory)},
            umask=usual.umask if usual else -1,
        )
    if usual is not None:
        with contextlib.suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, usual.files)
        limit_cores(process.pid, usual.cores)
    return process


def last_incarnation(directory: Path) -> int:
    """The last life of the agent of this directory, dead or alive; 0 if there never was one."""
    try:
        return int((directory / "incarnation").read_text())
    except (OSError, ValueError):
        return 0
