"""Predicted against measured time of a training step, on one GPU.

Run with `python -m bench.plan_gpu --out FOLDER` on a machine with a GPU and torch with CUDA. It
measures the GPU first (`hardware.toml`), then trains transformers made of the blocks of
`examples/train/model.py`, from the example itself to 2.7 B parameters, in bf16 with AdamW, with and
without recomputation, compiled and not. The prediction is that of `shoal.plan` with the file just
measured. `--measured FOLDER` predicts again, from what an earlier run wrote, without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import machine, table
from shoal.plan.hardware import Cluster
from shoal.plan.layout import Layout, Stack
from shoal.plan.library import catalog, entry_name, hardware, toml
from shoal.plan.model import Model
from shoal.plan.step import estimate
from shoal.probes.hardware import measure

EXAMPLES = Path(__file__).parent.parent / "examples" / "train"
GOAL = 0.15
STEPS, WARM, STEP_S = 12, 4, 6.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. `micro`: sequences of a step."""

    model: Model
    micro: int
    recompute: bool = False
    compiled: bool = True
    step_s: float = 0.0
    memory_gib: float = 0.0
    error: str = ""

    @property
    def name(self) -> str:
        kind = "compiled" if self.compiled else "eager"
        return f"{self.model.name}, {self.micro} x {self.model.sequence}, {kind}"


def gpt(name: str, layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> Model:
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocab=vocab,
        positions=sequence,
        tied=False,
    )


CHARS = gpt("the example chars.py", 3, 96, 4, 64, 76)
WIDE = gpt("chars.py, width 1024, depth 8", 8, 1024, 16, 64, 76)
SMALL = gpt("GPT-2 124 M", 12, 768, 12, 1024, 50_304)
MEDIUM = gpt("GPT-2 350 M", 24, 1024, 16, 1024, 50_304)
LARGE = gpt("GPT-2 1.5 B", 48, 1600, 25, 1024, 50_304)
LARGER = gpt("GPT-3 2.7 B", 32, 2560, 20, 2048, 50_304)
ROWS = [
    Row(model=SMALL, micro=32),
    Row(model=SMALL, micro=32, compiled=False),
    Row(model=MEDIUM, micro=32),
    Row(model=MEDIUM, micro=32, compiled=False),
    Row(model=MEDIUM, micro=32, recompute=True),
    Row(model=LARGE, micro=16),
    Row(model=LARGE, micro=16, compiled=False),
    Row(model=LARGE, micro=16, recompute=True),
    Row(model=LARGER, micro=8),
    Row(model=LARGER, micro=8, compiled=False),
    Row(model=LARGER, micro=16, recompute=True),
    Row(model=WIDE, micro=2048),
    Row(model=CHARS, micro=64, compiled=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("plan-gpu"))
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0, help="begin no row after them")
    asked = parser.parse_args()
    folder = asked.measured or asked.out
    if asked.measured is None:
        print(machine(), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure()
        (folder / "hardware.toml").write_text(toml(found, hardware(), time.strftime("%Y-%m-%d")))
        print((folder / "hardware.toml").read_text(), flush=True)
        (folder / "gpu.json").write_bytes(msgspec.json.encode(found))
        (folder / "rows.json").write_bytes(msgspec.json.encode(train_all(asked.seconds)))
    report(folder)


def train_all(most_s: float) -> list[Row]:
    done: list[Row] = []
    began = time.monotonic()
    for row in ROWS:
        if time.monotonic() - began > most_s:
            done.append(msgspec.structs.replace(row, error="no time was left"))
            continue
        try:
            done.append(train(row))
        except Exception as error:  # the time on a GPU is short: the other rows still count
            traceback.print_exc()
            done.append(msgspec.structs.replace(row, error=str(error)[:200]))
        print(msgspec.json.encode(done[-1]).decode(), flush=True)
    return done


def train(row: Row) -> Row:
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    sys.path.insert(0, str(EXAMPLES))
    import model as example  # type: ignore[import-not-found]  # of examples/train

    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = row.model
    blocks = torch.nn.ModuleList(
        example.Block(shape.hidden, shape.heads) for _ in range(shape.layers)
    )
    words = torch.nn.Embedding(shape.vocab, shape.hidden)
    places = torch.nn.Embedding(shape.sequence, shape.hidden)
    norm = torch.nn.LayerNorm(shape.hidden)
    head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)
    whole = torch.nn.ModuleList([blocks, words, places, norm, head]).cuda()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4, fused=True)

    def loss_of(x: Any, wanted: Any) -> Any:
        return functional.cross_entropy(head(norm(x)).flatten(0, 1).float(), wanted.flatten())

    if row.compiled:
        for block in blocks:
            block.compile()
        loss_of = torch.compile(loss_of)

    def step(numbers: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            before = numbers[:, :-1]
            x = words(before) + places(torch.arange(shape.sequence, device="cuda"))
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if row.recompute else block(x)
            loss = loss_of(x, numbers[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randint(shape.vocab, (row.micro, shape.sequence + 1), device="cuda")
    took = timed(torch, functools.partial(step, batch))
    memory = torch.cuda.max_memory_allocated() / 2**30
    return msgspec.structs.replace(row, step_s=round(took, 6), memory_gib=round(memory, 1))


def timed(torch: Any, act: Any) -> float:
    """The median step, after the first ones, which compile and find memory."""
    for _ in range(WARM):
        act()
    took: list[float] = []
    torch.cuda.synchronize()
    ends = time.monotonic() + STEP_S
    while len(took) < STEPS and (len(took) < 3 or time.monotonic() < ends):
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def predicted(row: Row, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step, and GiB."""
    layout = Layout(micro_batch=row.micro, zero=0, recompute="full" if row.recompute else "none")
    found = estimate(row.model, cluster, layout, Stack(fused=row.compiled))
    return found.step_s, found.memory.total / 2**30


def report(folder: Path) -> None:
    from shoal.plan.hardware import Measured

    known = catalog(tomllib.loads((folder / "hardware.toml").read_text()), hardware())
    gpu = msgspec.json.decode((folder / "gpu.json").read_bytes(), type=Measured)
    name = entry_name(gpu, known.accelerators)
    one = msgspec.structs.replace(known.node_for(name), gpus=1)
    cluster = Cluster(
        accelerator=known.accelerator(name), node=one, fabric=known.fabric("infiniband"), nodes=1
    )
    lines, errors = [], []
    for row in msgspec.json.decode((folder / "rows.json").read_bytes(), type=list[Row]):
        if row.error:
            lines.append((row.name, row.error, "", "", "", "", ""))
            continue
        seconds, gib = predicted(row, cluster)
        error = seconds / row.step_s - 1
        if row.model.hidden > CHARS.hidden:
            errors.append(abs(error))
        lines.append(
            (
                row.name,
                "full" if row.recompute else "none",
                f"{row.step_s * 1000:.1f}",
                f"{seconds * 1000:.1f}",
                f"{error:+.0%}",
                f"{row.memory_gib:.1f}",
                f"{gib:.1f}",
            )
        )
    header = ("run", "recompute", "measured ms", "predicted ms", "error", "GiB", "predicted")
    print(table(header, lines))
    within = sum(error <= GOAL for error in errors)
    print(f"{within} of {len(errors)} within {GOAL:.0%} (the example itself is only launches)")


if __name__ == "__main__":
    main()
