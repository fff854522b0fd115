"""The handlers that the page needs, and the dependencies that they share with all others."""

from __future__ import annotations

from pathlib import Path

from litestar import Controller
from litestar.di import Provide

from shoal.api.access import Access
from shoal.api.certificate import Certificate
from shoal.api.feed import Feed
from shoal.api.forms import Forms
from shoal.api.moment import MomentApi
from shoal.api.oidc import OpenId, SignIns
from shoal.api.plan import Planner, Plans
from shoal.api.principal import Principal, principal_of
from shoal.api.queue import Foresight, Waiting
from shoal.api.reach import Reach
from shoal.api.simulate import Simulations, Simulator
from shoal.api.stream import Live
from shoal.api.timeline import Timeline
from shoal.api.web import Files, Sessions
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores

HANDLERS: tuple[type[Controller], ...] = (
    Files,
    Sessions,
    OpenId,
    Live,
    Waiting,
    Timeline,
    MomentApi,
    Forms,
    Simulations,
    Plans,
    Certificate,
)


def provided(
    loop: ControlLoop, access: Access, feed: Feed, home: Path | None, stores: Stores | None
) -> dict[str, Provide]:
    simulator, foresight, planner = Simulator(loop, home), Foresight(), Planner()
    # A standby forwards all sign-ins.
    settings = stores.settings if stores is not None and stores.leads else None
    sign_ins = SignIns(settings, loop.clock.now_ms, loop.alarms)

    async def provide_feed() -> Feed:
        await loop.settled()
        return feed

    async def provide_reach(who: Principal) -> Reach:
        """Needs `who`, so that it is provided last: handlers start from the stored state."""
        await loop.settled()
        return Reach(loop, who)

    return {
        "who": Provide(principal_of, sync_to_thread=False),
        "reach": Provide(provide_reach),
        "access": Provide(lambda: access, sync_to_thread=False),
        "feed": Provide(provide_feed),
        "foresight": Provide(lambda: foresight, sync_to_thread=False),
        "sign_ins": Provide(lambda: sign_ins, sync_to_thread=False),
        "openid_on": Provide(lambda: sign_ins.on, sync_to_thread=False),
        "simulator": Provide(lambda: simulator, sync_to_thread=False),
        "planner": Provide(lambda: planner, sync_to_thread=False),
    }
