"""Gangs of actors by Ray itself, for `bench/engines.py`: one line of JSON at the end."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GPUS = 2
AT_ONCE = 4  # gangs; each actor is a process of 80 MB


class Member:
    def there(self) -> bool:
        return True


def launch(members: int, gangs: int, gpus: int) -> list[Any]:
    """Several gangs at once; returns when all their actors answer."""
    actor: Any = ray.remote(Member)
    made = []
    for _ in range(gangs):
        group = placement_group([{"CPU": 1, "GPU": gpus}] * members)
        for index in range(members):
            where = PlacementGroupSchedulingStrategy(group, index)
            options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where}
            made.append((group, actor.options(**options).remote()))
    ray.get([one.there.remote() for _, one in made])
    return made


def remove(made: list[Any]) -> None:
    for _, one in made:
        ray.kill(one)
    for group in {group.id: group for group, _ in made}.values():
        remove_placement_group(group)


def main() -> None:
    address, members, launches, gangs = sys.argv[1], *map(int, sys.argv[2:])
    ray.init(address=address, namespace="bench", log_to_driver=False, configure_logging=False)
    remove(launch(members, 1, GPUS))  # the first one is slower
    took_ms = []
    for _ in range(launches):
        begun = time.monotonic()
        gang = launch(members, 1, GPUS)
        took_ms.append((time.monotonic() - begun) * 1000)
        remove(gang)
    begun = time.monotonic()
    for _ in range(gangs // AT_ONCE):
        remove(launch(members, AT_ONCE, 0))
    rate = round(gangs / (time.monotonic() - begun), 1)
    print(json.dumps({"took_ms": took_ms, "gangs_per_s": rate}), flush=True)


if __name__ == "__main__":
    main()
