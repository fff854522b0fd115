"""The shape of a model from the config.json that lies beside its weights on HuggingFace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.plan.impossible import Impossible

SEQUENCE_USUAL = 8192  # a config has the longest sequence, and few train on it from the start
_GATED = ("llama", "mistral", "mixtral", "qwen", "deepseek", "gemma")  # and RMSNorm; all by default
_LEARNED_POSITIONS = ("gpt2", "opt", "gpt_bigcode")
_NAMES = {  # ours, and theirs: the first one that is there counts
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head": ("v_head_dim", "head_dim"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "sequence": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "experts_active": ("num_experts_per_tok",),
    "shared_experts": ("n_shared_experts",),
    "expert_ffn": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_head": ("qk_rope_head_dim",),
}
_NEEDED = ("layers", "hidden", "heads", "vocab")
_MARKS = ("architectures", "model_type", "transformers_version", "text_config")


def is_config(fields: Mapping[str, Any]) -> bool:
    return any(mark in fields for mark in _MARKS)


def shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Model`. Biases are guessed from the kind of norm: they hardly matter."""
    kind = str(config.get("model_type", "model"))
    inner = config.get("text_config")  # of models that see or hear, the part that reads and writes
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    if config.get("is_encoder_decoder"):
        raise Impossible(f"{kind} has an encoder and a decoder: only decoders are planned")
    found: dict[str, Any] = {"name": kind}
    for ours, theirs in _NAMES.items():
        value = next((config[name] for name in theirs if config.get(name) is not None), None)
        if value is not None:
            found[ours] = value
        elif ours in _NEEDED:
            raise Impossible(
                f"this config.json has no {theirs[0]}: give the shape in a file of your own "
                "(layers, hidden, heads, ...), as in docs/plan.md"
            )
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "")
    family = f"{kind} {config.get('architectures', '')}".lower()
    usual = any(name in family for name in _GATED)
    found["gated_ffn"] = usual or activation in ("silu", "swish")
    found["biases"] = found["norm_biases"] = not (
        usual or any(name.startswith("rms_norm") for name in config)
    )
    found["tied"] = config.get("tie_word_embeddings", True)
    if config.get("multi_query") and "kv_heads" not in found:
        found["kv_heads"] = 1
    if kind in _LEARNED_POSITIONS and "sequence" in found:
        found["positions"] = found["sequence"]
    if isinstance(found.get("sequence"), int):
        found["sequence"] = min(found["sequence"], SEQUENCE_USUAL)
    return found
