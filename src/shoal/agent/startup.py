"""How an agent's process starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from shoal.agent.agent import Agent
from shoal.database.formats import FORMAT, VERSION, newer_text
from shoal.machine.enduring import enduring
from shoal.machine.files import FORMAT_FILE, LINK_FILE, SPEC, short_path, write_private
from shoal.machine.kernel import reap_orphans, without_cores
from shoal.model.node import NodeSpec

log = logging.getLogger("shoal.agent")


NEWER_CODE = 5  # a newer version has used the folder


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
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    # No line says who wrote it where, so nobody needs to find that out at every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
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
    agent = Agent(directory, spec, incarnation)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, agent.members.reap)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stopping.set)
    # A burst of children that end fills the pipe that wakes the loop. It is awake then anyway.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    agent.members.clear_up()
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
    """Grows with each life of the node, so that messages of an earlier life can be recognised. It
    comes from the clock if the file is lost, and from the file if the clock was set back."""
    try:
        last = int(path.read_text())
    except (FileNotFoundError, ValueError):
        last = 0
    incarnation = max(last + 1, int(time.time()))
    write_private(path, str(incarnation).encode())
    return incarnation
