"""`shoal.AsyncClient`: the calls of the client, awaited, in time, and cancelled."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

import shoal
from shoal.sdk.asynchronous import NOT_CALLS
from tests.live.cluster import Live


def test_the_async_client_has_every_call_of_the_client() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(shoal.AsyncClient) == public(shoal.Client) - NOT_CALLS
    for name in public(shoal.AsyncClient) - {"close", "follow"}:
        asked = inspect.signature(getattr(shoal.Client, name)).parameters
        assert inspect.signature(getattr(shoal.AsyncClient, name)).parameters == asked
        assert inspect.iscoroutinefunction(getattr(shoal.AsyncClient, name))


def test_jobs_run_side_by_side_while_their_lines_are_read(live: Live, tmp_path: Path) -> None:
    async def one(cluster: shoal.AsyncClient, number: int) -> list[str]:
        job = await cluster.run(f"echo number {number}", name=f"one-{number}")
        lines = [line async for line in cluster.follow(job.id)]
        assert (await cluster.wait(job.id)).state == "succeeded"
        return lines

    async def story() -> None:
        async with shoal.AsyncClient(home=live.home.path) as cluster:
            found = await asyncio.gather(*(one(cluster, number) for number in range(5)))
            assert found == [[f"number {number}"] for number in range(5)]
            with pytest.raises(shoal.ShoalError, match="there is no field") as caught:
                await cluster.run("true", gpu=1)
            assert caught.value.field == ""

    asyncio.run(story())


def test_a_cancelled_call_ends_at_once_and_the_client_goes_on(live: Live) -> None:
    async def story() -> None:
        async with shoal.AsyncClient(home=live.home.path) as cluster:
            job = await cluster.run("sleep 600")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await cluster.wait(job.id)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(cluster.follow(job.id)), 0.3)
            waiting = asyncio.create_task(cluster.wait(job.id))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await cluster.cancel(job.id)).id == job.id
            last = asyncio.create_task(cluster.job(job.id, wait_for="finished", wait_s=30))
            assert (await last).state == "cancelled"
            other = await cluster.run("sleep 600")
            left = asyncio.create_task(cluster.wait(other.id))
            await asyncio.sleep(0.1)  # in its thread, or not yet: both must end
        with pytest.raises((shoal.ShoalError, asyncio.CancelledError)):
            await left
        with pytest.raises(RuntimeError, match="shutdown"):
            await cluster.status()
        live.client.cancel(other.id)

    asyncio.run(asyncio.wait_for(story(), 120))


def test_many_that_wait_leave_room_for_the_call_that_they_wait_for(live: Live) -> None:
    async def story() -> None:
        async with shoal.AsyncClient(home=live.home.path) as cluster:
            job = await cluster.run("sleep 600")
            waiting = [asyncio.create_task(cluster.wait(job.id)) for _ in range(100)]
            await asyncio.sleep(0.5)  # all threads that they may have are theirs
            await cluster.cancel(job.id)
            assert {view.state for view in await asyncio.gather(*waiting)} == {"cancelled"}

    asyncio.run(asyncio.wait_for(story(), 120))
