"""How the model's amounts and names are written for people."""

from __future__ import annotations

import pytest

from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.node import NodeSpec, kind_text, unenforced_of
from shoal.model.resources import Demand, Kind, cpus_text, plural


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        (Demand(0, 0, 0), "nothing"),
        (Demand(1, 1000, 0), "1 GPU, 1 CPU"),
        (Demand(2, 1500, 64), "2 GPUs, 1.5 CPUs, 64 MB"),
        (Demand(0, 250, 0), "0.25 CPUs"),
        (Demand(1, 0, 0, 300), "0.3 GPU"),
        (Demand(1, 0, 0, 0, 20), "20 MB of a GPU"),
        (Demand(2, 0, 0, 1000, 80, ("A", "B")), "2 GPUs of 80 MB (A or B)"),
    ],
)
def test_a_demand_reads_as_people_say_it(demand: Demand, text: str) -> None:
    assert str(demand) == text


def test_cpus_are_written_without_needless_zeros() -> None:
    assert [cpus_text(milli) for milli in (0, 500, 1000, 12_500)] == ["0", "0.5", "1", "12.5"]


def test_one_is_not_a_plural() -> None:
    assert [plural(count, "job") for count in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]


def test_a_node_is_described_by_what_it_has() -> None:
    bare = NodeSpec(id="a", cpu_milli=8000, memory_mb=16)
    assert kind_text(bare) == "8 CPUs, 16 MB"
    full = NodeSpec(id="a", cpu_milli=1500, memory_mb=16, gpus=8, gpu_model="H200")
    assert kind_text(full) == "8 GPUs H200, 1.5 CPUs, 16 MB"


def test_whoever_added_no_tenant_reads_nothing_about_tenants() -> None:
    what = ("memory (no writable cgroup)", "tenants apart from each other (the agent is not root)")
    spec = NodeSpec(id="a", cpu_milli=1, memory_mb=1, unenforced=what)
    assert unenforced_of(spec, tenants=True) == list(what)
    assert unenforced_of(spec, tenants=False) == ["memory (no writable cgroup)"]


def test_a_member_and_a_job_have_names_to_be_seen_in_messages() -> None:
    assert str(MemberRef("j7", 2, 0)) == "j7.2.0"
    named = Job(id="j7", number=7, spec=JobSpec(command=("x",), name="train"))
    assert (named.title, Job(id="j8", number=8, spec=JobSpec(command=("x",))).title) == (
        "j7 (train)",
        "j8",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100", True),
        ("h100 80gb", True),
        ("NVIDIA-H100", True),
        ("H10", False),
        ("H100 PCIe", False),
        ("A100", False),
        ("", False),
        ("-", False),
    ],
)
def test_a_gpu_is_meant_by_some_words_of_its_model(name: str, meant: bool) -> None:
    kind = Kind(8, 1000, 1000, "NVIDIA H100 80GB HBM3", 80_000)
    assert Demand(1, 0, 0, gpu_models=("B200", name)).suits(kind) is meant
