"""A Ray driver on one host of `bench/ray_engine.py`: watches the nodes, or launches gangs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import ray

MEMBERS = 8
LOOK_S = 0.05


def main() -> None:
    role, address = sys.argv[1:]
    ray.init(address=address, namespace="bench", log_to_driver=False, configure_logging=False)
    if role == "watch":
        threading.Thread(target=watch, daemon=True).start()
        sys.stdin.read()
    else:
        tell(ready=True)
        for line in sys.stdin:
            tell(ms=launch(line.strip()))


def watch() -> None:
    """Prints a line for each change of a node's state at the head."""
    seen: dict[str, bool] = {}
    first = True
    while True:
        for node in ray.nodes():
            if seen.get(node["NodeID"]) != node["Alive"]:
                seen[node["NodeID"]] = node["Alive"]
                if not first:
                    tell(ip=node["NodeManagerAddress"], alive=node["Alive"], at=time.time())
        if first:
            tell(ready=True)
            first = False
        time.sleep(LOOK_S)


class Member:
    def there(self) -> bool:
        return True


def launch(kind: str) -> float:
    """A gang over all nodes. `actors` are separate processes in a placement group, so that all of
    them start or none; `tasks` each start a `sleep` from a warm worker, as room allows."""
    begun = time.monotonic()
    if kind == "tasks":
        start: Any = ray.remote(sleep)
        spread = start.options(num_cpus=1, scheduling_strategy="SPREAD")
        ray.get([spread.remote() for _ in range(MEMBERS)])
        return round((time.monotonic() - begun) * 1000, 1)
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}] * MEMBERS, strategy="SPREAD")
    ray.get(group.ready())
    member: Any = ray.remote(Member)
    members = [
        member.options(
            num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for index in range(MEMBERS)
    ]
    ray.get([one.there.remote() for one in members])
    took = (time.monotonic() - begun) * 1000
    for one in members:
        ray.kill(one)
    remove_placement_group(group)
    return round(took, 1)


def sleep() -> None:
    subprocess.Popen(["sleep", "10"], start_new_session=True)


def tell(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
