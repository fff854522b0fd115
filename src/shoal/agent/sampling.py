"""How busy this machine and its GPUs are, sampled every two seconds in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.model.series import (
    READING_AGE_MS_MAX,
    READINGS_MAX,
    EnergyReading,
    GpuSample,
    NodeSample,
)

SAMPLE_S = 2.0
TOGETHER_S = 0.01


class Sampler:
    """A driver that hangs blocks this thread and nothing else."""

    def __init__(self, gpus: Sequence[int]) -> None:
        """`gpus`: the machine's numbers of those to look at."""
        self._gpus = gpus
        self._newest: NodeSample | None = None
        self._energy: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=READINGS_MAX)
        self._wanted = threading.Event()  # a reading of the counters, now
        self.shared: set[int] = set()  # GPUs whose processes are wanted
        self.processes: dict[int, dict[int, int]] = {}  # of these: by GPU and process, in MB
        self._stopped = threading.Event()

    def start(self) -> None:
        self.look()
        threading.Thread(target=self._run, name="sampling", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()

    def look(self) -> None:
        """A member starts or ends, so that its GPUs' energy is its own from here or up to here."""
        if self._gpus:
            self._wanted.set()

    def take(self) -> NodeSample | None:
        """The newest sample; None if it was taken already."""
        sample, self._newest = self._newest, None
        if sample is None or not self._energy:
            return sample
        now_s = time.monotonic()
        readings = []
        while self._energy:
            read_s, counters = self._energy.popleft()
            age_ms = int((now_s - read_s) * 1000)
            if age_ms <= READING_AGE_MS_MAX:
                readings.append(EnergyReading(age_ms, counters))
        return msgspec.structs.replace(sample, energy=tuple(readings))

    def _run(self) -> None:
        driver = Driver(self._gpus) if self._gpus else None
        before, due_s = cpu_times(), time.monotonic() + SAMPLE_S
        while not self._stopped.is_set():
            early = self._wanted.wait(max(0.0, due_s - time.monotonic()))
            if early:
                self._stopped.wait(TOGETHER_S)  # what starts or ends at the same moment
            self._wanted.clear()
            if driver is not None and (counters := driver.energy_mj()):
                self._energy.append((time.monotonic(), counters))
            if early:
                continue
            due_s = time.monotonic() + SAMPLE_S
            now = cpu_times()
            self._newest = NodeSample(
                at_ms=time.time_ns() // 1_000_000,
                cpu_milli=busy_milli(before, now),
                memory_milli=memory_milli(),
                gpus=driver.gpus() if driver else (),
            )
            if driver is not None:
                self.processes = {gpu: driver.processes(gpu) for gpu in sorted(self.shared)}
            before = now


class Driver:
    """NVML, where it is available. GPUs are counted as the node counts its own."""

    def __init__(self, own: Sequence[int]) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            count = int(pynvml.nvmlDeviceGetCount())
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in own if n < count]
            self._nvml = pynvml
        except Exception:  # not installed, or no driver: NVML has an exception for each
            self._handles = []

    def processes(self, gpu: int) -> dict[int, int]:
        """The memory of each process on this GPU, in MB. Nothing where the driver does not say."""
        if gpu >= len(self._handles):
            return {}
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[gpu])
            return {int(one.pid): int(one.usedGpuMemory or 0) >> 20 for one in found}
        except Exception:  # NVML has an exception for each of its errors
            return {}

    def energy_mj(self) -> tuple[int, ...]:
        """What each GPU has drawn since its driver was loaded; nothing where one does not say."""
        try:
            read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
            return tuple(int(read(handle)) for handle in self._handles)
        except Exception:  # older than Volta, or NVML's exception for any of its errors
            return ()

    def gpus(self) -> tuple[GpuSample, ...]:
        return tuple(self._one(handle) for handle in self._handles)

    def _one(self, handle: Any) -> GpuSample:
        nvml = self._nvml

        def asked(name: str, *more: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *more)
            except Exception:  # this GPU or driver does not report it
                return None

        rates, memory = asked("nvmlDeviceGetUtilizationRates"), asked("nvmlDeviceGetMemoryInfo")
        power_mw = asked("nvmlDeviceGetPowerUsage")
        heat = asked("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0))
        return GpuSample(
            busy_milli=None if rates is None else _milli(int(rates.gpu), 100),
            memory_milli=None if memory is None else _milli(int(memory.used), int(memory.total)),
            power_w=None if power_mw is None else min(65_000, max(0, int(power_mw) // 1000)),
            temperature_c=None if heat is None else min(65_000, max(0, int(heat))),
        )


def cpu_times(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """(busy, all) since the machine started, in the kernel's ticks."""
    try:
        fields = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = sum(fields[3:5])  # idle, and waiting for a disk
    return sum(fields) - idle, sum(fields)


def busy_milli(before: tuple[int, int], now: tuple[int, int]) -> int | None:
    whole = now[1] - before[1]
    return _milli(now[0] - before[0], whole) if whole > 0 else None


def memory_milli(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return _milli(sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"])
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _milli(part: int, whole: int) -> int | None:
    return min(1000, max(0, round(1000 * part / whole))) if whole > 0 else None
