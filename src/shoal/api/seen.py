"""Events as their reader may see them: each event declares who that is."""

from __future__ import annotations

from shoal.api.reach import Reach
from shoal.model.events import Recorded
from shoal.model.policy import Policy


def seen_events(
    reach: Reach, records: list[Recorded], owners: dict[str, str] | None = None
) -> list[Recorded]:
    """Without what the sender may not see, and with reasons as they read them. `owners`: tenants of
    jobs, as far as they were looked up before."""
    reader = _Sender(reach, owners or {})
    shown = ((record.seq, record.event.shown_to(reader)) for record in records)
    return [Recorded(seq, event) for seq, event in shown if event is not None]


class _Sender:
    """The sender of a request, as a reader of events."""

    def __init__(self, reach: Reach, owners: dict[str, str]) -> None:
        self._reach, self._owners = reach, owners
        self.admin, self.sees_all = reach.who.admin, reach.who.sees_all
        self.text = reach.text

    def sees_job(self, job: str) -> bool:
        if self.sees_all:
            return True
        tenant = self._owners.get(job)
        if tenant:
            return self._reach.who.sees_job(tenant, job)
        return self._reach.find(job) is not None

    def sees_tenant(self, tenant: str, at_ms: int) -> bool:
        who = self._reach.who
        return self.sees_all or (who.sees(tenant) and at_ms >= who.since_ms)

    def sees_service(self, service: str, at_ms: int) -> bool:
        """The name may have been another tenant's before."""
        known = self._reach.loop.state.services.get(service)
        return self.sees_all or (
            known is not None
            and self._reach.who.sees(known.spec.replica.tenant)
            and at_ms >= known.since_ms
        )

    def policy(self, policy: Policy) -> Policy:
        return self._reach.policy(policy)
