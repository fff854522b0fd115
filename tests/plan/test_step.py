"""Memory and step time: published facts, and what must hold for every layout."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan import library
from shoal.plan.hardware import GIB, Cluster, Impossible, read_curve
from shoal.plan.layout import Layout, Stack, activation_bytes, memory, problem
from shoal.plan.report import what_limits
from shoal.plan.search import search
from shoal.plan.step import Group, estimate

HARDWARE = library.hardware()
OLD = Stack(flash=False)


def changed(cluster: Cluster, **figures: float) -> Cluster:
    """With these figures of its GPU, its node or its fabric."""
    for part in ("accelerator", "node", "fabric"):
        old = getattr(cluster, part)
        mine = {name: value for name, value in figures.items() if hasattr(old, name)}
        new = msgspec.structs.replace(old, **mine)
        cluster = msgspec.structs.replace(cluster, **{part: new})
    return cluster


# -- memory


def test_model_states_take_sixteen_bytes_per_parameter_and_zero_divides_them() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs: 120, 31.4, 16.6, 1.9 GB."""
    model = msgspec.structs.replace(library.model("megatron-7.5b"), positions=0)
    stack, scale = Stack(gradient_bytes=2), 7.5e9 / model.parameters()
    for zero, published in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        used = memory(model, Layout(data=64, zero=zero), stack)
        states = (used.weights + used.gradients + used.optimizer) * scale / 1e9
        assert states == pytest.approx(published, rel=0.02), zero


def test_activations_follow_korthikanti() -> None:
    """arXiv 2205.05198, table 2, of one layer in bytes: s b h times ..."""
    model = library.model("gpt3-175b")
    unit = model.sequence * model.hidden
    scores = 5 * model.heads * model.sequence / model.hidden
    for layout, published in (
        (Layout(recompute="none", sequence_parallel=False), 34 + scores),
        (Layout(tensor=8, recompute="none", sequence_parallel=False), 10 + (24 + scores) / 8),
        (Layout(tensor=8, recompute="none"), (34 + scores) / 8),
        (Layout(tensor=8, recompute="selective"), 34 / 8),
    ):
        found = activation_bytes(model, layout, OLD) / unit
        assert found == pytest.approx(published), layout


def test_bloom_needs_about_sixty_gigabytes_as_published() -> None:
    layout = Layout(
        data=8, tensor=4, pipeline=12, micro_batch=2, micro_batches=128, recompute="full",
        sequence_parallel=False,
    )  # fmt: skip
    used = memory(library.model("bloom-176b"), layout, OLD)
    assert 40 * GIB < used.total < 65 * GIB  # "using 60 GB of memory on each GPU"


# -- the step


LAYOUTS = st.builds(
    Layout,
    data=st.sampled_from([1, 2, 8]),
    tensor=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 2, 8]),
    context=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 4]),
    micro_batches=st.sampled_from([1, 8, 64]),
    interleave=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
)
STACKS = st.builds(
    Stack,
    flash=st.booleans(),
    fused=st.booleans(),
    overlap_data=st.booleans(),
    overlap_tensor=st.booleans(),
    overlap_pipeline=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, STACKS, st.sampled_from(["llama3-70b", "mixtral-8x7b", "gpt3-175b"]))
def test_parts_add_up_and_faster_hardware_never_makes_a_step_slower(
    layout: Layout, stack: Stack, name: str
) -> None:
    model = msgspec.structs.replace(library.model(name), sequence=4096)
    if problem(model, layout):
        return
    node = "dgx-h100" if layout.gpus % 8 == 0 else ""
    cluster = HARDWARE.cluster("h100", max(1, layout.gpus // 8), node=node)
    if layout.gpus < 8:
        small = msgspec.structs.replace(cluster.node, gpus=layout.gpus)
        cluster = msgspec.structs.replace(cluster, node=small)
    found = estimate(model, cluster, layout, stack)
    parts = msgspec.structs.astuple(found.parts)
    assert sum(parts) == pytest.approx(found.step_s)
    assert all(part >= 0 for part in parts)
    assert 0 < found.mfu < 1
    for faster in (
        {"link_gbs": 900.0},
        {"nic_gbs": 100.0},
        {"memory_gbs": 6000.0},
        {"peak_tflops": {"bf16": 1500.0}},
        {"latency_us": 1.0},
    ):
        better = estimate(model, changed(cluster, **faster), layout, stack)
        assert better.step_s <= found.step_s * (1 + 1e-9), faster


def test_measured_curves_replace_the_figures_of_the_data_sheet() -> None:
    model, cluster = library.model("llama3-8b"), HARDWARE.cluster("h100", 1)
    layout = Layout(data=8, zero=3)
    before = estimate(model, cluster, layout)
    chip = msgspec.structs.replace(cluster.accelerator, matmul_tflops=((4096, 200.0),))
    slow = estimate(model, msgspec.structs.replace(cluster, accelerator=chip), layout)
    assert slow.parts.matmul > 3 * before.parts.matmul
    assert [read_curve(((1, 10.0), (3, 30.0)), size) for size in (0, 2, 9)] == [10, 20, 30]


def test_a_group_within_a_node_uses_links_and_one_across_nodes_all_its_nics() -> None:
    cluster = HARDWARE.cluster("h100", 4)
    inside, across, alone = Group(cluster, 8, 1), Group(cluster, 32, 1), Group(cluster, 4, 8)
    assert inside.within_node
    assert not across.within_node
    assert across.rate(1e9) == pytest.approx(8 * alone.rate(1e9))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(data=0), "data is 0: it must be at least 1"),
        (Layout(data=4), "the layout is for 4 GPUs (data 4 x tensor 1 x pipeline 1 x context 1)"),
        (Layout(tensor=16), "the layout is for 16 GPUs"),
        (Layout(tensor=3), "tensor 3 does not divide the 32 heads of llama3-8b"),
        (Layout(pipeline=64), "pipeline 64 has more stages than llama3-8b has layers (32)"),
        (Layout(expert=2), "expert 2 needs a model with experts, and llama3-8b is dense"),
        (Layout(context=3), "context 3 does not divide the sequence of 8192 tokens"),
        (Layout(interleave=2), "interleave 2 needs a pipeline of at least 2 stages"),
        (Layout(pipeline=8, interleave=3), "pipeline 8 x interleave 3 does not divide the 32"),
        (Layout(zero=4), "zero is 4: it must be 0, 1, 2 or 3"),
    ],
)
def test_an_impossible_layout_gets_one_sentence(layout: Layout, said: str) -> None:
    cluster = HARDWARE.cluster("h100", 1) if said.startswith("the layout") else None
    assert problem(library.model("llama3-8b"), layout, cluster).startswith(said)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"memory_gib": 0}, "accelerator h100: memory_gib is 0: it must be more than 0"),
        ({"nic_gbs": float("nan")}, "node dgx-h100: nic_gbs is nan: it must be more than 0"),
        ({"link_gbs": 1e9}, "accelerator h100: link_gbs is 1e+09: the most"),
        ({"oversubscription": 0.5}, "fabric infiniband: oversubscription is 0.5: it must be"),
        ({"matmul": 1.5}, "accelerator h100: matmul is 1.5: the most that a plan accepts is 1"),
    ],
)
def test_absurd_hardware_gets_one_sentence(figures: dict[str, float], said: str) -> None:
    with pytest.raises(Impossible) as caught:
        changed(HARDWARE.cluster("h100", 1), **figures).check()
    assert str(caught.value).startswith(said)


# -- the search


CASES = [
    ("llama3-70b", "h100", 16, 512),
    ("llama3-8b", "a100", 1, 64),
    ("mixtral-8x7b", "h100", 8, 256),
    ("llama3-405b", "h100", 2048, 2048),
    ("deepseek-v3", "h800", 256, 15360),
    ("llama3-8b", "h100", 7, 504),
]


@pytest.mark.parametrize(("name", "gpu", "nodes", "batch"), CASES)
def test_what_the_search_returns_is_valid_fits_and_is_ranked(
    name: str, gpu: str, nodes: int, batch: int
) -> None:
    model, cluster = library.model(name), HARDWARE.cluster(gpu, nodes)
    found = search(model, cluster, batch)
    speeds = [one.tokens_s for one in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    for one in found.ranked:
        assert problem(model, one.layout, cluster) == ""
        assert one.fits
        assert one.layout.batch == pytest.approx(batch, rel=0.1)
        assert estimate(model, cluster, one.layout) == one
    assert [family.reason for family in found.families].count("") == 1
    assert found.tried < 20_000  # so that a search stays under seconds


@pytest.mark.parametrize(("name", "gpu", "nodes", "batch"), CASES[:3])
def test_more_memory_never_makes_the_best_layout_slower(
    name: str, gpu: str, nodes: int, batch: int
) -> None:
    model, cluster = library.model(name), HARDWARE.cluster(gpu, nodes)
    speeds = [
        search(model, changed(cluster, memory_gib=gib), batch, keep=1).best.tokens_s
        for gib in (80, 96, 141, 1000)
    ]
    assert speeds == sorted(speeds)


def test_a_model_that_fits_nowhere_gets_the_least_that_fits() -> None:
    model, cluster = library.model("llama3-405b"), HARDWARE.cluster("h100", 2)
    with pytest.raises(Impossible) as caught:
        search(model, cluster, 512)
    said = str(caught.value)
    assert said.startswith("llama3-405b does not fit on 16 x h100: the best layout needs ")
    nodes = int(said.split("the least that fits is ")[1].split()[0])
    bigger = msgspec.structs.replace(cluster, nodes=nodes)
    assert search(model, bigger, 512).best.fits


def test_a_layout_may_be_fixed_in_part() -> None:
    model, cluster = library.model("llama3-70b"), HARDWARE.cluster("h100", 16)
    found = search(model, cluster, 512, fixed={"tensor": 8, "pipeline": 1})
    assert {(one.layout.tensor, one.layout.pipeline) for one in found.ranked} == {(8, 1)}
    with pytest.raises(Impossible, match="no layout of llama3-70b on 128 GPUs has tensor 3"):
        search(model, cluster, 512, fixed={"tensor": 3})


@pytest.mark.parametrize("batch", [0, -4, 10**12])
def test_an_absurd_batch_gets_one_sentence(batch: int) -> None:
    with pytest.raises(Impossible, match="batch is"):
        search(library.model("gpt2"), HARDWARE.cluster("h100", 1), batch)


def test_what_limits_names_compute_on_one_node_and_the_network_on_a_slow_one() -> None:
    model, cluster = library.model("llama3-8b"), HARDWARE.cluster("h100", 16)
    fast = search(model, cluster, 512).best
    gains = {gain.what: gain.gain for gain in what_limits(model, cluster, fast)}
    assert set(gains) == {
        "compute", "memory", "memory_bandwidth", "link", "network", "nodes", "batch",
    }  # fmt: skip
    assert all(-1e-9 <= gain <= 0.11 for gain in gains.values())
    assert gains["compute"] > 5 * gains["network"]
    slow = changed(cluster, nic_gbs=0.1)
    stuck = search(model, slow, 512).best
    there = {gain.what: gain.gain for gain in what_limits(model, slow, stuck)}
    assert there["network"] > there["compute"]
