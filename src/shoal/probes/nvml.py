"""Probe of GPUs through the driver: errors, throttling, clocks, heat and power."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from shoal.probes import tensor
from shoal.probes.reading import Asked, Reading, joined, nothing

# NVML's bits for clocks that the hardware itself lowers: broken cooling or power supply.
HARDWARE_REASONS = {
    0x8: "slowed down by hardware",
    0x40: "too hot, slowed down by hardware",
    0x80: "short of power, slowed down by hardware",
}
POWER_CAP = 0x4
TOLD_REASONS = {POWER_CAP: "at its power limit", 0x20: "warm, slowed down by the driver"}
NEAR_LIMIT_PERCENT = 90  # the driver still reports the limit when the work is over

# Errors of the hardware in the kernel's log. Others (13, 31, 43, 45) are mostly a program's fault.
HARDWARE_XIDS = frozenset((48, 62, 64, 74, 79, 92, 95, 119, 120, 140))
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")
XID_SECONDS_MAX = 24 * 3600
KERNEL_LINES_MAX = 20_000


RATES_S = 8.0  # most of it is loading torch


def probe(asked: Asked) -> Reading:
    """Rates first, so that clocks, heat and throttling are those of GPUs at work."""
    if not asked.gpus:
        return nothing()
    return joined(tensor.tensors(time.monotonic() + RATES_S), gpus())


def gpus() -> Reading:
    """Nothing at all where there is no driver."""
    found = nothing()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # not installed, or no driver: NVML has an exception for each
        found.notes.append(f"GPUs: no NVML here ({type(error).__name__})")
        return found
    try:
        for number in range(int(pynvml.nvmlDeviceGetCount())):
            _one(pynvml, number, found)
    except Exception as error:
        found.faults.append(f"GPUs: the driver fails: {error}")
    finally:
        pynvml.nvmlShutdown()
    _add_xids(found)
    return found


def _one(nvml: Any, number: int, found: Reading) -> None:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(number)
    except Exception as error:  # it fell off the bus
        found.faults.append(f"gpu {number}: lost: {error}")
        return
    figures = {
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) // 1000,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) // 1000,
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
        "memory_used_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used // 1_000_000,
    }
    for name, ask in figures.items():
        value = _ask(ask)
        if value is not None:
            found.figures[f"gpu{number}_{name}"] = int(value)
    add_links(nvml, device, number, found)
    _add_errors(nvml, device, number, found)
    _add_reasons(nvml, device, number, found)


def _add_errors(nvml: Any, device: Any, number: int, found: Reading) -> None:
    lost = _ask(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    mended = _ask(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    if mended is not None:
        found.figures[f"gpu{number}_ecc_corrected"] = int(mended)
    if lost:
        found.faults.append(f"gpu {number}: {lost} memory errors could not be corrected")
    rows = _ask(lambda: nvml.nvmlDeviceGetRemappedRows(device))
    if rows is not None:
        corrected, uncorrected, pending, failed = (int(one) for one in rows)
        found.figures[f"gpu{number}_rows_remapped"] = corrected + uncorrected
        if failed:
            found.faults.append(f"gpu {number}: bad memory rows could not be replaced")
        elif pending:
            found.faults.append(f"gpu {number}: bad memory rows wait for a reset to be replaced")


def _add_reasons(nvml: Any, device: Any, number: int, found: Reading) -> None:
    bits = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
    if bits is None:
        return
    for bit, text in HARDWARE_REASONS.items():
        if bits & bit:
            found.faults.append(f"gpu {number}: {text}")
    for bit, text in TOLD_REASONS.items():
        if bits & bit and (bit != POWER_CAP or _near_limit(number, found)):
            found.notes.append(f"gpu {number}: {text}")


def _near_limit(number: int, found: Reading) -> bool:
    drawn, limit = (
        found.figures.get(f"gpu{number}_{name}") for name in ("power_w", "power_limit_w")
    )
    return drawn is None or limit is None or drawn * 100 >= limit * NEAR_LIMIT_PERCENT


def _ask(ask: Callable[[], Any]) -> Any:
    """None where this GPU or driver does not report it."""
    try:
        return ask()
    except Exception:
        return None


def _add_xids(found: Reading) -> None:
    lines = kernel_lines()
    if lines is None:
        found.notes.append("GPUs: the kernel's log may not be read, so Xid errors are not known")
        return
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0
    found.faults.extend(xid_faults(lines, now_s))


def xid_faults(lines: list[str], now_s: float) -> list[str]:
    """Of lines '6,1234,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, ...', one fault for each kind of
    error of each GPU within the last day."""
    counts: dict[tuple[str, int], int] = {}
    for line in lines:
        head, _, text = line.partition(";")
        match = XID.search(text)
        if match is None or int(match[2]) not in HARDWARE_XIDS:
            continue
        fields = head.split(",")
        at_s = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else now_s
        if now_s - at_s <= XID_SECONDS_MAX:
            key = match[1], int(match[2])
            counts[key] = counts.get(key, 0) + 1
    return [
        f"GPU at {bus}: Xid {number}, {count} in the last day"
        for (bus, number), count in counts.items()
    ]


def kernel_lines() -> list[str] | None:
    """The kernel's log as it is now; None where it may not be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while len(lines) < KERNEL_LINES_MAX:
            try:
                lines.append(os.read(handle, 8192).decode(errors="replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:  # a line was overwritten in the meantime: go on with the next
                continue
            except OSError:
                return lines or None
    finally:
        os.close(handle)
    return lines


# Probe of a GPU's links through the driver: PCIe and NVLink.


NVLINKS_MAX = 36
NVLINK_UP = 1
# NVML's numbers of error counters of a link.
NVLINK_ERRORS = {"nvlink_replays": (0,), "nvlink_recoveries": (1,), "nvlink_crc_errors": (2, 3)}


def add_links(nvml: Any, device: Any, number: int, found: Reading) -> None:
    _pcie(nvml, device, number, found)
    _nvlinks(nvml, device, number, found)


def _pcie(nvml: Any, device: Any, number: int, found: Reading) -> None:
    """An idle GPU lowers the generation to save power, but not the number of lanes."""
    facts = {
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
        "pcie_generation_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(device),
        "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(device),
        "pcie_lanes_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(device),
        "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(device),
    }
    told = {name: value for name, ask in facts.items() if (value := _ask(ask)) is not None}
    for name, value in told.items():
        found.figures[f"gpu{number}_{name}"] = int(value)
    lanes, most = told.get("pcie_lanes"), told.get("pcie_lanes_max")
    if lanes and most and lanes < most:
        found.notes.append(f"gpu {number}: uses {lanes} of {most} PCIe lanes")


def _nvlinks(nvml: Any, device: Any, number: int, found: Reading) -> None:
    """Sums over the links of the GPU, which are alike; those that are down are named."""
    states: dict[int, int] = {}
    for link in range(NVLINKS_MAX):
        state = _ask(lambda link=link: nvml.nvmlDeviceGetNvLinkState(device, link))  # type: ignore[misc]
        if state is None:
            break  # it has no more
        states[link] = int(state)
    if not states:
        return
    up = [link for link, state in states.items() if state == NVLINK_UP]
    found.figures[f"gpu{number}_nvlinks_up"] = len(up)
    down = [str(link) for link in states if link not in up]
    if up and down:
        found.notes.append(f"gpu {number}: NVLink {', '.join(down)} down, {len(up)} up")
    if not up:
        return
    version = _ask(lambda: nvml.nvmlDeviceGetNvLinkVersion(device, up[0]))
    if version is not None:
        found.figures[f"gpu{number}_nvlink_version"] = int(version)
    for name, counters in NVLINK_ERRORS.items():
        values = [
            _ask(lambda link=link, one=one: nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, one))  # type: ignore[misc]
            for link in up
            for one in counters
        ]
        known = [int(value) for value in values if value is not None]
        if known:
            found.figures[f"gpu{number}_{name}"] = sum(known)
