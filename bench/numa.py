"""Prints this machine's tree as an agent reads it, and copies host to GPU from each socket.

Run with `python -m bench.numa [--mb 1024] [--rounds 20]`, on a machine with GPUs and torch. Each
row is a process of its own that takes its CPUs before it allocates, so that its memory comes from
where they are. Without a GPU it prints the tree only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from shoal.agent.tree import by_nvml, read
from shoal.model.tree import Beside, Tree, beside, numbers_in, tree_lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="size of a copy")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--copy", default="", help=argparse.SUPPRESS)  # CPUs; empty: all of them
    parser.add_argument("--gpu", type=int, default=-1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.gpu >= 0:
        print(json.dumps(copies(asked.gpu, asked.copy, asked.mb, asked.rounds)))
        return 0
    tree = read(by_nvml())
    for line in tree_lines(tree):
        print(line)
    found: dict[str, Any] = {
        "gpus": len(tree.gpus),
        "numas": len(tree.numas),
        "sockets": len({numa.socket for numa in tree.numas}),
        "copies": [],
    }
    for gpu in range(len(tree.gpus)):
        near = beside(tree, (gpu,), 0)
        for name, cpus in places(tree, near):
            words = ["--gpu", str(gpu), "--copy", cpus, "--mb", str(asked.mb)]
            row = {"gpu": gpu, "from": name, **measured([*words, "--rounds", str(asked.rounds)])}
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            found["copies"].append(row)
    print(json.dumps(found))
    return 0


def places(tree: Tree, near: Beside | None) -> list[tuple[str, str]]:
    """Names and CPUs. With one socket there is nothing to bind to."""
    found = [("unbound", "")]
    if near is not None:
        found.append(("its socket", near.cpus))
        inside = set(numbers_in(near.cpus))
        far = [numa for numa in tree.numas if not inside & set(numbers_in(numa.cpus))]
        found += [(f"NUMA {numa.number}, another", numa.cpus) for numa in far[-1:]]
    return found


def measured(words: list[str]) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "bench.numa", *words], capture_output=True, text=True, check=False
    )
    if run.returncode:
        return {"failed": run.stderr.strip().splitlines()[-1:]}
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def copies(gpu: int, cpus: str, mb: int, rounds: int) -> dict[str, float]:
    """GB/s: pinned up and down, and pageable up, which the CPU copies first."""
    if cpus:
        os.sched_setaffinity(0, numbers_in(cpus))
    import torch

    torch.cuda.set_device(gpu)
    size = mb << 20
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    pageable = torch.zeros(size, dtype=torch.uint8)
    return {
        "pinned_up_gbs": rate(torch, size, rounds, lambda: there.copy_(pinned, non_blocking=True)),
        "pinned_down_gbs": rate(
            torch, size, rounds, lambda: pinned.copy_(there, non_blocking=True)
        ),
        "pageable_up_gbs": rate(torch, size, rounds, lambda: there.copy_(pageable)),
    }


def rate(torch: Any, size: int, rounds: int, act: Any) -> float:
    took = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return float(round(size / statistics.median(took[3:]) / 1e6, 1))


if __name__ == "__main__":
    sys.exit(main())
