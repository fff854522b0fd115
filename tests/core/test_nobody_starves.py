"""A large gang in a steady stream of small jobs: when it starts at the latest, by policy."""

from __future__ import annotations

import random

import msgspec
import pytest

from shoal.core.policies import SHIPPED
from shoal.model.policy import Policy
from tests.core.build import node_spec
from tests.core.clockwork import Clockwork

NODES = 4
LONGEST_MS = 15_000
PATIENCE_MS = 40_000
SUBMITTED_MS = 60_000
STREAM_MS = 400_000

PROMISING = [policy for policy in SHIPPED.values() if policy.reservations]
GREEDY = [policy for policy in SHIPPED.values() if not policy.reservations]


def stream(policy: Policy, seed: int, *, known: bool) -> tuple[Clockwork, str]:
    """Small jobs keep most of the cluster busy; one gang wants all of it at once."""
    rng = random.Random(seed)
    policy = msgspec.structs.replace(policy, patience_ms=min(policy.patience_ms, PATIENCE_MS))
    cluster = Clockwork(policy, *(node_spec(f"n{number}", gpus=1) for number in range(NODES)))
    at_ms = 1_000
    while at_ms < STREAM_MS:
        run_ms = rng.randrange(5_000, LONGEST_MS)
        cluster.plan(at_ms, run_ms, gpus=1, estimate_ms=run_ms if known else 0)
        at_ms += rng.randrange(1_500, 4_500)
    cluster.go_on(SUBMITTED_MS - 1)
    assert cluster.state.queue.size < NODES
    gang = f"j{cluster.state.next_job}"
    cluster.plan(SUBMITTED_MS, 9_000, gpus=1, members=NODES, estimate_ms=9_000 if known else 0)
    cluster.go_on(STREAM_MS)
    assert cluster.state.jobs.get(gang) is None or not cluster.state.jobs[gang].active
    return cluster, gang


def waited_ms(policy: Policy, seed: int, *, known: bool) -> int:
    cluster, gang = stream(policy, seed, known=known)
    return cluster.starts.get(gang, STREAM_MS) - SUBMITTED_MS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", PROMISING, ids=lambda policy: policy.name)
def test_a_gang_starts_within_patience_and_twice_the_longest_run(policy: Policy, seed: int) -> None:
    """Nobody knows how long jobs run. Fewer small jobs than GPUs wait ahead of the gang, so all of
    them have started after one longest run R, and the gang is first in line. From then on it may
    be overtaken for the policy's patience P; who runs at the end of that ends within another R:

        start <= submission + P + 2 R
    """
    bound_ms = min(policy.patience_ms, PATIENCE_MS) + 2 * LONGEST_MS
    assert waited_ms(policy, seed, known=False) <= bound_ms


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", PROMISING, ids=lambda policy: policy.name)
def test_where_run_times_are_known_it_starts_when_it_was_promised(
    policy: Policy, seed: int
) -> None:
    """It is first in line after one longest run R at most, and is then promised the moment when
    those who run have ended; who overtakes it is gone by then. Patience is not needed:

        start <= submission + 2 R
    """
    assert waited_ms(policy, seed, known=True) <= 2 * LONGEST_MS


@pytest.mark.parametrize("policy", GREEDY, ids=lambda policy: policy.name)
def test_without_reservations_there_is_no_such_bound(policy: Policy) -> None:
    """`srtf`, `srsf` and `tiresias` are yardsticks that set nothing aside: small jobs that fit
    go first forever. What they do promise is tested below. (And so the bounds above mean
    something: the same stream starves the gang here.)"""
    assert max(waited_ms(policy, seed, known=True) for seed in range(3)) > 20 * LONGEST_MS


def finishing_order(policy: Policy, *jobs: tuple[int, int]) -> list[int]:
    """Jobs of (run time, GPUs) that come at once, on one node with four GPUs that is busy."""
    cluster = Clockwork(policy, node_spec("a", gpus=4))
    cluster.plan(1_000, 1_000, gpus=4, estimate_ms=1_000, priority=9)
    for run_ms, gpus in jobs:
        cluster.plan(1_001, run_ms, gpus=gpus, estimate_ms=run_ms)
    cluster.go_on()
    starts = cluster.starts
    return sorted(range(len(jobs)), key=lambda number: (starts[f"j{number + 2}"], number))


def test_what_srtf_promises_is_the_shortest_first() -> None:
    assert finishing_order(SHIPPED["srtf"], (9_000, 4), (3_000, 4), (5_000, 4)) == [1, 2, 0]


def test_what_srsf_promises_is_the_least_gpu_time_first() -> None:
    assert finishing_order(SHIPPED["srsf"], (6_000, 3), (5_000, 4), (10_000, 2)) == [0, 1, 2]


def test_what_tiresias_promises_is_that_who_attained_less_goes_first() -> None:
    """A job that has had its first share of the cluster makes room for one that has had none,
    once, when a level is reached; among equals the first to come stays."""
    policy = msgspec.structs.replace(SHIPPED["tiresias"], run_ms_min=0)
    cluster = Clockwork(policy, node_spec("a", gpus=8))
    cluster.plan(1_000, 2_000_000, gpus=8, preemptible=True, checkpoint_ms=1_000)
    cluster.plan(600_000, 100_000, gpus=8)
    cluster.go_on()
    assert cluster.preemptions == [("j2", "j1")]
    assert cluster.ends == {"j2": 700_000, "j1": 2_101_000}
