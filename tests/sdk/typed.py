"""A user's script as type checkers see it: `make lint` runs mypy --strict over it. Nothing here is
run. An ignored error that is none would be reported, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import shoal
from shoal.model.views import Done, JobRow, JobView, LogView, NodeView, ServiceView


def calls(cluster: shoal.Client) -> None:
    job = cluster.run("python train.py", gpus=8, env={"LR": 3})
    assert_type(job, JobView)
    assert_type(cluster.wait(job.id, timeout_s=3), JobView)
    assert_type(cluster.follow(job.id), Iterator[str])
    assert_type(cluster.logs(job.id), LogView)
    assert_type(cluster.jobs(finished=True), list[JobRow])
    assert_type(cluster.cancel(job.id), Done)
    assert_type(cluster.serve("chat", ["python", "serve.py"]), ServiceView)
    assert_type(cluster.map(len, ["a", "bc"]), Iterator[int])
    cluster.wait(7)  # type: ignore[arg-type]
    cluster.jobs(ended=True)  # type: ignore[call-arg]


async def awaited(cluster: shoal.AsyncClient) -> None:
    job = await cluster.run("python train.py", gpus=8)
    assert_type(job, JobView)
    assert_type(await cluster.nodes(), list[NodeView])
    async for line in cluster.follow(job.id):
        assert_type(line, str)
    await cluster.wait(job.id, timeout=3)  # type: ignore[call-arg]
