"""What this cluster offers to a neighbor: when its jobs would start, and at which price."""

from __future__ import annotations

import asyncio
import time
from fractions import Fraction
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal import __version__
from shoal.api.audit import quiet
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.problems import Refusal, invalid
from shoal.api.quotas import charge
from shoal.api.reach import Reach
from shoal.api.views import status_view
from shoal.calls.cluster import ClusterCalls
from shoal.core.answers.offer import offer
from shoal.core.state.gpu_caps import cap_left
from shoal.core.state.state import State
from shoal.ledger.book_state import Hardware
from shoal.ledger.live import LiveLedger
from shoal.ledger.prices import rate_of
from shoal.model.job import JobSpec
from shoal.model.ledger import PriceList
from shoal.model.node import NodeHealth
from shoal.model.offers import OFFERS_MAX, Offer, OffersView
from shoal.model.policy import site_labels
from shoal.model.resources import WHOLE_GPU_MILLI, Kind

TOTAL_S_MAX = 2.0  # for one answer; the loop takes turns between the jobs
LATE = "there was no time to look at it; ask for fewer jobs at a time"
Rates = dict[Kind, Fraction | None]  # of a GPU for an hour, the highest; None: not known


class Offers:
    @handles(ClusterCalls.offers)
    async def offers(
        self,
        request: Request,
        reach: Reach,
        live_ledger: LiveLedger | None,
        data: Annotated[list[Any], Meta(max_length=OFFERS_MAX)],
    ) -> OffersView:
        quiet(request.scope)
        charge(request, len(data) - 1)
        loop, prices = reach.loop, live_ledger.prices if live_ledger is not None else PriceList()
        rates, until_s = rates_of(loop.state, prices), time.monotonic() + TOTAL_S_MAX
        found: list[Offer] = []
        for one in data:
            late = time.monotonic() > until_s
            found.append(Offer(why=LATE) if late else _offer(reach, one, rates))
            await asyncio.sleep(0)
            await loop.settled()
        status, state = status_view(reach), loop.state
        lineage = state.accounts.lineage(reach.who.tenant)
        caps = [one.gpus_max for one in lineage if one.gpus_max]
        left = [cap_left(state, one.name) // WHOLE_GPU_MILLI for one in lineage if one.gpus_max]
        return OffersView(
            offers=found,
            now_ms=loop.clock.now_ms(),
            version=__version__,
            gpus=min([status.gpus, *caps]),
            gpus_free=max(0, min([status.gpus_free, *left])),
            currency=prices.currency,
            labels=site_labels(loop.policy),
            cluster=loop.cluster,
            tenant=reach.who.tenant,
            waiting=loop.state.queue.size,
            price=lowest(rates),
        )


def _offer(reach: Reach, given: Any, rates: Rates) -> Offer:
    """A refusal is an answer about this job."""
    loop = reach.loop
    try:
        spec = reach.spec(msgspec.convert(given, JobSpec, strict=False))
    except msgspec.ValidationError as error:
        return Offer(why=_text(invalid(error)))
    except Refusal as refusal:
        return Offer(why=_text(refusal))
    found = offer(loop.state, spec, reach.tenant, loop.clock.now_ms())
    suited = [rate for kind, rate in rates.items() if spec.gpus and spec.demand.suits(kind)]
    known = [float(rate) for rate in suited if rate is not None]
    price = max(known) if known and len(known) == len(suited) else None
    return msgspec.structs.replace(found, why=reach.text(found.why), price=price)


def _text(refusal: Refusal) -> str:
    problem = refusal.problem
    return f"{problem.field}: {problem.message}" if problem.field else problem.message


def lowest(rates: Rates) -> float | None:
    return min((float(rate) for rate in rates.values() if rate is not None), default=None)


def rates_of(state: State, prices: PriceList) -> Rates:
    rates: Rates = {}
    for node in state.order if prices.gpus or prices.nodes else ():
        if node.health is not NodeHealth.LOST and node.spec.gpus:
            machine = Hardware(node.spec.gpu_model, node.spec.gpus)
            kind, rate = state.rooms[node.index].kind, rate_of(prices, node.id, machine).per_hour
            before = rates.get(kind, rate)
            rates[kind] = None if rate is None or before is None else max(rate, before)
    return rates
