"""How many jobs each tenant has, for the caps of a policy: kept by `apply`, one look per request.

A tenant's numbers include those of its branches. A service counts as the most replicas that it may
have, from when it is set until it is gone, whatever it runs at the moment. So its replicas never
have to be counted again: a cap cannot stop a service from healing, scaling or rolling out. An array
counts as its live elements, but at least as one job.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.core.state.accounts import Accounts
from shoal.model.job import Job, Phase
from shoal.model.service import ServiceSpec

EVERYONE = ""  # in place of a tenant: the whole cluster


class Tally(msgspec.Struct):
    """`live` counts jobs that have not ended and replicas that services may have; `waiting` counts
    the jobs among them that wait, without replicas."""

    live: dict[str, int] = {}
    waiting: dict[str, int] = {}
    elements: dict[str, int] = {}  # array -> its live elements

    def job(self, accounts: Accounts, job: Job, change: int) -> None:
        """The job comes into the state (1) or leaves it (-1)."""
        if not job.spec.service:
            if self._counts(job, change):
                _add(self.live, accounts, job.spec.tenant, change)
            if job.phase is Phase.WAITING:
                _add(self.waiting, accounts, job.spec.tenant, change)

    def _counts(self, job: Job, change: int) -> bool:
        """The first live element of an array is the one that the array itself counts as."""
        if not job.spec.array:
            return True
        count = self.elements.get(job.spec.array, 0) + change
        self.elements[job.spec.array] = count
        if not count:
            del self.elements[job.spec.array]
        return max(count, count - change) > 1

    def array(self, accounts: Accounts, array: Job, change: int) -> None:
        _add(self.live, accounts, array.spec.tenant, change)

    def wait(self, accounts: Accounts, job: Job, change: int) -> None:
        """A live job starts (1) or stops (-1) waiting."""
        if not job.spec.service:
            _add(self.waiting, accounts, job.spec.tenant, change)

    def service(self, accounts: Accounts, spec: ServiceSpec, change: int) -> None:
        _add(self.live, accounts, spec.replica.tenant, change * spec.scale.most)


def _add(counts: dict[str, int], accounts: Accounts, tenant: str, change: int) -> None:
    lineage = accounts.lineage(tenant)
    names: Iterable[str] = (EVERYONE, tenant)
    if len(lineage) > 1 or tenant == EVERYONE:
        names = dict.fromkeys((EVERYONE, *(one.name for one in lineage)))
    for name in names:
        count = counts[name] + change if name in counts else change
        if count:
            counts[name] = count
        elif name in counts:
            del counts[name]
