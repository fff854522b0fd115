"""The energy of jobs in the ledger against the GPU's own counter, as each job reads it.

Run with `python -m bench.energy [--seconds 20]` on a machine with a GPU, torch with CUDA and
`nvidia-ml-py`. A hungry job, a modest one and a short one hold the GPU one after the other; then a
hungry and an idle one share it, of which only the sum is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from bench.control import private_cluster
from bench.figures import machine, ratio, table
from shoal.client import Client
from shoal.model.job import JobSpec
from shoal.model.ledger import By
from shoal.model.node import NodeSpec

JOULES_PER_WH = 3600

# Reads the counter as its first and last deed, before torch is imported and after its last kernel.
WORK = """
import sys, time
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
first = read()
import torch
seconds, kind = float(sys.argv[1]), sys.argv[2]
size = 8192 if kind == "hungry" else 256
a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
until = time.monotonic() + seconds
while time.monotonic() < until:
    if kind == "hungry":
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    else:
        a @ a
        torch.cuda.synchronize()
        time.sleep(0.02)
print("joules", read() - first)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    name = pynvml.nvmlDeviceGetName(gpu)

    def counter() -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1000

    print(machine(), name, sep="\n")
    node = NodeSpec(
        id="n1", gpus=1, cpu_milli=8_000, memory_mb=64_000, gpu_model=name, gpu_memory_mb=80_000
    )
    figures: dict[str, float] = {}
    joules: dict[str, tuple[int, int]] = {}
    with private_cluster((node,)) as (home, _), Client.at_home(home.path) as client:
        began_s, began = time.monotonic(), counter()
        rows = []
        for kind, length in (("hungry", seconds), ("modest", seconds), ("hungry", seconds / 4)):
            job, own = _run(client, kind, length)
            told = client.cost(job).energy_wh or 0.0
            rows.append((f"{kind}, {length:g} s", f"{own:.0f}", f"{told * JOULES_PER_WH:.0f}"))
            figures[f"{kind}_{length:g}s"] = ratio(told * JOULES_PER_WH, own)
            joules[f"{kind}_{length:g}s"] = round(own), round(told * JOULES_PER_WH)
        whole, took_s = counter() - began, time.monotonic() - began_s
        ledger = client.ledger(by=By.NODE).energy_wh or 0.0
        rows.append((f"the node, {took_s:.0f} s", f"{whole:.0f}", f"{ledger * JOULES_PER_WH:.0f}"))
        figures["node"] = ratio(ledger * JOULES_PER_WH, whole)
        joules["node"] = round(whole), round(ledger * JOULES_PER_WH)
    print(table(("what", "counter, J", "ledger, J"), rows))
    print(json.dumps({"gpu": name, "ledger_to_counter": figures, "joules": joules}))


def _run(client: Client, kind: str, seconds: float) -> tuple[str, float]:
    spec = JobSpec(
        command=(sys.executable, "-c", WORK, str(seconds), kind),
        gpus=1,
        env=dict(os.environ),
    )
    job = client.submit(spec).id
    while client.job(job, wait_for="finished", wait_s=30).finished_ms is None:
        pass
    time.sleep(3)  # until the reading at its end has arrived
    output = client.logs(job).data.decode()
    for line in output.splitlines():
        if line.startswith("joules"):
            return job, float(line.split()[1])
    raise SystemExit(f"{job} told no energy:\n{output or client.job(job)}")


if __name__ == "__main__":
    main()
