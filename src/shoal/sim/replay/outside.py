"""Jobs of a trace that are over a cap: their users submit them again when there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from shoal.core.features.caps import CLUSTER_JOBS_MAX, share_left, too_many
from shoal.core.state.accounts import Accounts
from shoal.core.state.state import State
from shoal.core.state.tally import EVERYONE, Tally
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.sim.replay.traces import Arrival


class Outside:
    """The jobs of each tenant stay in the order of the trace."""

    def __init__(self, policy: Policy) -> None:
        self._capped = any(one.jobs_max or one.waiting_max for one in policy.tenants)
        self._accounts = Accounts(policy)  # the state has this tree from the first step on
        self._lines: dict[str, deque[Arrival]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def first(self) -> Arrival | None:
        return next((line[0] for line in self._lines.values()), None)

    def let_in(self, state: State, come: Sequence[Arrival]) -> list[Arrival]:
        """Those that have room now, of those who come and those who are outside already."""
        live = state.tally.live.get(EVERYONE, 0)
        room = share_left(CLUSTER_JOBS_MAX, live, live)  # if all of them are one tenant's
        if not (self._capped or self._lines or len(come) > room):
            return list(come)
        for arrival in come:
            self._lines.setdefault(arrival.spec.tenant, deque()).append(arrival)
        # What this step will have accepted counts for the next one in line.
        tally, entering = msgspec.structs.replace(state.tally), []
        tally.live, tally.waiting = dict(tally.live), dict(tally.waiting)
        for tenant, line in list(self._lines.items()):
            while line and self._room(tally, tenant):
                entering.append(line.popleft())
                spec = entering[-1].spec
                tally.job(self._accounts, Job(id="", number=0, spec=spec, submitted_ms=0), 1)
            if not line:
                del self._lines[tenant]
        return entering

    def has_room(self, state: State) -> bool:
        return any(self._room(state.tally, tenant) for tenant in self._lines)

    def _room(self, tally: Tally, tenant: str) -> bool:
        return too_many(tally, self._accounts, tenant, 1, waiting=1) is None
