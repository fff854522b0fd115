"""The probes: what they measure is there, what they cannot measure is said, nothing is left."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.model.health import FAULTS_MAX, TEXT_MAX, CheckResult
from shoal.probes import host, nvml, probe, tensor
from shoal.probes import host as disk
from shoal.probes.reading import Reading

FLAGS = ["--id", "c7", "--busy", "--cores", "1", "--no-gpus"]
ALWAYS = {
    "cpu_one_mbs",
    "cpu_all_mbs",
    "cpu_share_milli",
    "memory_mbs",
    "disk_write_mbs",
    "disk_read_mbs",
    "disk_free_mb",
}


def test_the_probe_prints_one_object_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "shoal.probes.probe", "--directory", str(tmp_path), *FLAGS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == 1
    result = msgspec.json.decode(run.stdout, type=CheckResult)
    assert (result.id, result.busy, result.error) == ("c7", True, "")
    assert result.figures.keys() >= ALWAYS
    assert all(result.figures[name] > 0 for name in ALWAYS)
    assert not [name for name in result.figures if name.startswith("gpu")]
    assert list(tmp_path.iterdir()) == []


def test_the_measuring_needs_nothing_but_python() -> None:
    """So that a node without numpy or torch can be compared with others."""
    script = (
        "import sys\n"
        "from shoal.probes import host, nvml, reading, tensor\n"
        "assert not {'numpy', 'torch', 'pynvml', 'psutil', 'msgspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_directory_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    found = disk.disk(tmp_path / "missing")
    assert found.faults == ["disk: cannot be used for the node's files: No such file or directory"]


def test_a_disk_that_is_nearly_full_is_a_fault_and_is_not_filled_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FREE_BYTES_MIN", 1 << 62)
    found = disk.disk(tmp_path)
    assert "MB are free" in found.faults[0]
    assert "disk_write_mbs" not in found.figures


def test_what_the_kernel_says_is_read_as_it_is_written() -> None:
    text = "some avg10=3.00 avg60=0 avg300=0 total=1\nfull avg10=1.53 avg60=0 avg300=0 total=1\n"
    assert host.pressure_milli(text) == 15
    assert host.pressure_milli("some avg10=1.00\n") is None
    data = struct.pack("@Illlli", 0, -1_500_000, 1, 2, 3, host.STA_NANO) + bytes(400)
    assert host.parse_timex(data) == (-1_500_000, host.STA_NANO)


def test_errors_of_gpu_hardware_are_told_from_those_of_programs() -> None:
    lines = [
        "6,1,5000000,-;usb 1-1: new device",
        "4,2,90000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off",
        "4,3,91000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "4,4,92000000,-;NVRM: Xid (PCI:0000:af:00): 31, pid=77, name=python, MMU Fault",
        "4,5,1000000,-;NVRM: Xid (PCI:0000:5e:00): 48, DBE",
    ]
    assert nvml.xid_faults(lines, 100.0) == [
        "GPU at 0000:3b:00: Xid 79, 2 in the last day",
        "GPU at 0000:5e:00: Xid 48, 1 in the last day",
    ]
    assert nvml.xid_faults(lines, 86_400 + 50.0) == ["GPU at 0000:3b:00: Xid 79, 2 in the last day"]


class FakeNvml(SimpleNamespace):
    """Two GPUs as NVML tells of them; whatever is asked beyond that, it does not know."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    lost: tuple[int, ...] = ()
    uncorrected = 0
    rows = (1, 0, 0, 0)
    reasons = 0

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        if number in self.lost:
            raise RuntimeError("GPU is lost")
        return number

    def nvmlDeviceGetTemperature(self, device: int, kind: int) -> int:  # noqa: N802
        return 40 + device

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        return (690_000, 121_000)[device]

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetTotalEccErrors(self, device: int, kind: int, span: int) -> int:  # noqa: N802
        return self.uncorrected if kind else 3

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, ...]:  # noqa: N802
        return self.rows

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:  # noqa: N802
        return self.reasons


def read_gpus(monkeypatch: pytest.MonkeyPatch, **state: Any) -> Reading:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**state))
    monkeypatch.setattr(nvml, "kernel_lines", list)
    return nvml.gpus()


def test_healthy_gpus_have_figures_and_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_gpus(monkeypatch, reasons=0x4)
    assert found.faults == []
    assert found.figures["gpu1_temperature_c"] == 41
    assert found.figures["gpu0_ecc_corrected"] == 3
    assert found.notes == ["gpu 0: at its power limit"]  # not the one that draws 121 of 700 W


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"uncorrected": 2}, "gpu 0: 2 memory errors could not be corrected"),
        ({"rows": (0, 1, 1, 0)}, "gpu 0: bad memory rows wait for a reset to be replaced"),
        ({"rows": (0, 1, 1, 1)}, "gpu 0: bad memory rows could not be replaced"),
        ({"reasons": 0x40}, "gpu 0: too hot, slowed down by hardware"),
        ({"lost": (0,)}, "gpu 0: lost: GPU is lost"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_a_fault(
    state: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault in read_gpus(monkeypatch, **state).faults


def test_without_a_driver_there_is_a_note_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = nvml.gpus()
    assert (found.figures, found.faults) == ({}, [])
    assert found.notes == ["GPUs: no NVML here (ModuleNotFoundError)"]


def test_real_gpus_compute_and_copy() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch can use")
    found = tensor.tensors(float("inf"))
    assert found.faults == []
    assert found.figures["gpu0_matmul_gflops"] > 0
    assert found.figures["gpu0_copy_up_mbs"] > 0


def test_a_result_is_bounded_whatever_goes_wrong() -> None:
    broken = Reading({}, ["x" * 10_000] * 100, ["y" * 10_000] * 100)
    result = probe.bounded(broken, "c1", False, 5)
    assert len(result.faults) == FAULTS_MAX
    assert len(result.faults[0]) == TEXT_MAX
    assert len(msgspec.json.encode(result)) < 20_000
