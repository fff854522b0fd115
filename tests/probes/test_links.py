"""A node's own links: rates, states and counters as sysfs and NVML report them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.probes import nvml
from shoal.probes.links import links


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def port(
    card: str, state: tuple[str, str], rate: str, layer: str, counters: dict[str, int]
) -> dict[str, str]:
    """A port as the drivers of ConnectX cards show it."""
    place = f"class/infiniband/{card}/ports/1"
    files = {"state": state[0], "phys_state": state[1], "rate": rate, "link_layer": layer}
    found = {f"{place}/{name}": text for name, text in files.items()}
    return found | {f"{place}/counters/{name}": str(value) for name, value in counters.items()}


def test_infiniband_roce_and_ethernet_have_rates_and_counters(tmp_path: Path) -> None:
    counts = {"link_downed": 2, "link_error_recovery": 1, "symbol_error": 5, "port_rcv_errors": 7}
    up = ("4: ACTIVE", "5: LinkUp")
    write(tmp_path, port("mlx5_0", up, "400 Gb/sec (4X NDR)", "InfiniBand", counts))
    write(tmp_path, port("mlx5_1", up, "2.5 Gb/sec (1X SDR)", "Ethernet", {}))
    down = ("1: DOWN", "3: Disabled")
    write(tmp_path, port("mlx5_2", down, "10 Gb/sec (4X SDR)", "InfiniBand", {}))
    net = {
        "class/net/eth0/device/vendor": "0x15b3",
        "class/net/eth0/operstate": "up",
        "class/net/eth0/speed": "100000",
        "class/net/eth0/duplex": "full",
        "class/net/eth0/carrier_down_count": "3",
        "class/net/eth0/statistics/rx_errors": "4",
        "class/net/eth0/statistics/tx_errors": "0",
        "class/net/eth1/device/vendor": "0x15b3",
        "class/net/eth1/operstate": "down",
        "class/net/eth1/speed": "-1",
        "class/net/docker0/operstate": "up",
        "class/net/docker0/speed": "10000",
        "class/net/bonding_masters": "bond0",
    }
    write(tmp_path, net)
    found = links(tmp_path)
    assert found.figures == {
        "ib_mlx5_0_1_up": 1,
        "ib_mlx5_0_1_rate_mbits": 400_000,
        "ib_mlx5_0_1_link_downs": 2,
        "ib_mlx5_0_1_recoveries": 1,
        "ib_mlx5_0_1_errors": 12,
        "ib_mlx5_1_1_up": 1,
        "ib_mlx5_1_1_rate_mbits": 2_500,
        "ib_mlx5_2_1_up": 0,
        "eth_eth0_up": 1,
        "eth_eth0_rate_mbits": 100_000,
        "eth_eth0_link_downs": 3,
        "eth_eth0_errors": 4,
        "eth_eth1_up": 0,
    }
    assert found.faults == []
    assert found.notes == ["InfiniBand port 1 of mlx5_2 is DOWN (Disabled)"]


def test_half_duplex_is_a_fault_and_nonsense_is_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "class/net/eth0/device/vendor": "0x8086",
            "class/net/eth0/operstate": "up",
            "class/net/eth0/speed": "what?",
            "class/net/eth0/duplex": "half",
            "class/infiniband/mlx5_0/ports/1/state": "\x00",
            "class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
            "class/infiniband/mlx5_1/ports/1/rate": "fast",
        },
    )
    found = links(tmp_path)
    assert found.figures == {"ib_mlx5_1_1_up": 1, "eth_eth0_up": 1}
    assert found.faults == ["eth0: runs in half duplex; its cable or switch is wrong"]
    assert links(tmp_path / "missing").figures == {}


class FakeNvml(SimpleNamespace):
    """One GPU with three NVLinks, of which one is down, in a slot with too few lanes."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 1,  # it is idle
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
            "nvmlDeviceGetPcieReplayCounter": lambda _: 11,
            "nvmlDeviceGetNvLinkState": lambda _, link: (1, 0, 1)[link],
            "nvmlDeviceGetNvLinkVersion": lambda *_: 7,
            "nvmlDeviceGetNvLinkErrorCounter": lambda _, link, counter: 10 * counter + link,
        }
        return answers[name]


def test_pcie_and_nvlink_of_a_gpu_are_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(nvml, "kernel_lines", list)
    found = nvml.gpus()
    assert found.figures == {
        "gpu0_pcie_generation": 1,
        "gpu0_pcie_generation_max": 5,
        "gpu0_pcie_lanes": 8,
        "gpu0_pcie_lanes_max": 16,
        "gpu0_pcie_replays": 11,
        "gpu0_nvlinks_up": 2,
        "gpu0_nvlink_version": 7,
        "gpu0_nvlink_replays": 0 + 2,
        "gpu0_nvlink_recoveries": 10 + 12,
        "gpu0_nvlink_crc_errors": 20 + 30 + 22 + 32,
    }
    assert found.faults == []
    assert found.notes == ["gpu 0: uses 8 of 16 PCIe lanes", "gpu 0: NVLink 1 down, 2 up"]
