"""The models and the hardware that Shoal knows by name, and hardware files of what was measured."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.model.fabric import Collective
from shoal.plan.hardware import Accelerator, Cluster, Curve, Fabric, Impossible, Measured, NodeKind
from shoal.plan.model import Model

Known = TypeVar("Known")
DATA = Path(__file__).with_name("data")


class Catalog(msgspec.Struct, frozen=True):
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
def hardware() -> Catalog:
    return catalog(_toml("hardware"))


def catalog(tables: Mapping[str, Any], base: Catalog | None = None) -> Catalog:
    """From the tables of a hardware file. Entries with the same name as one of `base` change only
    the fields that they give."""
    known = base or Catalog()
    for section, rows in tables.items():
        if section not in Catalog.__struct_fields__:
            raise Impossible(
                f"a hardware file has no section {section!r}: use accelerators, nodes or fabrics"
            )
        named = {f"{section}.{name}": row for name, row in rows.items()} if _table(rows) else {}
        for name, row in {section: rows, **named}.items():
            if not _table(row):
                raise Impossible(f"{name} of the hardware file must be a table of fields")
    return Catalog(
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


# A hardware file from what was measured: `shoal plan --hardware FILE` reads it.


MEMORY_APART = 0.15  # cards of one name with other memory are other entries
USUAL_SHARE = 0.75  # of the peak that a large product reaches, where nobody knows the peak
SOURCE = "measured by shoal check"
LOCAL_GBS = 32.0  # PCIe, where nobody measured


def toml(measured: Measured, known: Catalog, when: str = "") -> str:
    """GPUs that the catalog knows get only what was measured; others a whole entry."""
    name = entry_name(measured, known.accelerators)
    chip = known.accelerators.get(name)
    lines = [f"# {measured.gpus} x {measured.gpu}, {SOURCE}{f' on {when}' if when else ''}."]
    lines += [f"# Host to GPU {measured.up_gbs:g} GB/s, GPU to host {measured.down_gbs:g} GB/s."]
    lines += [f"# {note}" for note in measured.notes]
    lines += ["", f"[accelerators.{name}]", *_accelerator(measured, chip)]
    if node := _node(measured, name, known):
        lines += ["", *node]
    return "\n".join(lines) + "\n"


def fabric_toml(rows: Sequence[Collective], latency_us: int, when: str = "") -> str:
    """The network between nodes, as a fabric of its own; empty if no all-reduce was measured."""
    reduced = [row for row in rows if row.name == "all-reduce" and row.bus_mbs]
    if not reduced:
        return ""
    by = "NCCL on GPUs" if reduced[0].backend == "nccl" else "gloo on CPUs, so GPUs may do better"
    curve = tuple((float(row.size_bytes), row.bus_mbs / 1000) for row in reduced)
    return "\n".join(
        [
            f"# {reduced[0].ranks} ranks, {by}; {SOURCE}{f' on {when}' if when else ''}.",
            "# Choose it with: shoal plan --fabric measured",
            "",
            "[fabrics.measured]",
            f"latency_us = {latency_us or 5}",
            f"busbw = {_curve(curve)}",
            f'source = "{SOURCE}"',
            "",
        ]
    )


def entry_name(measured: Measured, known: Mapping[str, Accelerator]) -> str:
    """The catalog's name of this GPU, or one made of its own."""
    words = measured.gpu.lower().replace("nvidia", "").replace("tesla", "").split()
    parts = [part for word in words for part in word.split("-")]
    fitting = [
        name
        for name, chip in known.items()
        if name.split("-")[0] in parts
        and abs(chip.memory_gib - measured.memory_gib) <= MEMORY_APART * chip.memory_gib
    ]
    return max(fitting, key=len) if fitting else "-".join(parts) or "gpu"


def _accelerator(measured: Measured, chip: Accelerator | None) -> list[str]:
    curves = measured.matmul_tflops
    best = {kind: max(rate for _, rate in curve) for kind, curve in curves.items() if curve}
    lines = []
    if chip is None:
        peaks = ", ".join(f"{kind} = {rate / USUAL_SHARE:.0f}" for kind, rate in best.items())
        lines += [
            f"peak_tflops = {{ {peaks} }} # guessed: {USUAL_SHARE:.0%} of it was reached",
            f"memory_gib = {measured.memory_gib:g}",
            f"memory_gbs = {measured.copy_gbs:g}",
            f"link_gbs = {LOCAL_GBS:g} # assumed",
            f"power_w = {measured.power_w or 300:g}",
        ]
    peak = chip.peak("bf16") / 1e12 if chip else best.get("bf16", 0.0) / USUAL_SHARE
    if peak and "bf16" in best:
        lines.append(f"matmul = {min(1.0, best['bf16'] / peak):.3f}")
        if measured.flash_tflops:
            lines.append(f"flash = {min(1.0, measured.flash_tflops / peak):.3f}")
    if measured.copy_gbs:
        lines.append(f"copy_gbs = {measured.copy_gbs:g}")
    if "bf16" in curves:
        lines.append(f"matmul_tflops = {_curve(curves['bf16'])}")
    lines += [f"# {kind}: {_curve(curve)}" for kind, curve in curves.items() if kind != "bf16"]
    lines.append(f'source = "{SOURCE}"')
    return lines


def _node(measured: Measured, name: str, known: Catalog) -> list[str]:
    """Collectives within the node. A kind of node that is known keeps its network."""
    rows = [row for row in measured.collectives if row.name == "all-reduce" and row.bus_mbs]
    kind = next((kind for kind in known.nodes.values() if kind.accelerator == name), None)
    lines = [f"[nodes.{kind.name if kind and kind.gpus == measured.gpus else name + '-node'}]"]
    if not kind or kind.gpus != measured.gpus:
        lines += [f'accelerator = "{name}"', f"gpus = {measured.gpus}", "nic_gbs = 12.5 # assumed"]
    elif not rows:
        return []
    if rows:
        curve = tuple((float(row.size_bytes), row.bus_mbs / 1000) for row in rows)
        lines.append(f"link_busbw = {_curve(curve)}")
    others = [row for row in measured.collectives if row.name != "all-reduce"]
    lines += [
        f"# {row.name}, {row.size_bytes} bytes: {row.bus_mbs / 1000:g} GB/s" for row in others
    ]
    return [*lines, f'source = "{SOURCE}"']


def _curve(curve: Curve) -> str:
    return "[" + ", ".join(f"[{size:.0f}, {rate:g}]" for size, rate in curve) + "]"
