"""Drives the engines that bring nodes: looks at what each has, carries out what a step decided, and
reports what it finds to the loop.

Each engine has one task, so that a slow one holds up no other, and at most one call to an engine is
under way. Commands may get lost here: the next report shows what is missing, and the next step asks
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from shoal import extensions
from shoal.control.loop import ControlLoop, Unreadable
from shoal.machine.enduring import enduring
from shoal.model.supply import (
    REASON_CHARACTERS_MAX,
    DrainMachine,
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    SupplyCommand,
    SupplyReport,
    for_engine,
)
from shoal.ports import Supplier, SupplyContext, SupplyError

log = logging.getLogger("shoal.supplying")

LOOK_S = 10.0  # between two looks at an engine where nothing is expected to happen
LOOK_SOON_S = 2.0  # while orders are on their way or being given back
PROBLEM_PAUSE_S = 2.0  # after the first failure; each further one doubles it
PROBLEM_PAUSE_S_MAX = 60.0
CALL_S = 60.0  # what one call to an engine may take
CLOSE_S = 5.0
ENGINES_LOOK_S = 1.0  # between two looks at which engines are wanted
COMMANDS_MAX = 1_000  # waiting for one engine; those that are dropped are derived again

T = TypeVar("T")
Build = Callable[[str], Supplier]


class Supplying:
    """All engines that the policy or an order names. `build` makes one by its name, and raises
    `SupplyError` if it cannot. When `places` (where and how nodes join) changes, engines are made
    again."""

    def __init__(
        self, loop: ControlLoop, build: Build, places: Callable[[], object] = lambda: None
    ) -> None:
        self._loop = loop
        self._build = build
        self._places = places
        self._engines: dict[str, tuple[EngineDriver, asyncio.Task[None]]] = {}
        loop.tick.supply = self.take

    def take(self, commands: Sequence[SupplyCommand]) -> None:
        """The commands of a step that is stored."""
        for command in commands:
            if isinstance(command, Provision):
                engine = command.supply.engine
                command = msgspec.structs.replace(command, supply=for_engine(command.supply))
            else:
                engine = command.engine
            if engine in self._engines:
                self._engines[engine][0].take(command)

    def look_soon(self, engine: str) -> None:
        """Something has changed there, or it answers again."""
        if engine in self._engines:
            driver, _ = self._engines[engine]
            driver.called.set()
            driver.changed.set()

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._loop.settled()
                    self._keep(self._wanted())
                except Unreadable:
                    pass  # the state is being loaded again
                await asyncio.sleep(ENGINES_LOOK_S)
        finally:
            await self._close([task for _, task in self._engines.values()])
            self._engines = {}

    def _wanted(self) -> dict[str, None]:
        state = self._loop.state
        names = [one.engine for one in self._loop.policy.supply]
        return dict.fromkeys([*names, *(one.supply.engine for one in state.orders.values())])

    def _keep(self, wanted: dict[str, None]) -> None:
        for name in wanted:
            if name not in self._engines:
                driver = EngineDriver(self._loop, name, self._build, self._places)
                task = asyncio.create_task(enduring(f"the supplier {name}", driver.run))
                self._engines[name] = (driver, task)
        for name in [name for name in self._engines if name not in wanted]:
            driver, task = self._engines.pop(name)
            task.cancel()
            self._loop.alarms.clear(driver.cause)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)


class EngineDriver:
    """One engine. A refused order is reported as ended and failed, for as long as the state has
    it."""

    def __init__(
        self, loop: ControlLoop, engine: str, build: Build, places: Callable[[], object]
    ) -> None:
        self.engine = engine
        self.cause = f"supply {engine}"  # of its alarm
        self._loop = loop
        self._build = build
        self._places = places
        self._built: object = None  # the places that the supplier knows
        self._supplier: Supplier | None = None
        self._commands: dict[tuple[str, str], SupplyCommand] = {}
        self._refused: dict[str, str] = {}  # order -> why
        self.called = asyncio.Event()
        self.changed = asyncio.Event()
        self._pause_s = 0.0

    def take(self, command: SupplyCommand) -> None:
        what = command.node.id if isinstance(command, DrainMachine) else command.order
        if len(self._commands) < COMMANDS_MAX:
            self._commands[type(command).__name__, what] = command
            self.called.set()

    async def run(self) -> None:
        try:
            while True:
                await self._round()
                await self._sleep()
        finally:
            await self._close()

    async def _close(self) -> None:
        supplier, self._supplier = self._supplier, None
        if supplier is not None:
            await asyncio.wait_for(supplier.close(), CLOSE_S)

    async def _engine(self) -> Supplier:
        places = self._places()
        if self._supplier is not None and places != self._built:
            await self._close()
        if self._supplier is None:
            self._supplier, self._built = self._build(self.engine), places
        return self._supplier

    async def _round(self) -> None:
        """Carry out what was asked for, then look at what the engine has."""
        try:
            supplier = await self._engine()
            commands, self._commands = self._commands, {}
            for command in commands.values():
                await self._carry_out(supplier, command)
            report = await self._call(supplier.look(), "list its orders")
        except SupplyError as error:
            self._pause_s = min(PROBLEM_PAUSE_S_MAX, self._pause_s * 2 or PROBLEM_PAUSE_S)
            report = SupplyReport(engine=self.engine, problem=_line(error))
        if report.problem:
            self._loop.alarms.raise_(self.cause, f"no nodes from {self.engine}: {report.problem}")
        else:
            self._pause_s = 0.0
            self._loop.alarms.clear(self.cause)
            report = await self._with_refused(report)
        self._loop.supplied(report)

    async def _carry_out(self, supplier: Supplier, command: SupplyCommand) -> None:
        match command:
            case Provision():
                try:
                    await self._call(supplier.provision(command), f"take order {command.order}")
                    self._refused.pop(command.order, None)
                except SupplyRefused as error:
                    self._refused[command.order] = _line(error)
            case Release():
                await self._call(supplier.release(command), f"end order {command.order}")
            case DrainMachine():
                try:
                    await self._call(
                        supplier.drain(command.node, command.why), f"drain {command.node.id}"
                    )
                except SupplyRefused as error:  # not allowed to us: nothing depends on it
                    log.warning("%s: %s", self.engine, error)

    async def _call(self, call: Awaitable[T], what: str) -> T:
        """A call that the engine refuses is `SupplyRefused`; one that got no answer may have been
        carried out."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except SupplyError as error:
            raise SupplyRefused(str(error)) from error
        except TimeoutError:
            raise SupplyError(f"it could not {what} within {CALL_S:g} s") from None
        except Exception as error:
            log.exception("%s could not %s", self.engine, what)
            raise SupplyRefused(f"it could not {what}: {error!r}") from error

    async def _with_refused(self, report: SupplyReport) -> SupplyReport:
        shown = {status.order for status in report.orders}
        try:
            await self._loop.settled()
            shown.update(order for order in self._refused if order not in self._loop.state.orders)
        except Unreadable:
            pass  # they are forgotten after a later look
        self._refused = {order: why for order, why in self._refused.items() if order not in shown}
        ended = tuple(
            OrderStatus(order=order, phase=OrderPhase.ENDED, reason=why, failed=True)
            for order, why in self._refused.items()
        )
        return SupplyReport(engine=self.engine, orders=(*report.orders, *ended), notes=report.notes)

    async def _sleep(self) -> None:
        wait_s = self._pause_s or (LOOK_SOON_S if self._expects() else LOOK_S)
        try:
            async with asyncio.timeout(wait_s):
                # After a failure, commands do not shorten the pause; the engine itself does.
                await (self.changed if self._pause_s else self.called).wait()
        except TimeoutError:
            pass
        self.called.clear()
        self.changed.clear()

    def _expects(self) -> bool:
        """Is an order on its way, or being given back?"""
        if not self._loop.readable:
            return True
        state = self._loop.state
        return any(
            order.release or len(state.brought.get(order.id, ())) < len(order.nodes)
            for order in state.orders.values()
            if order.supply.engine == self.engine
        )


def build_supplier(engine: str, context: SupplyContext) -> Supplier:
    """Raises `SupplyError` with one line if there is no such engine or it cannot work here."""
    try:
        kind = extensions.supplier(engine)
        return kind.build(context)
    except extensions.Missing as error:
        raise SupplyError(str(error)) from None
    except ImportError as error:
        fix = f"; install it on the head with: {kind.install}" if kind.install else ""
        raise SupplyError(f"the engine {engine} cannot be loaded ({error}){fix}") from None


class SupplyRefused(SupplyError):
    """The engine has answered, and the answer is no."""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:REASON_CHARACTERS_MAX]
