"""Ray as an engine that brings nodes: an agent on machines of an existing Ray.

The controller is not a Ray driver. For each Ray that the supplies name, a small process is
(`driver.py`); it is asked in lines, and killed if it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec

from shoal.engines.ray.driver import Answer, End, Hold, Look, Request
from shoal.engines.ray.read import Seen, reading
from shoal.engines.ray.render import Where, ask, where
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderStatus, Provision, Release, SupplyReport
from shoal.ports import SupplyContext, SupplyError

# Connecting takes two seconds, and each search for living agents starts a process on a machine. On
# one that has just booted, the first process reads half a gigabyte from the disk.
ANSWER_S = 60.0
CONNECT_S = 5.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
# A user's own settings for Ray count for this Ray, too: it is theirs. These make a driver give up
# sooner on a head that is gone, and accept 3.11.2 beside 3.11.7.
SETTINGS = {
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "8",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}


class RaySupplier:
    engine = "ray"

    def __init__(self, context: SupplyContext) -> None:
        self._context = context
        self._drivers: dict[Where, DriverProcess] = {}
        self._seen: dict[Where, dict[str, Seen]] = {}

    async def look(self) -> SupplyReport:
        """One Ray that does not answer is a problem of all: its orders would seem to be gone."""
        orders: list[OrderStatus] = []
        places = self._places()
        for place in [place for place in self._drivers if place not in places]:
            await self._drivers.pop(place).end()
        for place in places:
            facts = (await self._driver(place).ask(Look())).facts
            assert facts is not None, "a look is answered with facts"
            seen = self._seen.get(place, {})
            found = reading(facts, seen, time.time_ns() // 1_000_000)
            self._seen[place] = found.seen
            for lost, node in found.again:
                await self._driver(place).ask(Hold(lost, node))
            orders += found.orders
        return SupplyReport(engine=self.engine, orders=tuple(orders))

    async def provision(self, command: Provision) -> None:
        place = where(command.supply)
        await self._driver(place).ask(Hold(ask(self._context, command)))

    async def release(self, command: Release) -> None:
        for place in self._places():
            self._seen.get(place, {}).pop(command.order, None)
            await self._driver(place).ask(End(command.order))

    async def drain(self, node: NodeSpec, why: str) -> None:
        """Ray has no word for a sick machine, other than ending what runs there."""

    async def close(self) -> None:
        """Nodes stay: they are the cluster's, and the next controller finds them again."""
        for driver in self._drivers.values():
            await driver.end()
        self._drivers.clear()

    def _places(self) -> list[Where]:
        ours = (supply for supply in self._context.supplies() if supply.engine == self.engine)
        return list(dict.fromkeys(where(supply) for supply in ours))

    def _driver(self, place: Where) -> DriverProcess:
        if find_spec("ray") is None:
            raise SupplyError(
                "Ray is not installed here; install it with: pip install 'shoal[ray]'"
            )
        if place not in self._drivers:
            self._drivers[place] = DriverProcess(self._context, place)
        return self._drivers[place]


class DriverProcess:
    """Asks one driver, one request at a time, and starts it when there is none."""

    def __init__(self, context: SupplyContext, place: Where) -> None:
        self._context = context
        self._place = place
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: Request) -> Answer:
        await self._knock()
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                with contextlib.suppress(ConnectionError):  # it has ended: so does its output
                    process.stdin.write(msgspec.json.encode(request) + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
                if not line:
                    await process.wait()
                answer = msgspec.json.decode(line, type=Answer)
        except (TimeoutError, OSError, ValueError) as error:
            code = process.returncode
            await self.end()
            reason = f"within {ANSWER_S:.0f} s" if isinstance(error, TimeoutError) else "any more"
            if code is not None:
                reason += f": {_ending(code)}; see ray/driver.log in the controller's home"
            raise SupplyError(f"Ray at {self._place.address} does not answer {reason}") from None
        except BaseException:  # cancelled: its answer must not be read as that of the next request
            await self.end()
            raise
        if answer.error:
            raise SupplyError(answer.error)
        return answer

    async def _knock(self) -> None:
        """Ray's own calls wait most of a minute for a head that is gone, and a head that returns is
        another, which this driver does not know."""
        host, _, port = self._place.address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except (OSError, TimeoutError) as error:
            await self.end()
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error) or "no answer"
            message = f"no response from {self._place.address} ({reason}); is Ray up there?"
            raise SupplyError(message) from None

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        folder = self._context.home / "ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        env = self._environment()
        with (folder / "driver.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(self._context.python, "-m", "shoal.engines.ray.driver"),
                *(self._context.cluster, self._place.address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=env,
                limit=ANSWER_BYTES_MAX,
            )
        return self._process

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **SETTINGS}
        if self._place.token_file:
            path = os.path.expanduser(self._place.token_file)
            try:
                Path(path).read_bytes()
            except OSError as error:
                message = f"token_file: cannot read {path}: {error.strerror}"
                raise SupplyError(message) from None
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}
        return env


def _ending(code: int) -> str:
    """Ray's library ends the process that uses it as it likes."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the process that talks to it {how}"
