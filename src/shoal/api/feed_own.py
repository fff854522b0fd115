"""The page's feed as one tenant may see it: cut out of what was found once for all pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from shoal.api.principal import acting
from shoal.api.reach import Reach
from shoal.api.views import STANDING_HIDDEN, status_view
from shoal.control.loop import ControlLoop
from shoal.model.feed import Change, Held, JobLine, NodeLine, ServiceLine, Snapshot
from shoal.model.identity import Role
from shoal.model.policy import Others
from shoal.model.reason import OPERATOR, Reader, render


class Gone(msgspec.Struct):
    """Tenants of jobs and services that no longer exist: their lines are gone, too."""

    jobs: dict[str, str] = {}
    services: dict[str, str] = {}


Line = TypeVar("Line", NodeLine, JobLine, ServiceLine)
Whole = TypeVar("Whole", Snapshot, Change)


def for_all(whole: Whole) -> Whole:
    """For those who see all."""
    return msgspec.structs.replace(
        whole,
        nodes=[readable(line, OPERATOR) for line in whole.nodes],
        jobs=[readable(line, OPERATOR) for line in whole.jobs],
        services=[readable(line, OPERATOR) for line in whole.services],
        ended=[readable(line, OPERATOR) for line in whole.ended],
    )


def readable(line: Line, reader: Reader) -> Line:
    why = render(line.why, reader)
    return line if why == line.why else msgspec.structs.replace(line, why=why)


class Own:
    """Made for one change: it reads the state as it is then."""

    def __init__(self, loop: ControlLoop, tenant: str) -> None:
        self.tenant = tenant
        self._reach = Reach(loop, acting(loop.state.identity, "", tenant, Role.VIEWER))

    def snapshot(self, whole: Snapshot) -> Snapshot:
        return Snapshot(
            status=status_view(self._reach),
            nodes=self._nodes(whole.nodes),
            jobs=self._jobs(whole.jobs),
            services=self._services(whole.services),
            ended=self._jobs(whole.ended),
            busy=whole.busy,
        )

    def change(self, whole: Change, gone: Gone) -> Change:
        return Change(
            status=status_view(self._reach),
            nodes=self._nodes(whole.nodes),
            jobs=self._jobs(whole.jobs),
            services=self._services(whole.services),
            ended=self._jobs(whole.ended),
            gone_nodes=whole.gone_nodes,
            gone_jobs=[job for job in whole.gone_jobs if gone.jobs.get(job) == self.tenant],
            gone_services=[
                name for name in whole.gone_services if gone.services.get(name) == self.tenant
            ],
            busy=whole.busy,
        )

    def _jobs(self, lines: Iterable[JobLine]) -> list[JobLine]:
        own = (line for line in lines if line.tenant == self.tenant)
        return [readable(line, self._reach.reader) for line in own]

    def _services(self, lines: Iterable[ServiceLine]) -> list[ServiceLine]:
        own = (line for line in lines if line.tenant == self.tenant)
        return [readable(line, self._reach.reader) for line in own]

    def _nodes(self, lines: Iterable[NodeLine]) -> list[NodeLine]:
        return [
            msgspec.structs.replace(
                line,
                held=tuple(map(self._held, line.held)),
                why=STANDING_HIDDEN if line.standing else self._reach.text(line.why),
                asleep=tuple(job for job in line.asleep if self._own(job)),
            )
            for line in lines
        ]

    def _own(self, job_id: str) -> bool:
        job = self._reach.loop.state.jobs.get(job_id)
        return job is not None and job.spec.tenant == self.tenant

    def _held(self, held: Held) -> Held:
        """The GPUs of others are taken; their job has no id here, at most its tenant as @TENANT."""
        loop = self._reach.loop
        job = loop.state.jobs.get(held.job)
        if job is not None and job.spec.tenant == self.tenant:
            return held
        named = job is not None and loop.policy.others is Others.TENANTS
        name = f"@{job.spec.tenant}" if named and job is not None else ""
        return Held(name, 0, held.gpus, held.milli)
