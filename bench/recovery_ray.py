"""Ray Train around the same script: run by `bench/recovery.py` with an interpreter that has Ray.

A private Ray cluster of three nodes with one CPU each, two workers. A line on standard input kills
the node that the worker of rank 1 is on; the end of standard input ends everything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    passed = {name: os.environ[name] for name in ("BENCH_MARKS", "SHOAL_CHECKPOINT_DIR")}
    passed["PYTHONPATH"] = os.environ["PYTHONPATH"]
    trainer = TorchTrainer(
        work,
        train_loop_config=passed,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(Path(os.environ["BENCH_MARKS"]).parent / "ray"),
            failure_config=FailureConfig(max_failures=10),
        ),
    )
    print("ready", flush=True)
    sys.stdin.readline()

    def train() -> None:
        with contextlib.suppress(Exception):
            trainer.fit()

    threading.Thread(target=train, daemon=True).start()
    for line in sys.stdin:
        wanted = line.strip()
        for node in nodes:
            if node.node_id == wanted:
                cluster.remove_node(node, allow_graceful=False)
        print("killed", flush=True)
    ray.shutdown()
    cluster.shutdown()


def work(config: dict[str, Any]) -> None:
    import ray
    import ray.train

    os.environ.update(config)
    os.environ["SHOAL_NODE"] = ray.get_runtime_context().get_node_id()
    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    sys.path[:0] = config["PYTHONPATH"].split(":")
    from bench.recovery_train import main as script

    script()


if __name__ == "__main__":
    main()
