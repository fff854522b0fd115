"""Probe of a GPU's links through the driver: PCIe and NVLink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.probes.reading import Reading

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


def _ask(ask: Callable[[], Any]) -> Any:
    """None where this GPU or driver does not report it."""
    try:
        return ask()
    except Exception:
        return None
