"""From the flags of `shoal up`, and what the machine has, to nodes."""

from __future__ import annotations

import pytest

from shoal.cli.up import hardware
from shoal.cli.up.hardware import (
    Described,
    Gpus,
    Hardware,
    detect,
    machine_spec,
    node_name,
    parse_listing,
    places,
    this_machine,
    virtual_nodes,
)
from shoal.cli.verbs.up import Shape
from shoal.forms.failure import Failure
from shoal.model.node import NodeSpec

MACHINE = Hardware("box", cpus=12, memory_mb=64_000, gpus=Gpus(2, "NVIDIA H200", 143_771))


def nodes(count: int, gpus: int, topology: str = "") -> tuple[NodeSpec, ...]:
    return virtual_nodes(
        MACHINE, nodes=count, gpus=gpus, cpu_milli=None, memory_mb=None, topology=topology
    )


def test_without_flags_it_is_this_machine() -> None:
    assert this_machine(MACHINE) == (
        NodeSpec(
            id="box",
            cpu_milli=12_000,
            memory_mb=64_000,
            gpus=2,
            gpu_model="NVIDIA H200",
            gpu_memory_mb=143_771,
        ),
    )


def test_virtual_nodes_get_many_cpus_and_a_share_of_the_memory() -> None:
    four = nodes(4, gpus=8)
    assert [node.id for node in four] == ["n1", "n2", "n3", "n4"]
    assert {(node.gpus, node.cpu_milli, node.memory_mb) for node in four} == {(8, 16_000, 16_000)}
    assert nodes(1, gpus=0)[0].cpu_milli == 12_000


def test_a_topology_fills_racks_in_order() -> None:
    assert places("2x2", 8) == [
        *["b1/r1"] * 2,
        *["b1/r2"] * 2,
        *["b2/r1"] * 2,
        *["b2/r2"] * 2,
    ]
    assert places("2x1", 3) == ["b1/r1", "b1/r1", "b2/r1"]
    assert places(" 1 X 1 ", 2) == ["b1/r1", "b1/r1"]
    assert nodes(2, gpus=1, topology="1x2")[1].place == "b1/r2"


@pytest.mark.parametrize("topology", ["", "x", "2", "2x", "0x1", "2x2x2", "-1x1", "99999x1", "2*2"])
def test_what_is_no_topology_is_refused(topology: str) -> None:
    with pytest.raises(Failure, match="BLOCKSxRACKS"):
        places(topology, 8)


def test_more_racks_than_nodes_are_refused() -> None:
    with pytest.raises(Failure, match="2x3 has 6 racks, but there are 4 nodes"):
        places("2x3", 4)


@pytest.mark.parametrize(("count", "gpus"), [(0, 1), (-1, 1), (257, 1), (1, -1), (1, 257)])
def test_impossible_sizes_are_refused(count: int, gpus: int) -> None:
    with pytest.raises(Failure, match="must be from"):
        nodes(count, gpus)


@pytest.mark.parametrize(
    ("host", "name"),
    [("gpu-01.example.org", "gpu-01"), ("My_Box", "my-box"), ("", "n1"), ("---", "n1")],
)
def test_a_host_name_becomes_a_node_id(host: str, name: str) -> None:
    assert node_name(host) == name


def test_the_listing_of_nvidia_smi_is_read() -> None:
    assert parse_listing("143771, NVIDIA H200\n143771, NVIDIA H200\n") == Gpus(
        2, "NVIDIA H200", 143_771
    )
    assert parse_listing("81920, A\n40960, B, big\n") == Gpus(2, "A", 40_960)
    assert parse_listing("[N/A], NVIDIA GB10\n") == Gpus(1, "NVIDIA GB10", 0)
    assert parse_listing("No devices were found\n") == Gpus(0)


def test_virtual_gpus_have_the_model_and_memory_that_was_said() -> None:
    one, *_ = virtual_nodes(
        MACHINE,
        nodes=2,
        gpus=4,
        cpu_milli=None,
        memory_mb=None,
        topology="",
        gpu_model="A100",
        gpu_memory_mb=81_920,
    )
    assert (one.gpu_model, one.gpu_memory_mb) == ("A100", 81_920)


def test_this_machine_has_something() -> None:
    machine = detect()
    assert machine.cpus >= 1
    assert machine.memory_mb > 100
    assert machine.gpus.number >= 0


def test_an_ordered_machine_has_as_many_gpus_as_its_supply_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: MACHINE)

    def joined(gpus: int, order: str) -> NodeSpec:
        shape = Shape(None, gpus, None, None, None, None, None)
        return machine_spec(shape, "10.0.0.1", Described(name="gpu-1", order=order))

    assert joined(2, "o1").gpus == 2
    assert joined(4, "").gpus == 4  # whoever types it may have a reason
    with pytest.raises(Failure, match="the supply says 4 GPUs, and the driver shows 2 here"):
        joined(4, "o1")
    monkeypatch.setattr(hardware, "detect", lambda: MACHINE._replace(gpus=Gpus(0)))
    assert joined(4, "o1").gpus == 4
    assert "no driver shows GPUs here" in capsys.readouterr().err
