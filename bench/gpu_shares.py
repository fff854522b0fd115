"""Shares of a GPU: what two halves lose against one whole, and what holds a member to its share.

Run with `python -m bench.gpu_shares [--seconds 15]` on a machine with a GPU, torch with CUDA and
`nvidia-ml-py`. Measured: steps per second of one process with the whole GPU, of two processes that
take turns (no MPS), and of two jobs with half a GPU each under Shoal (MPS). Then members that take
more than their share: with MPS, with torch's own limit, and with neither.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.figures import machine, table

LEAD_S = 20.0  # for imports, before all processes begin at the same moment
STEPS_AT_ONCE = {"large": 1, "small": 50}
DAEMON = "nvidia-cuda-mps-control"
GREEDY = {
    "torch": "import torch\n"
    "x = [torch.empty(1 << 30, dtype=torch.uint8, device='cuda') for _ in range({gb})]\n"
    "torch.cuda.synchronize(); print('took {gb} GB')",
    "plain CUDA": "import bench.gpu_shares as b; b.take({gb})",
}


def work(kind: str, begin: float, seconds: float) -> None:
    """Large products fill the GPU; small ones leave most of it empty."""
    import torch

    size = 8192 if kind == "large" else 512
    one = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        one = (one @ one).clamp(-1, 1)
    torch.cuda.synchronize()
    time.sleep(max(0.0, begin - time.time()))
    steps = 0
    while time.time() < begin + seconds:
        for _ in range(STEPS_AT_ONCE[kind]):
            one = (one @ one).clamp(-1, 1)
        torch.cuda.synchronize()
        steps += STEPS_AT_ONCE[kind]
    print(f"rate {steps / seconds}", flush=True)


def take(gb: int) -> None:
    """Without torch: by the driver itself, which no allocator limits."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, place = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
    for number in range(gb):
        code = cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1 << 30))
        if code:
            sys.exit(f"CUDA error {code} after {number} GB")
    print(f"took {gb} GB", flush=True)
    time.sleep(60)


class Cluster:
    """A cluster on this machine. Without MPS, its agents do not find the daemon."""

    def __init__(self, *, mps: bool) -> None:
        self.mps = mps
        self._home = tempfile.mkdtemp(prefix="shoal-bench-")
        self._env = dict(os.environ)
        self._bin = ""
        if not mps:
            self._bin = tempfile.mkdtemp(prefix="shoal-bench-bin-")
            for folder in os.environ["PATH"].split(":"):
                for path in Path(folder).iterdir() if os.path.isdir(folder) else []:
                    link = Path(self._bin) / path.name
                    if path.name != DAEMON and not link.exists():
                        link.symlink_to(path)
            self._env["PATH"] = self._bin
        self.shoal("up")

    def shoal(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal.main", "--home", self._home, *words]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=300)

    def submit(self, share: str, *command: str) -> str:
        path = f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}"
        words = ("run", "-g", share, "--env", f"PYTHONPATH={path}", "--json", "--")
        told = self.shoal(*words, sys.executable, *command)
        if told.returncode:
            raise RuntimeError(told.stderr)
        return str(json.loads(told.stdout)["id"])

    def end(self, job: str) -> tuple[str, str]:
        """Its output, and what Shoal says about its end."""
        self.shoal("logs", "-f", job)
        told = json.loads(self.shoal("why", job, "--json").stdout)
        return self.shoal("logs", job).stdout, str(told.get("why", told))

    def close(self) -> None:
        self.shoal("down")
        for folder in (self._home, self._bin):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    asked = parser.parse_args()
    print(machine(), flush=True)
    rates: dict[str, dict[str, list[float]]] = {}
    for kind in STEPS_AT_ONCE:
        rates[kind] = {
            "one whole": alone(kind, 1, asked.seconds),
            "two by turns": alone(kind, 2, asked.seconds),
            "two halves (MPS)": halves(kind, asked.seconds),
        }
        print(kind, json.dumps(rates[kind]), flush=True)
    held = {"MPS": greedy(mps=True), "without MPS": greedy(mps=False)}
    report(rates, held)


def words(kind: str, seconds: float) -> list[str]:
    begin = time.time() + LEAD_S
    return ["-c", f"import bench.gpu_shares as b; b.work({kind!r}, {begin}, {seconds})"]


def alone(kind: str, processes: int, seconds: float) -> list[float]:
    command = [sys.executable, *words(kind, seconds)]
    some = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return [rate(one.communicate(timeout=300)[0]) for one in some]


def halves(kind: str, seconds: float) -> list[float]:
    cluster = Cluster(mps=True)
    try:
        command = words(kind, seconds)
        jobs = [cluster.submit("0.5", *command) for _ in range(2)]
        return [rate(cluster.end(job)[0]) for job in jobs]
    finally:
        cluster.close()


def rate(output: str) -> float:
    lines = [line for line in output.splitlines() if line.startswith("rate ")]
    if not lines:
        raise RuntimeError(f"no rate in: {output[-2000:]}")
    return round(float(lines[-1].split()[1]), 1)


def greedy(*, mps: bool) -> dict[str, Any]:
    """Members with a tenth of the GPU that take more, and one that takes less."""
    cluster = Cluster(mps=mps)
    found = {}
    try:
        for name, script in GREEDY.items():
            for gb in (8, 40):
                job = cluster.submit("0.1", "-c", script.format(gb=gb))
                if name == "plain CUDA" and gb == 8:
                    time.sleep(15)  # within its share, so it is left alone
                    cluster.shoal("cancel", job)
                output, why = cluster.end(job)
                last = output.strip().splitlines()[-1:] or [""]
                found[f"{name}, {gb} GB"] = {"why": why, "last line": last[0][-200:]}
                print("MPS" if mps else "without MPS", name, gb, found[f"{name}, {gb} GB"])
    finally:
        cluster.close()
    return found


def report(rates: dict[str, dict[str, list[float]]], held: dict[str, dict[str, Any]]) -> None:
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    for kind, ways in rates.items():
        whole = sum(ways["one whole"])
        ratios[kind] = {way: round(sum(found) / whole, 3) for way, found in ways.items()}
        rows += [(kind, way, f"{sum(ways[way]):.1f}", f"{ratios[kind][way]:.2f}") for way in ways]
    print(table(("work", "how", "steps/s in all", "of one whole"), rows))
    print(json.dumps({"bench": "gpu_shares", "rates": rates, "ratios": ratios, "held": held}))


if __name__ == "__main__":
    main()
