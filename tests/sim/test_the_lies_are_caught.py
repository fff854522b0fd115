"""Nodes that lie and keepers that die: without the code against them, the storm sees it."""

from __future__ import annotations

import pytest
from storm.fuzz import Run, SeedFailed, Size
from storm.world import World

from shoal.core.phases import observe
from shoal.core.state.own_members import NONE

SEEDS = 60


def first_failure() -> str:
    for seed in range(SEEDS):
        try:
            Run(
                seed,
                Size(calm_ms=300_000, sleep_part=1, keepers_part=1, liars_part=1, data_part=0),
                checked=False,
            ).finish()
        except (SeedFailed, IndexError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_step_that_believes_all_that_a_node_says_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "split", lambda report, _: (report, NONE))
    assert first_failure()


def test_a_death_that_is_announced_before_all_of_it_is_gone_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = World.kill_keeper

    def hasty(world: World, node: str, linger_ms: int) -> None:
        machine = world.machines[node]
        incarnation = machine.incarnation
        end_left = machine.end_left
        machine.end_left = lambda: None  # type: ignore[method-assign]
        honest(world, node, 0)

        def later() -> None:
            machine.end_left = end_left  # type: ignore[method-assign]
            if machine.incarnation == incarnation:
                end_left()

        world.timeline.after(linger_ms, later)

    monkeypatch.setattr(World, "kill_keeper", hasty)
    assert "is said to be over, but" in first_failure()
