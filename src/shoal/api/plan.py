"""Plans of training runs for the page: `shoal plan` in a process of its own, bounded in time."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from typing import Annotated, Any

import msgspec

from shoal.api.handling import handles
from shoal.api.http import Response
from shoal.api.problems import Refusal
from shoal.api.simulate import BOUND, run_child
from shoal.calls.page import PageCalls
from shoal.ledger.live import LiveLedger
from shoal.model.ledger import ANY, PriceList

LIMIT_S = 60.0
SOURCE = "the cluster's price list"
AT_ONCE = 2
ANSWER_BYTES_MAX = 1024 * 1024

Words = Annotated[str, msgspec.Meta(max_length=40)]


class PlanAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the flags of `shoal plan`. Models and GPUs are those that are known by name: the page
    reads no file of the head."""

    model: Words
    tokens: Words
    gpu: Words = "h100"
    nodes: Words = ""
    deadline: Words = ""
    budget: Words = ""
    batch: Words = ""
    region: Words = ""


class PlanChoices(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    gpus: list[str]


class Planner:
    """Runs at most AT_ONCE plans at a time."""

    def __init__(self) -> None:
        self._running = 0

    async def plan(self, ask: PlanAsk, prices: PriceList | None = None) -> bytes:
        """With these prices, if they have one for this GPU; otherwise list prices."""
        if prices is not None and (own := _priced(ask, prices)):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                file.write(msgspec.json.encode(own))
                file.flush()
                out = await self._plan([*_command(ask), f"--prices={file.name}"])
                return out.replace(file.name.encode(), SOURCE.encode())
        return await self._plan(_command(ask))

    async def _plan(self, command: list[str]) -> bytes:
        if self._running >= AT_ONCE:
            raise Refusal(409, f"{AT_ONCE} plans are being computed; try again in a few seconds")
        self._running += 1
        try:
            async with asyncio.timeout(LIMIT_S):
                code, out, err = await run_child(command)
        except TimeoutError:
            raise Refusal(422, f"it took more than {LIMIT_S:.0f} s; use shoal plan") from None
        except OSError as error:
            raise Refusal(422, f"it cannot be started: {error}") from None
        finally:
            self._running -= 1
        if code or len(out) > ANSWER_BYTES_MAX:
            told = err.decode(errors="replace").strip().splitlines()
            said = told[-1][:500].removeprefix("error: ") if told else f"it ended with code {code}"
            raise Refusal(422, said)
        return out


class Plans:
    @handles(PageCalls.plan_choices)
    def choices(self) -> PlanChoices:
        return _choices()

    @handles(PageCalls.plan)
    async def plan(
        self, planner: Planner, live_ledger: LiveLedger | None, data: PlanAsk
    ) -> Response[bytes]:
        listed = _choices()
        for field, known in (("model", listed.models), ("gpu", listed.gpus)):
            name = getattr(data, field)
            if name not in known:
                raise Refusal(422, f"there is no {name!r}; GET /v1/plan lists them", field)
        prices = live_ledger.prices if live_ledger is not None else None
        return Response(await planner.plan(data, prices), media_type="application/json")


def _choices() -> PlanChoices:
    from shoal.plan import library  # with the first plan that somebody wants

    return PlanChoices(models=[*library.models()], gpus=[*library.hardware().accelerators])


def _priced(ask: PlanAsk, prices: PriceList) -> dict[str, Any] | None:
    """The cluster's prices if they have one for this GPU, whose model may have a longer name there:
    'NVIDIA H100 80GB HBM3' is an h100."""
    if not prices.currency:
        return None
    named = (
        price
        for model, price in prices.gpus.items()
        if ask.gpu.lower() in re.split(r"[\s_-]+", model.lower())
    )
    price = next(named, prices.gpus.get(ANY))
    if price is None or not price.priced:
        return None
    fields = {"currency": prices.currency, "pue": prices.pue, "co2_g_per_kwh": prices.co2_g_per_kwh}
    return _given({**fields, "gpus": {ask.gpu: _given(msgspec.to_builtins(price))}})


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """As a file has it: without what is not set."""
    return {name: value for name, value in fields.items() if value is not None}


def _command(ask: PlanAsk) -> list[str]:
    words = [sys.executable, "-c", BOUND, str(os.getpid()), "plan", "--json"]
    fields: dict[str, Any] = msgspec.to_builtins(ask)
    return words + [f"--{name}={value}" for name, value in fields.items() if value]
