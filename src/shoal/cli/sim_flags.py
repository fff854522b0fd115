"""Makes the simulated cluster and its conditions from the flags of `shoal sim`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.forms.units import BadAmount, cpu_milli, duration_ms, memory_mb
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Sleeping
from shoal.sim.replay.attempts import Saved, saved
from shoal.sim.replay.clusters import (
    NEVER_MS,
    NODES_MAX,
    Conditions,
    Failures,
    Slowness,
    alike,
    read_causes,
    read_nodes,
)
from shoal.sim.replay.metrics import Summary
from shoal.sim.replay.simulated import able_to_sleep
from shoal.sim.replay.traces import TraceError


def cluster_of(nodes: str, gpus: int, cpus: str, memory: str) -> list[NodeSpec]:
    """From a number, or from a file that describes each node."""
    if not re.fullmatch(r"[0-9]{1,9}", nodes):
        if not Path(nodes).exists():
            raise Failure(f"--nodes: {nodes} is neither a number nor a file", USAGE)
        return read_nodes(Path(nodes))
    if not int(nodes) <= NODES_MAX:
        raise Failure(f"--nodes: must be at most {NODES_MAX}, not {nodes}", USAGE)
    try:
        milli = cpu_milli(cpus) if cpus else 0
    except BadAmount as error:
        raise Failure(f"--cpus: {error}", USAGE) from error
    try:
        mb = memory_mb(memory) if memory else 0
    except BadAmount as error:
        raise Failure(f"--memory: {error}", USAGE) from error
    if not gpus and not milli:
        raise Failure("--gpus: nodes without GPUs need --cpus", USAGE)
    return alike(int(nodes), gpus=gpus, cpu_milli=milli, memory_mb=mb)


def conditions_of(
    start_up: str,
    checkpoint: str,
    restart_cost: str,
    failures: str,
    repair: str,
    slow: str,
    stragglers: str,
) -> Conditions:
    never = checkpoint.strip().lower() == "never"
    return Conditions(
        start_up_ms=_duration(start_up, "--start-up"),
        checkpoint_ms=NEVER_MS if never else _duration(checkpoint, "--checkpoint"),
        restart_cost_ms=_duration(restart_cost, "--restart-cost"),
        failures=_failures(failures, _duration(repair, "--repair")),
        slow_nodes=_slowness(slow, "--slow"),
        stragglers=_slowness(stragglers, "--stragglers"),
    )


def with_sleep(
    chosen: list[tuple[str, Policy]], cluster: list[NodeSpec]
) -> tuple[list[tuple[str, Policy]], list[NodeSpec]]:
    """Each policy without and with sleep, on the same nodes, all of which can put jobs to sleep."""
    pairs = [
        (f"{name}{word}", msgspec.structs.replace(policy, sleep=sleep))
        for name, policy in chosen
        for word, sleep in (("", Sleeping.NEVER), (" + sleep", Sleeping.PREFER))
    ]
    return pairs, able_to_sleep(cluster)


def saved_by_sleep(summaries: list[Summary]) -> list[Saved]:
    """Of summaries in the order of `with_sleep`."""
    pairs = zip(summaries[::2], summaries[1::2], strict=True)
    return [saved(without.policy, without, slept) for without, slept in pairs]


def _duration(text: str, flag: str) -> int:
    try:
        return duration_ms(text)
    except BadAmount as error:
        raise Failure(f"{flag}: {error}", USAGE) from error


def factor(text: str, flag: str, most: float = 1000.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise Failure(f"{flag}: must be a number above 0 and at most {most:g}, not {text}", USAGE)
    return value


def _failures(text: str, repair_ms: int) -> Failures:
    if not text or text.strip() == "0":
        return Failures(0.0, repair_ms)
    if re.fullmatch(r"-?[0-9.]+", text.strip()):
        return Failures(factor(text.strip(), "--failures", 1e6), repair_ms)
    try:
        return read_causes(Path(text), repair_ms)
    except TraceError as error:
        raise Failure(f"--failures: {error}", REFUSED) from error


def _slowness(text: str, flag: str) -> Slowness:
    if not text:
        return Slowness()
    share, colon, speed = text.partition(":")
    if not colon:
        raise Failure(f"{flag}: write SHARE:SPEED, e.g. 0.05:0.7", USAGE)
    return Slowness(factor(share, flag, 1.0), factor(speed, flag, 1.0))
