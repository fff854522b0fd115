"""The models and the hardware that Shoal knows by name, from the data files beside this module."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.plan.hardware import Accelerator, Cluster, Fabric, NodeKind
from shoal.plan.impossible import Impossible
from shoal.plan.model import Model

Known = TypeVar("Known")
DATA = Path(__file__).with_name("data")


class Catalogue(msgspec.Struct, frozen=True):
    """A hardware file: accelerators, nodes and fabrics by name."""

    accelerators: dict[str, Accelerator] = {}
    nodes: dict[str, NodeKind] = {}
    fabrics: dict[str, Fabric] = {}

    def accelerator(self, name: str) -> Accelerator:
        return _find("GPU", name, self.accelerators)

    def node(self, name: str) -> NodeKind:
        return _find("node kind", name, self.nodes)

    def fabric(self, name: str) -> Fabric:
        return _find("fabric", name, self.fabrics)

    def node_for(self, accelerator: str) -> NodeKind:
        """The usual node with this GPU: the first in the file."""
        self.accelerator(accelerator)
        for kind in self.nodes.values():
            if kind.accelerator == accelerator:
                return kind
        raise Impossible(f"no node kind has the GPU {accelerator}: add one to the hardware file")

    def cluster(self, gpu: str, nodes: int, *, node: str = "", fabric: str = "") -> Cluster:
        kind = self.node(node) if node else self.node_for(gpu)
        if gpu and kind.accelerator != gpu:
            raise Impossible(f"node kind {kind.name} has the GPU {kind.accelerator}, not {gpu}")
        return Cluster(
            accelerator=self.accelerator(kind.accelerator),
            node=kind,
            fabric=self.fabric(fabric or "infiniband"),
            nodes=nodes,
        ).check()


@functools.cache
def models() -> dict[str, Model]:
    return {
        name: convert(Model, {"name": name, **row}, name) for name, row in _toml("models").items()
    }


def model(name: str) -> Model:
    return _find("model", name, models())


@functools.cache
def hardware() -> Catalogue:
    return catalogue(_toml("hardware"))


def catalogue(tables: Mapping[str, Any], base: Catalogue | None = None) -> Catalogue:
    """From the tables of a hardware file. Entries with the same name as one of `base` change only
    the fields that they give."""
    known = base or Catalogue()
    for section, rows in tables.items():
        if section not in Catalogue.__struct_fields__:
            raise Impossible(
                f"a hardware file has no section {section!r}: use accelerators, nodes or fabrics"
            )
        named = {f"{section}.{name}": row for name, row in rows.items()} if _table(rows) else {}
        for name, row in {section: rows, **named}.items():
            if not _table(row):
                raise Impossible(f"{name} of the hardware file must be a table of fields")
    return Catalogue(
        accelerators=_merged(Accelerator, known.accelerators, tables.get("accelerators", {})),
        nodes=_merged(NodeKind, known.nodes, tables.get("nodes", {})),
        fabrics=_merged(Fabric, known.fabrics, tables.get("fabrics", {})),
    )


def _table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _merged(kind: Any, known: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(known)
    for name, row in rows.items():
        old = msgspec.to_builtins(known[name]) if name in known else {}
        merged[name] = convert(kind, {**old, "name": name, **row}, name)
    return merged


def convert(kind: Any, row: Any, name: str) -> Any:
    try:
        return msgspec.convert(row, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Impossible(f"{name}: {error}") from None


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def _find(kind: str, name: str, known: Mapping[str, Known]) -> Known:
    if name in known:
        return known[name]
    raise Impossible(f"no {kind} is called {name!r}; {_suggestion(name, known)}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}"


# The shape of a model from the config.json that lies beside its weights on HuggingFace.


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
