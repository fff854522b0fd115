"""Slurm as a supplier of nodes: one order is one batch job of the user who runs the controller.

It keeps no facts. Slurm knows the orders by their jobs' names; HOME/slurm has, for each order, what
its machines are told (0600, because of the join token), when they end, and what they printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from shoal.engines.slurm import read, render
from shoal.engines.slurm.machine import NODE_LABEL
from shoal.machine.ends import EndNote
from shoal.machine.files import write_private
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase, Provision, Release, SupplyReport
from shoal.ports import SupplyContext, SupplyError

COMMAND_TIMEOUT_S = 30.0
LAST_WORDS_BYTES = 4096
KEPT_ORDERS = 200  # whose output stays in HOME/slurm
ENDS = ".ends"


class SlurmSupplier:
    engine = "slurm"

    def __init__(self, context: SupplyContext, environ: Mapping[str, str] | None = None) -> None:
        self._token = context.join_token
        self._folder = context.home / "slurm"
        environ = os.environ if environ is None else environ
        self._env = render.environment(environ)
        self._place = render.Place(
            cluster=context.cluster,
            folder=str(self._folder),
            url=context.join_url,
            python=context.python,
            path=environ.get("PATH", os.defpath),
        )
        self._version: tuple[int, int] | None = None
        self._json = True  # until a squeue without it says so

    async def look(self) -> SupplyReport:
        try:
            jobs = read.orders(await self._jobs(), self._place.cluster)
        except SupplyError as error:
            return SupplyReport(engine=self.engine, problem=str(error))
        found = []
        for order, all_of_it in jobs.items():
            job = read.chosen(all_of_it)
            phase, failed = read.phase_of(job)
            if phase is OrderPhase.RUNNING:
                self._note_end(order, job)
            ended = phase is OrderPhase.ENDED
            words = _last_words(self._file(order, ".out")) if ended and failed else ""
            found.append(read.status(job, order, words))
            if ended:
                self._forget(order)
        return SupplyReport(engine=self.engine, orders=tuple(found))

    async def provision(self, command: Provision) -> None:
        argv = render.sbatch(command, self._place)
        known = read.orders(await self._jobs(), self._place.cluster)
        if command.order in known:
            return
        self._prepare(command, known)
        code, _, err = await self._call(argv, render.script(command, self._place))
        if code == 0:
            return
        self._forget(command.order)
        text = read.refusal(err)
        if text.startswith("partition:"):
            text += await self._known_partitions()
        raise SupplyError(f"{command.supply.name}: {text}")

    async def release(self, command: Release) -> None:
        jobs = read.orders(await self._jobs(), self._place.cluster).get(command.order, [])
        ids = [job.id for job in jobs if read.phase_of(job)[0] is not OrderPhase.ENDED]
        if not ids:
            return
        code, _, err = await self._call(render.scancel(ids))
        if code and not read.is_over(err):
            raise SupplyError(f"scancel {' '.join(ids)}: {read.refusal(err)}")

    async def drain(self, node: NodeSpec, why: str) -> None:
        machine = node.labels.get(NODE_LABEL, "")
        if not machine:
            raise SupplyError(f"{node.id} has no label {NODE_LABEL}, so Slurm cannot be told")
        code, _, err = await self._call(render.drain(machine, why))
        if code:
            raise SupplyError(
                f"Slurm does not let us drain {machine} ({read.refusal(err)}): tell its "
                f"administrators, or add exclude={machine} to the supply"
            )

    async def close(self) -> None:
        """Nothing is open: each call starts and ends a command of Slurm's."""

    async def _jobs(self) -> list[read.SlurmJob]:
        version = await self._checked_version()
        try:
            if self._json and version >= read.FILTERING:
                code, out, err = await self._call(render.squeue_json())
                if code == 0:
                    return read.jobs_of_json(out)
                self._json = False  # built without JSON; what is wrong otherwise shows below
            code, out, err = await self._call(render.squeue())
            if code == 0:
                return read.jobs_of_lines(out.decode(errors="replace"))
        except ValueError as error:
            raise SupplyError(str(error)) from None
        raise SupplyError(f"squeue: {read.refusal(err)}")

    async def _checked_version(self) -> tuple[int, int]:
        if self._version is None:
            code, out, err = await self._call(["sbatch", "--version"])
            found = read.version(out.decode(errors="replace")) if code == 0 else None
            if found is None:
                raise SupplyError(f"sbatch --version: {read.refusal(err)}")
            if found < read.OLDEST:
                have, oldest = (f"{major}.{minor:02}" for major, minor in (found, read.OLDEST))
                raise SupplyError(f"this is Slurm {have}; Shoal needs {oldest} or newer")
            self._version = found
        return self._version

    async def _known_partitions(self) -> str:
        with contextlib.suppress(SupplyError):
            code, out, _ = await self._call(render.partitions())
            names = read.partition_names(out.decode(errors="replace")) if code == 0 else []
            if names:
                return f"; there are {', '.join(names[:20])}"
        return ""

    async def _call(self, argv: list[str], stdin: str = "") -> tuple[int, bytes, str]:
        """One command of Slurm's: its status, output and complaints. If slurmctld is away, that is
        not an answer."""
        try:
            process = await self._start(argv, stdin)
        except OSError as error:
            raise SupplyError(
                f"{argv[0]} cannot be started here ({error.strerror}): run the controller where "
                "Slurm's commands are, and with them in PATH"
            ) from None
        try:
            out, err = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
        except TimeoutError:
            raise SupplyError(
                f"slurmctld does not answer: {argv[0]} took longer than {COMMAND_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        complaints = err.decode(errors="replace")
        code = process.returncode or 0
        if code and read.unreachable(complaints):
            raise SupplyError(read.absence(complaints))
        return code, out, complaints

    async def _start(self, argv: list[str], stdin: str) -> asyncio.subprocess.Process:
        """Its input is a file: a command that fails at once would break a pipe."""
        times = {"SLURM_TIME_FORMAT": "%s"} if argv[0] == "squeue" else {}
        with tempfile.TemporaryFile() as file:
            file.write(stdin.encode())
            file.seek(0)
            return await asyncio.create_subprocess_exec(
                *argv,
                env=self._env | times,
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )

    # -- files of orders -------------------------------------------------------------------

    def _file(self, order: str, ending: str) -> Path:
        return self._folder / f"{order}{ending}"

    def _prepare(self, command: Provision, known: Collection[str]) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._tidy(known)
            told = render.settings(command, self._place, self._token)
            write_private(self._file(command.order, ".json"), told)
        except OSError as error:
            raise SupplyError(f"{self._folder}: {error.strerror}") from None

    def _note_end(self, order: str, job: read.SlurmJob) -> None:
        """The machines follow this file: administrators may change a time limit."""
        if job.ends_s is None or not read.limited(job.ends_s, time.time()):
            return
        told = EndNote(at=job.ends_s, why=f"time limit of Slurm job {job.id}")
        data, path = msgspec.json.encode(told), self._file(order, ENDS)
        with contextlib.suppress(OSError):  # a full disk; the machines know the first end
            if not path.exists() or path.read_bytes() != data:
                write_private(path, data)

    def _forget(self, order: str) -> None:
        """What it printed stays for a while."""
        for ending in (".json", ".nodes", ".notice", ENDS):
            with contextlib.suppress(OSError):
                self._file(order, ending).unlink(missing_ok=True)

    def _tidy(self, known: Collection[str]) -> None:
        """Orders may have ended while no controller looked."""
        for path in self._folder.glob("o*.json"):
            if path.stem not in known:
                self._forget(path.stem)
        outputs = sorted(self._folder.glob("o*.out"), key=lambda path: int(path.stem[1:] or 0))
        for path in outputs[:-KEPT_ORDERS]:
            path.unlink(missing_ok=True)


def _last_words(path: Path) -> str:
    """The last line that its machines printed."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return ([line for line in said if not re.match(NOISE, line)] or [""])[-1][:200]


# srun's warnings, and that tasks have ended: whatever made them end was said before.
NOISE = r"srun: (?!error: )|srun: error: \S+: tasks? "
