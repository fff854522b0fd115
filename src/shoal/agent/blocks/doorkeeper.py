"""Runs the door of this node, from the first thing that there is to offer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.agent.blocks.store import Offer, Speed
from shoal.agent.inherited import build_env, inherited_env
from shoal.machine.kernel import NODE_MARK
from shoal.model.blocks import Door

log = logging.getLogger("shoal.agent")

AGAIN_S = 5.0  # a door that has ended is opened again
FIRST_LINE_BYTES = 64 * 1024


class Doorkeeper:
    """`tell` gets what the head has to know: when the door is open, and on each new link. Code that
    waits for the agent's children must skip those in `pids()` and pass them to `ended`."""

    def __init__(self, node: Path, tell: Callable[[Door], None]) -> None:
        self._node = node
        self._tell = tell
        self._offers: dict[str, Offer] = {}
        self._speed = Speed(0.0)
        self._door: Door | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def offer(self, offer: Offer) -> None:
        """An offer without a folder ends an earlier one of its key."""
        if not offer.folder:
            if self._offers.pop(offer.key, None) is None:
                return
        else:
            self._offers[offer.key] = offer
        if self._process is None:
            self._start()  # it is told all offers
        else:
            self._say(offer)

    def pace(self, bytes_s: float) -> None:
        self._speed = Speed(bytes_s)
        if self._process is not None:
            self._say(self._speed)

    def reconnected(self) -> None:
        if self._door is not None:
            self._tell(self._door)

    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None else set()

    def ended(self, pid: int, code: int) -> bool:
        if self._process is None or self._process.pid != pid:
            return False
        log.warning("the door of this node has ended with code %d", code)
        self._process.returncode = code
        self.close()
        if self._offers:
            asyncio.get_running_loop().call_later(AGAIN_S, self._start)
        return True

    def close(self) -> subprocess.Popen[bytes] | None:
        """The door ends by itself when its input does."""
        process, self._process, self._door = self._process, None, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        return process

    def _start(self) -> None:
        if self._process is not None or not self._offers:
            return
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", "shoal.agent.blocks.door"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**build_env(inherited_env(apart=True)), NODE_MARK: str(self._node)},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._process.stdout.fileno(), self._heard)
        if self._speed.bytes_s:
            self._say(self._speed)
        for offer in self._offers.values():
            self._say(offer)

    def _say(self, offer: Offer | Speed) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), msgspec.json.encode(offer) + b"\n")
        except OSError as error:  # it does not read, or has ended
            log.warning("the door of this node takes no offers: %s", error.strerror)
            self._process.kill()

    def _heard(self) -> None:
        """Its first line, which is short and written at once; then the end."""
        assert self._process is not None
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        data = os.read(handle, FIRST_LINE_BYTES)
        if not data:
            asyncio.get_running_loop().remove_reader(handle)
            return
        with contextlib.suppress(msgspec.DecodeError):
            self._door = msgspec.json.decode(data, type=Door)
            self._tell(self._door)
