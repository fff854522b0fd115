"""A config.json from HuggingFace is the same model as the one in the library."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.plan import library
from shoal.plan import library as huggingface
from shoal.plan.hardware import Impossible
from shoal.plan.model import Model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
DEFAULTS = ("hidden_act", "rms_norm_eps", "torch_dtype", "model_type")  # some leave them out
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def read(config: dict[str, Any]) -> Model:
    assert huggingface.is_config(config)
    made: Model = library.convert(Model, huggingface.shape(config), "model")
    return made.check()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"),
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK, "deepseek-v3"),
        (GPT2, "gpt2"),
        ({key: LLAMA[key] for key in LLAMA if key not in DEFAULTS}, "llama3-8b"),
        ({"model_type": "seeing", "text_config": LLAMA, "vision_config": {}}, "llama3-8b"),
    ],
)
def test_a_config_has_the_parameters_of_the_model_that_it_describes(
    config: dict[str, Any], name: str
) -> None:
    made, known = read(config), library.model(name)
    assert made.parameters() == pytest.approx(known.parameters(), rel=0.002)
    assert made.active_parameters() == pytest.approx(known.active_parameters(), rel=0.002)


def test_the_longest_sequence_of_a_config_is_not_the_one_that_is_trained_on() -> None:
    assert read(LLAMA).sequence == 8192
    assert read(GPT2).sequence == 1024


def test_a_config_of_another_kind_of_model_is_refused_in_one_line() -> None:
    with pytest.raises(Impossible, match="has no num_hidden_layers: give the shape"):
        huggingface.shape({"model_type": "mamba", "d_model": 768})
    with pytest.raises(Impossible, match="only decoders"):
        huggingface.shape({"model_type": "t5", "is_encoder_decoder": True})
