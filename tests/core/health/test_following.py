"""Slow nodes are told from ranks that have more to do."""

from __future__ import annotations

from shoal.core.health.following import Follows, Run, follows


def test_one_run_cannot_tell_a_slow_node_from_a_rank_with_more_to_do() -> None:
    runs = [Run("j1", 1, ("a", "b", "c"), slow=(1,))]
    assert follows("b", runs) is Follows.UNKNOWN
    assert follows("a", runs) is Follows.UNKNOWN


def test_a_rank_that_is_slow_on_every_node_takes_its_slowness_along() -> None:
    runs = [
        Run("j1", 1, ("a", "b", "c"), slow=(1,)),
        Run("j1", 2, ("b", "c", "a"), slow=(1,)),
    ]
    assert follows("b", runs) is Follows.RANK
    assert follows("c", runs) is Follows.RANK


def test_a_node_on_which_another_rank_is_slow_after_the_restart_is_slow() -> None:
    runs = [
        Run("j1", 1, ("a", "b", "c"), slow=(1,)),
        Run("j1", 2, ("b", "c", "a"), slow=(0,)),
    ]
    assert follows("b", runs) is Follows.NODE


def test_a_rank_that_is_fast_once_it_left_the_node_clears_itself() -> None:
    runs = [
        Run("j1", 1, ("a", "b", "c"), slow=(1,)),
        Run("j1", 2, ("a", "d", "c")),
    ]
    assert follows("b", runs) is Follows.NODE
    assert follows("d", runs) is Follows.UNKNOWN


def test_two_different_jobs_that_are_slow_on_a_node_tell_of_the_node() -> None:
    runs = [Run("j1", 1, ("a", "b"), slow=(1,)), Run("j2", 1, ("b", "c"), slow=(0,))]
    assert follows("b", runs) is Follows.NODE


def test_the_same_rank_slow_twice_on_the_same_node_proves_nothing_new() -> None:
    runs = [Run("j1", n, ("a", "b"), slow=(1,)) for n in (1, 2)]
    assert follows("b", runs) is Follows.UNKNOWN


def test_a_heavy_rank_beside_a_slow_node_is_told_apart() -> None:
    """Rank 3 is the last stage; node b is slow."""
    runs = [
        Run("j1", 1, ("a", "b", "c", "d"), slow=(1, 3)),
        Run("j1", 2, ("d", "c", "b", "a"), slow=(2, 3)),
    ]
    assert follows("b", runs) is Follows.NODE
    assert follows("d", runs) is Follows.RANK
    assert follows("a", runs) is Follows.RANK
