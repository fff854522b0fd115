"""Training on a GPU: the same script alone (torchrun) and under Shoal, and recovery of both.

Run with `python -m bench.gpu [--turns 2] [--steps 120]` on a machine with a GPU, torch with CUDA
and `nvidia-ml-py`. One member, because NCCL needs a GPU for each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import machine, table
from bench.recovery import first_step, last_step
from bench.recovery_peers import Mark, Peer, Shoal, Torchrun
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec

SCRIPT = Path(__file__).parent / "gpu_train.py"
ENDLESS = 1 << 30


class OnShoal(Shoal):
    nodes = (NodeSpec(id="n1", gpus=1, cpu_milli=16_000, memory_mb=100_000),)

    def begin(self, kind: str, steps: int) -> float:
        spec = JobSpec(
            command=(sys.executable, str(SCRIPT), kind, str(steps)),
            gpus=1,
            env=self.env,
            restart=Restart.ON_FAILURE,
            retries=5,
        )
        at = time.time()
        self.job = self.client.submit(spec).id
        return at

    def output(self) -> str:
        while self.client.job(self.job, wait_for="finished", wait_s=10).finished_ms is None:
            pass
        return self.client.logs(self.job).data.decode()


class Alone(Torchrun):
    def begin(self, kind: str, steps: int) -> float:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
            *("--max-restarts", "5", "--master-port", str(self._port), str(SCRIPT), kind),
            str(steps),
        ]
        at = time.time()
        with (self.directory / "agent0.log").open("wb") as output:
            self._agents.append(
                subprocess.Popen(
                    command,
                    env=self.whole_env(0),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return at

    def output(self) -> str:
        self._agents[0].wait(300)
        return (self.directory / "agent0.log").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--kinds", default="ddp,fsdp")
    asked = parser.parse_args()
    print(machine(), flush=True)
    again: dict[str, Any] = {}
    for peer in (OnShoal, Alone):
        again[peer.name] = recovery(peer)
        print("recovery", peer.name, json.dumps(again[peer.name]), flush=True)
    kinds = asked.kinds.split(",")
    rates: dict[str, Any] = {}
    for kind in kinds:
        for _ in range(asked.turns):
            for peer in (Alone, OnShoal):
                found = throughput(peer, kind, asked.steps)
                rates.setdefault(f"{kind} {peer.name}", []).append(found)
                print(kind, peer.name, json.dumps(found), flush=True)
    report(kinds, rates, again)


def throughput(peer_kind: type[Alone] | type[OnShoal], kind: str, steps: int) -> dict[str, Any]:
    peer = peer_kind()
    try:
        began = peer.begin(kind, steps)
        started = first_step(peer, began, set()).at - began
        peer.wait(lambda marks: last_step(marks) >= steps // 2)
        readings = nvml()
        output = peer.output()
        lines = [line for line in output.splitlines() if line.startswith("figures ")]
        if not lines:
            raise RuntimeError(f"{peer.name} {kind} did not finish:\n{output[-3000:]}")
        found: dict[str, Any] = json.loads(lines[-1].partition(" ")[2])
        return {**found, "start_s": round(started, 2), "nvml": readings}
    finally:
        peer.close()


def recovery(peer_kind: type[Alone] | type[OnShoal]) -> dict[str, Any]:
    """Kills the member with SIGKILL twice and waits until its next step is done."""
    peer: Peer = peer_kind()
    seconds, lost, parts = [], [], []
    try:
        peer.begin("fsdp", ENDLESS)  # type: ignore[attr-defined]
        for _ in range(2):
            start = last_step(peer.marks())
            peer.wait(lambda marks, start=start: last_step(marks) >= start + 130)  # type: ignore[misc]
            peer.settle()
            known = {mark.pid for mark in peer.marks()}
            killed = time.time()
            newest: Mark = peer.newest(0)
            os.kill(newest.pid, signal.SIGKILL)
            after = first_step(peer, killed, known)
            before = [m for m in peer.marks() if m.what.isdigit() and m.pid in known]
            seconds.append(round(after.at - killed, 2))
            lost.append(last_step(before) + 1 - int(after.what))
            parts.append(
                {
                    m.what: round(m.at - killed, 2)
                    for m in peer.marks()
                    if m.pid not in known and not m.what.isdigit()
                }
            )
        return {"seconds": seconds, "steps_lost": lost, "until": parts}
    finally:
        peer.close()


def nvml() -> dict[str, Any]:
    """The GPU's own figures during training."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "name": pynvml.nvmlDeviceGetName(gpu),
        "busy_percent": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) // 1000,
        "clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "memory_mb": pynvml.nvmlDeviceGetMemoryInfo(gpu).used // 1024**2,
    }


def report(kinds: list[str], rates: dict[str, list[dict[str, Any]]], again: dict[str, Any]) -> None:
    rows = []
    for kind in kinds:
        alone, ours = (
            statistics.median(found["tokens_per_s"] for found in rates[f"{kind} {name}"])
            for name in (Alone.name, OnShoal.name)
        )
        blocked = [
            ms for found in rates[f"{kind} {OnShoal.name}"] for ms in found["save_blocked_ms"]
        ]
        rows.append((kind, f"{alone:.0f}", f"{ours:.0f}", f"{ours / alone:.3f}",
                     f"{statistics.median(blocked):.0f}"))  # fmt: skip
    print(table(("tokens/s, bf16", "alone", "under shoal", "ratio", "a save blocks, ms"), rows))
    for name, found in again.items():
        print(f"SIGKILL until the next step, {name}: {found['seconds']} s, {found['until']}")
    print(msgspec.json.encode({"machine": machine(), "rates": rates, "recovery": again}).decode())


if __name__ == "__main__":
    main()
