"""How an agent's process starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from shoal.agent.agent import Agent
from shoal.database.formats import FORMAT, VERSION, newer_text
from shoal.link.wire import CHECKPOINT_ROOT
from shoal.machine.enduring import enduring
from shoal.machine.files import (
    FORMAT_FILE,
    LINK_FILE,
    SPEC,
    TUNNELS,
    short_path,
    write_private,
)
from shoal.machine.kernel import reap_orphans, without_cores
from shoal.machine.paths import MOUNTS, Mount
from shoal.model.node import NodeSpec

log = logging.getLogger("shoal.agent")


NEWER_CODE = 5  # a newer version has used the folder
REMIND_S = 60.0  # between lines about a mount that hangs
SIGNALS_READ = 64 * 1024  # as many as the pipe holds


class Written(msgspec.Struct, frozen=True):
    """`format.json` in the folder: which version has written to it."""

    format: int
    version: str = ""


class AgentInfo(msgspec.Struct, frozen=True):
    """Written to `agent.json` when the agent listens."""

    pid: int
    keeper: int
    incarnation: int


def run(directory: Path, keeper: int) -> int:
    """The agent's whole life; returns its exit code."""
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("shoal").setLevel(logging.INFO)  # of libraries, warnings
    # No line says who wrote it where, so nobody needs to find that out at every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    gc.freeze()  # the modules live as long as the agent
    reap_orphans()
    without_cores()
    newer = _claim(directory / FORMAT_FILE)
    if newer:
        print(f"shoal: {newer}", file=sys.stderr, flush=True)
        return NEWER_CODE
    return asyncio.run(_run(directory, keeper))


async def _run(directory: Path, keeper: int) -> int:
    spec = msgspec.json.decode((directory / SPEC).read_bytes(), type=NodeSpec)
    incarnation = _next_incarnation(directory / "incarnation")
    MOUNTS.follow(str(directory))
    if mount := MOUNTS.of(os.environ.get(CHECKPOINT_ROOT, "")):
        await _answering(mount)
    agent = Agent(directory, spec, incarnation)
    loop = asyncio.get_running_loop()
    _hear_signals(loop, agent)
    agent.members.clear_up()
    if (directory / TUNNELS).exists():
        from shoal.agent.tunnel.end import clear

        clear(directory)
    agent.listen()
    linked = await _reachable(agent, directory)
    info = AgentInfo(os.getpid(), keeper, incarnation)
    write_private(directory / "agent.json", msgspec.json.encode(info))
    log.info("%s is up as incarnation %d", spec.id, incarnation)
    await agent.live()
    if linked is not None:
        linked.cancel()
    log.info("%s is down", spec.id)
    return 0


async def _answering(mount: Mount) -> None:
    """Without the folder of checkpoints, no member can start: the node is there when it is."""
    while not await mount.answers(REMIND_S):
        log.warning("waiting: %s", mount.problem())


def _hear_signals(loop: asyncio.AbstractEventLoop, agent: Agent) -> None:
    """As asyncio does it, but one call for each signal instead of three: children end often."""
    inward, outward = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # A burst of children that end may fill the pipe. The loop is awake then anyway.
    signal.set_wakeup_fd(outward, warn_on_full_buffer=False)

    def hear() -> None:
        numbers = os.read(inward, SIGNALS_READ)
        if signal.SIGCHLD in numbers:
            agent.members.reap()
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            agent.stopping.set()

    loop.add_reader(inward, hear)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


async def _reachable(agent: Agent, directory: Path) -> asyncio.Task[None] | None:
    """On the controller's own machine, the agent listens. Elsewhere it dials, which needs code
    that the others do without."""
    socket_path = directory / "agent.sock"
    socket_path.unlink(missing_ok=True)
    if not (directory / LINK_FILE).exists():
        with short_path(socket_path) as path:
            await asyncio.get_running_loop().create_unix_server(agent.connect, path)
        return None
    from shoal.agent.dialling import Dialling

    agent.compresses = True
    dialling = Dialling(directory, agent.connect)
    agent.turned_away = dialling.turned_away
    agent.learn = dialling.learn
    return asyncio.create_task(enduring("the link to the head", dialling.keep))


def _claim(path: Path) -> str:
    """From now on, this version writes to the folder. Not empty: a newer one did, so it may not."""
    ours, found = Written(FORMAT, VERSION), None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode(path.read_bytes(), type=Written)
    if found is not None and found.format > FORMAT:
        return newer_text(str(path.parent), found.version, found.format)
    if found != ours:
        write_private(path, msgspec.json.encode(ours) + b"\n")
    return ""


def _next_incarnation(path: Path) -> int:
    """Grows with each life of the node, so that messages of an earlier life can be recognized. It
    comes from the clock if the file is lost, and from the file if the clock was set back."""
    try:
        last = int(path.read_text())
    except (FileNotFoundError, ValueError):
        last = 0
    incarnation = max(last + 1, int(time.time()))
    write_private(path, str(incarnation).encode())
    return incarnation
