"""Jobs whose nodes fetch data sets from URLs, and what nodes have of them on their disks."""

from __future__ import annotations

import random

import msgspec

from shoal.model.blocks import Held, volume_key
from shoal.model.commands import Launch
from shoal.model.job import JobSpec
from shoal.model.volume import parse

SET_BYTES = 1 << 30
SETS = tuple(f"s3://sets/{number}" for number in range(3))
KEPT_MAX = 2  # a node's disk has room for this many
LIES = (
    Held(volume_key("default", SETS[0]), 1 << 62, 1 << 62),
    Held(volume_key("default", SETS[0]), SET_BYTES, SET_BYTES),
    Held(volume_key("red", SETS[1]), -1, 0),
    Held("", 1, 1),
)


def with_data(rng: random.Random, spec: JobSpec) -> JobSpec:
    if rng.random() < 0.4:
        return spec
    volumes = tuple(f"{url}:set{at}" for at, url in enumerate(rng.sample(SETS, rng.choice((1, 2)))))
    return msgspec.structs.replace(spec, volumes=volumes)


def fetched(holdings: tuple[Held, ...], launch: Launch) -> tuple[Held, ...]:
    """What a node has after it has fetched for this member; the last used stay."""
    held = {holding.volume: holding for holding in holdings}
    for volume in map(parse, launch.volumes):
        name = volume_key(launch.tenant, volume.source)
        part = random.Random(f"{name}/{launch.ref}").choice((1, 2, 4))
        held.pop(name, None)
        held[name] = Held(name, SET_BYTES // part, SET_BYTES)
    return tuple(held.values())[-KEPT_MAX:]
