"""Readings of a GPU's energy: at once when a member starts or ends, each with its age."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from harness.waiting import until

from shoal.agent import sampling
from shoal.agent.sampling import Driver, Sampler
from shoal.model.series import READING_AGE_MS_MAX, NodeSample


class Nvml(SimpleNamespace):
    """A driver of two GPUs that count a joule at each look, and report nothing else."""

    looks = 0

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        self.looks += handle == 0
        return 1000 * self.looks + handle


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def taken(sampler: Sampler) -> NodeSample:
    sample = until(sampler.take)
    assert sample is not None
    return sample


def test_a_change_is_read_at_once_and_goes_with_the_next_sample(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_S", 3600.0)
    sampler = Sampler((0, 1))
    sampler.start()
    until(lambda: nvml.looks == 1)  # the first does not wait for the first sample
    sampler.look()
    until(lambda: nvml.looks == 2)
    assert sampler.take() is None
    sampler.stop()


def test_a_sample_has_all_readings_since_the_last_with_their_ages(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_S", 0.05)
    sampler = Sampler((0, 1))
    sampler.start()
    energy = list(taken(sampler).energy)
    sampler.look()
    energy += taken(sampler).energy
    sampler.stop()
    assert [reading.mj for reading in energy] == [
        (1000 * look, 1000 * look + 1) for look in range(1, len(energy) + 1)
    ]
    assert all(0 <= reading.age_ms <= READING_AGE_MS_MAX for reading in energy)
    assert nvml.looks >= len(energy) >= 2


def test_a_driver_without_counters_or_none_at_all_has_no_readings(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Nvml, "nvmlDeviceGetTotalEnergyConsumption")
    assert Driver((0, 1)).energy_mj() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Driver((0, 1)).energy_mj() == ()
    assert nvml.looks == 0


def test_a_node_without_gpus_is_not_woken() -> None:
    sampler = Sampler(())
    sampler.look()
    assert sampler.take() is None
