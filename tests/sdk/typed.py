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


def rank(base: int) -> str:
    return str(base)


def functions(cluster: shoal.Client) -> None:
    call = shoal.run(rank, 3, gpus=1, members=2)
    assert_type(call, shoal.Call[str])
    assert_type(call.result(timeout_s=3), str)
    assert_type(cluster.call(len, "abc").results(), list[int])
    shoal.run("python train.py")  # type: ignore[arg-type]


async def awaited(cluster: shoal.AsyncClient) -> None:
    job = await cluster.run("python train.py", gpus=8)
    assert_type(job, JobView)
    assert_type(await cluster.nodes(), list[NodeView])
    assert_type(await cluster.call(rank, 3), shoal.Call[str])
    async for line in cluster.follow(job.id):
        assert_type(line, str)
    await cluster.wait(job.id, timeout=3)  # type: ignore[call-arg]
