"""The API's curves: what jobs, nodes and services did over time."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.params import Parameter

from shoal.api.principal import Needs
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.model.node import NodeIntent
from shoal.model.samples import NodeSample
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries

SinceMs = Annotated[int, Parameter(ge=0, le=2**53 - 1)]


class Series(Controller):
    """`since_ms`: only points after it, for a client that has the earlier ones."""

    path = "/v1"
    opt = Needs.READ.opt

    @get("/jobs/{job_id:str}/series")
    async def job(
        self,
        reach: Reach,
        history: History,
        job_id: str,
        since_ms: SinceMs = 0,
        members: bool = True,
    ) -> JobSeries:
        """`members`: false leaves out what each member did, which is most of it."""
        reach.job(job_id)
        return await history.job(job_id, since_ms, members=members)

    @get("/samples", sync_to_thread=False)
    def samples(self, history: History) -> dict[str, NodeSample]:
        """The newest sample of each node that reports its load."""
        return history.newest

    @get("/nodes/{node:str}/series", sync_to_thread=False)
    def node(
        self, loop: ControlLoop, history: History, node: str, since_ms: SinceMs = 0
    ) -> NodeSeries:
        known = loop.state.nodes.get(node)
        if known is None or known.intent is NodeIntent.REMOVED:
            raise Refusal(404, f"there is no node {node[:64]!r}; see: shoal nodes", "node")
        return history.node(node, since_ms)

    @get("/services/{name:str}/series", sync_to_thread=False)
    def service(
        self, reach: Reach, history: History, name: str, since_ms: SinceMs = 0
    ) -> ServiceSeries:
        # The name may have been another tenant's before.
        began_ms = reach.service(name).since_ms
        return history.service(name, max(since_ms, began_ms))
