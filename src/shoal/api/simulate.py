"""Replays the cluster's own history under other policies for the page, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.calls.page import PageCalls
from shoal.control.loop import ControlLoop
from shoal.control.plugins import problem
from shoal.core.policies import SHIPPED
from shoal.model.policy import Policy, version_of

LIMIT_S = 300.0
ANSWER_BYTES_MAX = 4 * 1024 * 1024
CURRENT = "current"
EDITED = "edited"
FOLDER = "replays"  # in the home; emptied when a controller starts
# A replay dies with its controller, however that ends, even if it ended just before this ran.
BOUND = """
import os, sys
from shoal.machine.kernel import die_with_parent
die_with_parent()
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
from shoal.cli.app import run
run()
"""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`current` is the policy in force, `edited` is `policy`; `days` 0 is the whole log."""

    policies: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=8)]
    days: Annotated[int, msgspec.Meta(ge=0, le=3660)] = 0
    load: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    policy: Policy | None = None


class SimulationView(msgspec.Struct, kw_only=True):
    """`result` is what `shoal sim --json` printed."""

    state: Literal["idle", "running", "done", "failed", "cancelled"] = "idle"
    asked: Ask | None = None
    started_ms: int = 0
    ended_ms: int = 0
    problem: str = ""
    result: msgspec.Raw | None = None
    policies: list[str] = []  # that can be simulated
    current: str = ""
    edited: str = ""  # the version of the policy that was given with the question


class Simulator:
    """Runs `shoal sim` on the log of this home, and ends it if it takes too long."""

    def __init__(self, loop: ControlLoop, home: Path | None) -> None:
        self._loop = loop
        self._home = home
        self._view = SimulationView()
        self._task: asyncio.Task[None] | None = None
        if home is not None:
            shutil.rmtree(home / FOLDER, ignore_errors=True)

    @property
    def view(self) -> SimulationView:
        return msgspec.structs.replace(
            self._view, policies=[*SHIPPED], current=self._loop.policy.name
        )

    def start(self, ask: Ask) -> None:
        if self._home is None:
            raise Refusal(422, "this controller has no home with a log of events")
        if self._task is not None and not self._task.done():
            raise Refusal(409, "a simulation is already running; wait for it or cancel it")
        if (ask.policy is None) == (EDITED in ask.policies):
            raise Refusal(422, f"goes with {EDITED!r} among the policies", "policy")
        wrong = problem(ask.policy) if ask.policy is not None else None
        if wrong is not None:
            field, _, message = wrong.partition(": ")
            raise Refusal(422, message, f"policy.{field}")
        for name in ask.policies:
            if name not in SHIPPED and name not in (CURRENT, EDITED):
                known = ", ".join([CURRENT, *SHIPPED])
                raise Refusal(
                    422, f"there is no policy {name[:64]!r}; there are {known}", "policies"
                )
        self._view = SimulationView(
            state="running",
            asked=msgspec.structs.replace(ask, policy=None),
            edited=version_of(ask.policy) if ask.policy is not None else "",
            started_ms=self._loop.clock.now_ms(),
        )
        self._task = asyncio.create_task(self._run(self._home, ask, self._loop.policy))

    async def cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await self.ended()
            self._failed("cancelled", "cancelled")

    async def ended(self) -> None:
        """Returns when no simulation runs."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, home: Path, ask: Ask, policy: Policy) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                self._end(*await _replay(home, ask, policy))
        except TimeoutError:
            self._failed("failed", f"it took more than {LIMIT_S:.0f} s; ask for fewer days")
        except OSError as error:
            self._failed("failed", f"it cannot be started: {error}")

    def _end(self, code: int, out: bytes, err: bytes) -> None:
        if code or len(out) > ANSWER_BYTES_MAX:
            told = err.decode(errors="replace").strip().splitlines()
            self._failed("failed", told[-1][:500] if told else f"it ended with code {code}")
            return
        self._view = msgspec.structs.replace(
            self._view, state="done", ended_ms=self._loop.clock.now_ms(), result=msgspec.Raw(out)
        )

    def _failed(self, state: Literal["failed", "cancelled"], problem: str) -> None:
        self._view = msgspec.structs.replace(
            self._view, state=state, ended_ms=self._loop.clock.now_ms(), problem=problem
        )


class Simulations:
    @handles(PageCalls.simulation)
    def newest(self, simulator: Simulator) -> SimulationView:
        return simulator.view

    @handles(PageCalls.simulate)
    async def start(self, simulator: Simulator, data: Ask) -> SimulationView:
        simulator.start(data)
        return simulator.view

    @handles(PageCalls.cancel_simulation)
    async def cancel(self, simulator: Simulator) -> SimulationView:
        await simulator.cancel()
        return simulator.view


async def _replay(home: Path, ask: Ask, policy: Policy) -> tuple[int, bytes, bytes]:
    """Its exit code and output; cancelling this ends the process."""
    place = home / FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return await run_child(_command(home, ask, policy, Path(folder)))


def _command(home: Path, ask: Ask, policy: Policy, folder: Path) -> list[str]:
    words = [
        sys.executable,
        "-c",
        BOUND,
        str(os.getpid()),
        "--home",
        str(home),
        "sim",
        "--history",
        "--json",
    ]
    words += ["--skip-too-large", "--load", f"{ask.load:g}"]
    if ask.days:
        words += ["--days", str(ask.days)]
    for name in dict.fromkeys(ask.policies):
        given = {CURRENT: policy, EDITED: ask.policy}.get(name)
        if given is not None:
            file = folder / f"{name}.json"
            fields: dict[str, Any] = msgspec.to_builtins(given)
            file.write_bytes(msgspec.json.encode(fields))
            words += ["--policy", str(file)]
        else:
            words += ["--policy", name]
    return words


# A command that computes for a request, in a process of its own at low priority.


NICENESS = 10  # the cluster comes first


async def run_child(command: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Its exit code and output; cancelling this ends the process."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        out, err = await process.communicate()
        return process.returncode or 0, out, err
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
