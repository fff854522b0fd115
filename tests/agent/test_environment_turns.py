"""Environments: one tenant's slow builds keep nobody else from starting."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.agent import environments
from shoal.agent.environments import Environments
from shoal.model.commands import Prepare

# As the real one, but it waits for a file that its requirements name, if they do.
BUILD = """
set -e
read wanted < "$2/requirements.txt"
while [ "${wanted#/}" != "$wanted" ] && [ ! -e "$wanted" ]; do sleep 0.02; done
: > "$2/$5"
"""


def order(tenant: str, requirements: str) -> Prepare:
    return Prepare(
        node="a",
        incarnation=1,
        job="j1",
        argv=("x",),
        env={},
        workdir="/",
        requirements=f"{requirements}\n",
        tenant=tenant,
    )


@contextlib.asynccontextmanager
async def node(path: Path) -> AsyncIterator[Environments]:
    """The agent waits for its children."""
    made = Environments(path, set)

    loop = asyncio.get_running_loop()

    def reap() -> None:
        for pid in made.pids():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                made.ended(pid, os.waitstatus_to_exitcode(status))
        loop.call_later(0.01, reap)

    reap()
    yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_BUILD", BUILD)


def test_a_tenant_whose_builds_hang_leaves_the_place_to_others(tmp_path: Path) -> None:
    async def story() -> None:
        go = tmp_path / "go"
        async with node(tmp_path) as made:
            output = tmp_path / "output"
            slow = [
                asyncio.create_task(made.get(order("red", f"{go}\n#{n}"), output)) for n in range(4)
            ]
            await asyncio.sleep(0)
            found = await made.get(order("blue", "fast"), output)
            assert found.is_dir()
            assert not any(task.done() for task in slow)
            assert len(made.pids()) == 1, "a tenant builds one at a time"
            go.touch()
            assert len(set(await asyncio.gather(*slow))) == 4

    asyncio.run(story())


def test_not_even_several_tenants_hold_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(environments, "PLACE_S_MAX", 0.1)
        go = tmp_path / "go"
        async with node(tmp_path) as made:
            output = tmp_path / "output"
            slow = [
                asyncio.create_task(made.get(order(f"red{n}", f"{go}\n#{n}"), output))
                for n in range(environments.PLACES)
            ]
            await asyncio.sleep(0)
            assert (await made.get(order("blue", "fast"), output)).is_dir()
            assert not any(task.done() for task in slow)
            go.touch()
            await asyncio.gather(*slow)

    asyncio.run(story())


def test_who_has_most_environments_gives_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(environments, "KEPT_MAX", 4)
        async with node(tmp_path) as made:
            output = tmp_path / "output"
            await made.get(order("blue", "first"), output)
            for number in range(8):
                await made.get(order("red", f"r{number}"), output)
            assert made.here(order("blue", "first")) is not None, "the least recently used of all"
            kept = [n for n in range(8) if made.here(order("red", f"r{n}")) is not None]
            assert kept == [5, 6, 7]

    asyncio.run(story())
