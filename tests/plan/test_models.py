"""Parameters and FLOPs against what the authors of the models say."""

from __future__ import annotations

import pytest

from shoal.plan import library
from shoal.plan.hardware import Impossible
from shoal.plan.model import Model

EXACT = {
    "gpt2": 124_439_808,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
}


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_the_shape_gives_exactly_the_published_parameters(name: str, parameters: int) -> None:
    assert library.model(name).parameters() == parameters


@pytest.mark.parametrize("name", sorted(library.models()))
def test_every_model_is_valid_and_near_its_published_size(name: str) -> None:
    model = library.model(name).check()
    assert model.source.startswith("https://")
    digits = 0.03 if name == "megatron-1.7b" else 0.011  # two digits in the paper
    assert model.parameters() == pytest.approx(model.parameters_published, rel=digits)


def test_a_token_passes_through_the_active_experts_only() -> None:
    assert library.model("mixtral-8x7b").active_parameters() == pytest.approx(12.9e9, rel=0.01)
    assert library.model("deepseek-v3").active_parameters() == pytest.approx(37e9, rel=0.02)
    assert library.model("qwen3-235b-a22b").active_parameters() == pytest.approx(22e9, rel=0.01)


def test_flops_agree_with_the_formula_of_megatron() -> None:
    model = library.model("megatron-145.6b")
    layers, hidden, length, words = model.layers, model.hidden, model.sequence, model.vocab
    rest = 1 + length / (6 * hidden) + words / (12 * layers * hidden)
    assert model.flops_per_token() == pytest.approx(72 * layers * hidden**2 * rest, rel=1e-6)


def test_flops_are_about_six_for_each_parameter_and_token() -> None:
    model = library.model("llama3-405b")
    assert model.flops_per_token() == pytest.approx(6 * model.parameters(), rel=0.09)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": 0}, "model m: layers is 0: it must be at least 1"),
        ({"layers": 10**9}, "model m: layers is 1e+09: the most that a plan accepts is 10000"),
        ({"hidden": -8}, "model m: hidden is -8: it must be at least 1"),
        ({"heads": 7}, "model m: hidden 64 is not a multiple of heads 7"),
        ({"kv_heads": 3}, "model m: heads 4 is not a multiple of kv_heads 3"),
        ({"experts": 8}, "model m: experts_active is 0: it must be from 1 to experts (8)"),
        ({"dense_layers": 3}, "model m: dense_layers 3 is more than layers 2"),
        ({"sequence": 10**12}, "model m: sequence is 1e+12"),
    ],
)
def test_an_absurd_shape_gets_one_sentence(fields: dict[str, int], said: str) -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, **fields}
    with pytest.raises(Impossible) as caught:
        library.convert(Model, {"name": "m", **shape}, "m").check()
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(Impossible, match="did you mean llama3-70b"):
        library.model("lama3-70b")
    with pytest.raises(Impossible, match="no GPU is called 'h1000'; did you mean h100"):
        library.hardware().cluster("h1000", 1)


def test_an_unknown_field_of_a_hardware_file_is_named() -> None:
    with pytest.raises(Impossible, match="h100: Object contains unknown field `memory`"):
        library.catalog({"accelerators": {"h100": {"memory": 3}}}, library.hardware())


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"accelerators": 3}, "accelerators of the hardware file must be a table of fields"),
        ({"nodes": {"n": 3}}, "nodes.n of the hardware file must be a table of fields"),
        ({"gpus": {}}, "a hardware file has no section 'gpus': use accelerators, nodes or"),
        (
            {"accelerators": {"h100": {"matmul_tflops": [[8, 0]]}}},
            "accelerator h100: matmul_tflops: the rate at size 8 is 0: it must be more than 0",
        ),
        (
            {"nodes": {"dgx-h100": {"link_busbw": [[8, 1], [2, 1]]}}},
            "node dgx-h100: link_busbw: size 2 comes after 8: sizes must rise",
        ),
    ],
)
def test_a_damaged_hardware_file_gets_one_sentence(tables: dict[str, object], said: str) -> None:
    with pytest.raises(Impossible) as caught:
        library.catalog(tables, library.hardware()).cluster("h100", 1)
    assert str(caught.value).startswith(said)


def test_a_hardware_file_changes_only_the_fields_it_gives() -> None:
    measured = {"accelerators": {"h200": {"matmul_tflops": [[4096, 600], [16384, 700]]}}}
    merged = library.catalog(measured, library.hardware())
    assert merged.accelerator("h200").matmul_tflops == ((4096, 600), (16384, 700))
    assert merged.accelerator("h200").memory_gbs == 4800
    assert merged.accelerator("h100") == library.hardware().accelerator("h100")
