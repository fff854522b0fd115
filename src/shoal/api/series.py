"""The API's curves: what jobs, nodes and services did over time."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.cluster import NodeCalls, ServiceCalls
from shoal.calls.jobs import JobCalls
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.state.state import Node
from shoal.model.node import NodeIntent
from shoal.model.series import JobSeries, NodeSample, NodeSeries, ServiceSeries

SinceMs = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class Series:
    """`since_ms`: only points after it, for a client that has the earlier ones."""

    @handles(JobCalls.job_series)
    async def job(
        self,
        reach: Reach,
        history: History,
        job_id: str,
        since_ms: SinceMs = 0,
        members: bool = True,
    ) -> JobSeries:
        reach.job(job_id)
        return await history.job(job_id, since_ms, members=members)

    @handles(NodeCalls.samples)
    def samples(self, history: History) -> dict[str, NodeSample]:
        return history.newest

    @handles(NodeCalls.node_series)
    def node(
        self, loop: ControlLoop, history: History, node: str, since_ms: SinceMs = 0
    ) -> NodeSeries:
        known_node(loop, node)
        return history.node(node, since_ms)

    @handles(ServiceCalls.service_series)
    def service(
        self, reach: Reach, history: History, name: str, since_ms: SinceMs = 0
    ) -> ServiceSeries:
        # The name may have been another tenant's before.
        began_ms = reach.service(name).since_ms
        return history.service(name, max(since_ms, began_ms))


def known_node(loop: ControlLoop, node: str) -> Node:
    known = loop.state.nodes.get(node)
    if known is None or known.intent is NodeIntent.REMOVED:
        raise Refusal(404, f"there is no node {node[:64]!r}; see: shoal nodes", "node")
    return known
