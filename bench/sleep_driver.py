"""What NVIDIA's driver does alone, without a cluster: `python -m bench.sleep_driver [--gb 1,8]`.

Rates out and in by the memory of a process, who pays for that memory, and what happens in bad
moments: the GPU is full when a process wakes, a kernel does not end, a process has no CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from harness.waiting import until

from bench.figures import machine
from shoal.agent.sleeping import cuda
from shoal.agent.sleeping.cuda import Cuda, DriverError, Nvidia
from shoal.agent.sleeping.port import Refused

WORK = Path(__file__).parent / "sleep_work.py"
BUSY = (
    "import torch, time, sys; x = torch.zeros(1, device='cuda'); torch.cuda.synchronize()\n"
    "torch.cuda._sleep(int(12e9)); print('on', flush=True); torch.cuda.synchronize()\n"
    "print('done', flush=True); time.sleep(60)"
)


class One:
    """One process, which is not frozen: what the driver does is looked at alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def pids(self) -> list[int]:
        return [self.pid]

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", default="1,8")
    asked = parser.parse_args()
    driver = Nvidia()
    found: dict[str, Any] = {"machine": machine(), "why_not": driver.why_not()}
    with tempfile.TemporaryDirectory() as folder:
        for gb in asked.gb.split(","):
            with training(Path(folder), int(gb) * 1000) as (process, steps):
                tell(found, f"{gb} GB", lambda: moved(process.pid, steps))
                if gb == asked.gb.split(",")[0]:
                    tell(found, "full GPU", lambda: woken_when_full(driver, process.pid, steps))
    tell(found, "bounds", lambda: bounds(8))
    tell(found, "busy", lambda: busy(driver))
    tell(found, "no CUDA", lambda: no_cuda(driver))
    tell(found, "own memory", lambda: {"mb": driver.memory_mb().get(os.getpid(), {})})
    print(msgspec.json.encode(found).decode())


def tell(found: dict[str, Any], name: str, call: Callable[[], dict[str, Any]]) -> None:
    began = time.monotonic()
    try:
        found[name] = call()
    except Exception as error:  # a finding like any other
        found[name] = {"failed": f"{type(error).__name__}: {error}"}
    found[name]["took_s"] = round(time.monotonic() - began, 2)
    print(name, found[name], flush=True)


@contextlib.contextmanager
def training(folder: Path, mb: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    marks = folder / f"{mb}"
    process = subprocess.Popen([sys.executable, str(WORK), "train", str(marks), "0.02", str(mb)])
    try:
        until(lambda: count(marks) > 10)
        yield process, marks
    finally:
        with contextlib.suppress(Exception):  # a process that was restored is not killed on its GPU
            asyncio.run(Cuda().leave(One(process.pid)))
        process.kill()
        process.wait()


def moved(pid: int, marks: Path) -> dict[str, Any]:
    sleeping, one = Cuda(), One(pid)
    anon = rss_mb(pid)
    began = time.monotonic()
    mb = asyncio.run(sleeping.sleep(one))
    out_s = time.monotonic() - began
    more, steps = rss_mb(pid) - anon, count(marks)
    began = time.monotonic()
    asyncio.run(sleeping.wake(one, {}))
    in_s = time.monotonic() - began
    until(lambda: count(marks) > steps + 5)
    return {
        "moved_mb": mb,
        "out_s": round(out_s, 2),
        "in_s": round(in_s, 2),
        "out_gb_s": round(mb / 1000 / out_s, 2),
        "in_gb_s": round(mb / 1000 / in_s, 2),
        "grown_rss_mb": more,
    }


def bounds(gb: int, *, host: bool = True) -> dict[str, Any]:
    """Rates out and in, and what may bound them: a thread of the process that is never idle; with
    `host`, also new pages of the host, pages that are pinned for the GPU, and the bus."""
    with tempfile.TemporaryDirectory() as folder, training(Path(folder), gb * 1000) as made:
        process, marks = made
        sleeping, one = Cuda(), One(process.pid)
        own, began = os.times(), time.monotonic()
        with watched(process.pid) as spent:
            mb = asyncio.run(sleeping.sleep(one))
            out_s = time.monotonic() - began
        own_after = os.times()
        user_s, kernel_s = max(spent.values(), key=sum)
        steps, began = count(marks), time.monotonic()
        asyncio.run(sleeping.wake(one, {}))
        in_s = time.monotonic() - began
        until(lambda: count(marks) > steps + 2)
    measured: dict[str, float] = {}
    if host:
        measured = json.loads(subprocess.check_output([sys.executable, "-c", HOST], text=True))
    found = {
        "out_gb_s": round(mb / 1000 / out_s, 2),
        "in_gb_s": round(mb / 1000 / in_s, 2),
        "out_s": round(out_s, 2),
        "its busiest thread, s": round(user_s + kernel_s, 2),
        "of that in the kernel, s": round(kernel_s, 2),
        "its other threads, s": round(sum(map(sum, spent.values())) - user_s - kernel_s, 2),
        "the agent, s": round(own_after.user + own_after.system - own.user - own.system, 2),
        **measured,
    }
    return found | {"bounds": list(found)[2:]}


# What this host does of the same in one thread, in GB/s.
HOST = """
import ctypes, json, time, mmap
import torch
size = 4 << 30
found = {}
def rate(name, call):
    began = time.monotonic()
    kept = call()
    found[name] = round(size / 1e9 / (time.monotonic() - began), 2)
    return kept
pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
place = ctypes.addressof(ctypes.c_char.from_buffer(pages))
rate("new pages written, GB/s", lambda: ctypes.memset(place, 1, size))
rate("the same again, GB/s", lambda: ctypes.memset(place, 2, size))
there = torch.ones(size, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
def pin():
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
pinned = rate("pinned memory made, GB/s", pin)
def copy(to):
    to.copy_(there)
    torch.cuda.synchronize()
rate("GPU to pinned memory, GB/s", lambda: copy(pinned))
plain = torch.empty(size, dtype=torch.uint8)
rate("GPU to new pages, GB/s", lambda: copy(plain))
rate("GPU to used pages, GB/s", lambda: copy(plain))
print(json.dumps(found))
"""


@contextlib.contextmanager
def watched(pid: int) -> Iterator[dict[int, tuple[float, float]]]:
    """What each thread of the process spends meanwhile, also one that ends before this does."""
    before, spent = threads(pid), dict[int, tuple[float, float]]()
    over = threading.Event()

    def look() -> None:
        while True:
            for tid, (user, kernel) in threads(pid).items():
                then = before.get(tid, (0.0, 0.0))
                spent[tid] = (user - then[0], kernel - then[1])
            if over.wait(0.05):
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield spent
    finally:
        over.set()
        looking.join()


def threads(pid: int) -> dict[int, tuple[float, float]]:
    """By thread, seconds of the processor in the program and in the kernel."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            user, kernel = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13])
            found[int(file.parent.name)] = (user, kernel)
    return found


def woken_when_full(driver: Nvidia, pid: int, marks: Path) -> dict[str, Any]:
    """Another process has all of the GPU, until it ends."""
    sleeping, one = Cuda(), One(pid)
    asyncio.run(sleeping.sleep(one))
    folder = marks.parent / "take"
    taker = subprocess.Popen([sys.executable, str(WORK), "take", str(folder), "4", "142000"])
    until(lambda: folder.exists() and ("holds" in folder.read_text() or taker.poll() is not None))
    free, began = driver.free_mb(), time.monotonic()
    asyncio.run(sleeping.wake(one, {}))
    steps, waited = count(marks), time.monotonic() - began
    until(lambda: count(marks) > steps + 5)
    return {"free_mb": free[0], "woken_after_s": round(waited, 2), "taker": taker.wait(30)}


def busy(driver: Nvidia) -> dict[str, Any]:
    """A kernel of several seconds, and a lock that waits less."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    old, cuda.LOCK_MS = cuda.LOCK_MS, 1_000
    began, why = time.monotonic(), "slept"
    sleeping = Cuda()
    try:
        asyncio.run(sleeping.sleep(One(process.pid)))
        asyncio.run(sleeping.wake(One(process.pid), {}))
    except Refused as refused:
        why = str(refused)
    finally:
        cuda.LOCK_MS = old
    took = time.monotonic() - began
    state = driver.state(process.pid)
    done = process.stdout.readline().decode().strip()
    process.kill()
    process.wait()
    return {"why": why, "refused_after_s": round(took, 2), "state": state, "then": done}


def no_cuda(driver: Nvidia) -> dict[str, Any]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        return {"state": driver.state(process.pid)}
    except DriverError as error:
        return {"code": error.code, "text": str(error)}
    finally:
        process.kill()
        process.wait()


def rss_mb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    return 0


def count(marks: Path) -> int:
    return len(marks.read_text().splitlines()) if marks.exists() else 0


if __name__ == "__main__":
    main()
