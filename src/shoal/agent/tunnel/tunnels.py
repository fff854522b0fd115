"""Gives members of a gang their encrypted network: one end for each attempt, while it has members.

A member that asks for it waits until the head has named all ends, and starts with addresses inside.
The ends themselves are processes (end.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.agent.faults import CannotStart
from shoal.agent.inherited import build_env, inherited_env
from shoal.agent.tunnel.end import name_of
from shoal.machine.files import TUNNELS
from shoal.machine.kernel import NODE_MARK
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef
from shoal.model.tunnel import Tunnel, TunnelEnd

log = logging.getLogger("shoal.agent")

Key = tuple[str, int]  # a job and its attempt

SAY_AGAIN_S = 5.0  # the head may have been away when it was first said
LINE_BYTES = 64 * 1024
HOSTS = "SHOAL_HOSTS"
ADDRESS = "SHOAL_TUNNEL"


class Side:
    """This node's end for one attempt, and the members here that use it."""

    def __init__(self, name: str, ref: MemberRef, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.name, self.ref, self.process = name, ref, process
        self.mouth = process.stdout.fileno()
        self.members: set[MemberRef] = set()
        self.end: TunnelEnd | None = None  # when it has a key
        self.tunnel: Tunnel | None = None  # as the head has told it
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed = False


class Tunnels:
    """`say` tells the head; `lost` gets a member whose network is gone. Its ends are children of
    the agent: code that waits for those must skip `pids()` and pass them to `ended`."""

    def __init__(
        self,
        node: Path,
        own: str,
        say: Callable[[TunnelEnd], None],
        lost: Callable[[MemberRef, str], None],
    ) -> None:
        self._node, self._own = node, own
        self._say = say
        self._lost = lost
        self._sides: dict[Key, Side] = {}
        self._ending: dict[int, subprocess.Popen[bytes]] = {}

    async def get(self, launch: Launch, env: dict[str, str], uid: int) -> dict[str, str]:
        """Its variables, with the addresses inside. `uid`: the tenant's user, if it has one."""
        key = launch.ref.job, launch.ref.attempt
        side = self._sides.get(key)
        if side is None:
            side = self._sides[key] = self._open(launch, uid)
        side.members.add(launch.ref)
        while not (await asyncio.wait([side.up], timeout=SAY_AGAIN_S))[0]:
            self._say_again(side)
        side.up.result()
        assert side.tunnel is not None
        return inside(env, side.tunnel, side.name, self._own)

    def found(self, tunnel: Tunnel) -> None:
        side = self._sides.get((tunnel.job, tunnel.attempt))
        if side is not None and any(one.node == self._own for one in tunnel.ends):
            side.tunnel = tunnel
            self._write(side, msgspec.json.encode(tunnel))

    def reconnected(self) -> None:
        for side in self._sides.values():
            self._say_again(side)

    def _say_again(self, side: Side) -> None:
        if side.end is not None:
            self._say(side.end)

    def left(self, ref: MemberRef) -> None:
        side = self._sides.get((ref.job, ref.attempt))
        if side is not None:
            side.members.discard(ref)
            if not side.members:
                del self._sides[ref.job, ref.attempt]
                self._close(side)

    def close(self) -> None:
        """The agent ends, and all ends with it: they get a moment for that."""
        for side in self._sides.values():
            self._close(side)
        for process in self._ending.values():
            with contextlib.suppress(subprocess.TimeoutExpired, ChildProcessError):
                process.wait(SAY_AGAIN_S)
        self._sides.clear()

    # -- its processes ---------------------------------------------------------------------

    def pids(self) -> set[int]:
        return {side.process.pid for side in self._sides.values()} | self._ending.keys()

    def ended(self, pid: int, code: int) -> bool:
        process = self._ending.pop(pid, None)
        if process is not None:
            process.returncode = code
            return True
        for side in list(self._sides.values()):
            if side.process.pid == pid:
                side.process.returncode = code
                self._heard(side)  # its last words
                self._fail(side, "its process has ended")
                return True
        return False

    def _open(self, launch: Launch, uid: int) -> Side:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "shoal.agent.tunnel.end"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**build_env(inherited_env(apart=True)), NODE_MARK: str(self._node)},
            start_new_session=True,
        )
        name = name_of(self._node, launch.ref.job, launch.ref.attempt)
        side = Side(name, launch.ref, process)
        os.set_blocking(side.mouth, False)
        asyncio.get_running_loop().add_reader(side.mouth, self._heard, side)
        note, ports = str(self._node / TUNNELS / name), launch.limits.ports or (0, 0)
        wanted = {"name": name, "note": note, "uid": uid, "ports": ports, "own": self._own}
        self._write(side, json.dumps(wanted).encode())
        return side

    def _write(self, side: Side, line: bytes) -> None:
        assert side.process.stdin is not None
        try:
            side.process.stdin.write(line + b"\n")
            side.process.stdin.flush()
        except OSError as error:
            self._fail(side, f"its process takes no orders: {error.strerror}")

    def _heard(self, side: Side) -> None:
        """Its lines are short, and each is written at once."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(side.mouth, LINE_BYTES)
        if not data:
            asyncio.get_running_loop().remove_reader(side.mouth)
        for line in data.splitlines():
            said = json.loads(line)
            if "public" in said:
                side.end = TunnelEnd(side.ref, said["public"], said["port"])
                self._say(side.end)
            elif "up" in said and not side.up.done():
                side.up.set_result(None)
            elif "problem" in said:
                self._fail(side, said["problem"])

    def _fail(self, side: Side, why: str) -> None:
        why = f"cannot encrypt its network: {why}"
        if not side.up.done():
            side.up.set_exception(CannotStart(why, Fault.START))
        elif side.up.exception() is None and not side.failed:
            side.failed = True
            for ref in list(side.members):
                self._lost(ref, why)

    def _close(self, side: Side) -> None:
        """Its process ends, and removes the interface, when it has no input any more."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            asyncio.get_running_loop().remove_reader(side.mouth)
        for pipe in (side.process.stdin, side.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if side.process.returncode is None:
            self._ending[side.process.pid] = side.process


def inside(env: dict[str, str], tunnel: Tunnel, name: str, own: str) -> dict[str, str]:
    """The variables of a member, with addresses of the tunnel for those of nodes. What the job has
    set stays, but for where its gang meets."""
    places = [end.address for end in tunnel.ends]
    found = {
        "NCCL_SOCKET_IFNAME": f"={name}",  # "=": this name, not all that begin so
        "NCCL_SOCKET_FAMILY": "AF_INET6",
        "NCCL_IB_DISABLE": "1",  # cards go past the tunnel
        "GLOO_SOCKET_IFNAME": name,
        "TP_SOCKET_IFNAME": name,
        "UCX_NET_DEVICES": name,
        **env,
        "MASTER_ADDR": places[0],
        "PET_MASTER_ADDR": f"[{places[0]}]",
        ADDRESS: next(end.address for end in tunnel.ends if end.node == own),
    }
    if HOSTS in env:
        slots = [word.rpartition(":")[2] for word in env[HOSTS].split(",")]
        found[HOSTS] = ",".join(
            f"{place}:{slot}" for place, slot in zip(places, slots, strict=True)
        )
    return found
