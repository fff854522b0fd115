"""The API's curves: what jobs, nodes and services did over time."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.params import Parameter

from shoal.api.problems import Refusal
from shoal.api.views import find_job
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.model.node import NodeIntent
from shoal.model.samples import NodeSample
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries

SinceMs = Annotated[int, Parameter(ge=0, le=2**53 - 1)]


class Series(Controller):
    """`since_ms`: only points after it, for a client that has the earlier ones."""

    path = "/v1"

    @get("/jobs/{job_id:str}/series")
    async def job(
        self, loop: ControlLoop, history: History, job_id: str, since_ms: SinceMs = 0
    ) -> JobSeries:
        if find_job(loop, job_id) is None:
            raise Refusal(404, f"there is no job {job_id[:64]!r}; see: shoal ps -a", "job")
        return await history.job(job_id, since_ms)

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
        self, loop: ControlLoop, history: History, name: str, since_ms: SinceMs = 0
    ) -> ServiceSeries:
        if name not in loop.state.services:
            raise Refusal(404, f"there is no service {name[:64]!r}; see: shoal services", "service")
        return history.service(name, since_ms)
