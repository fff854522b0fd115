"""What `bench/gpu.py` trains: a transformer in bf16 through `gpu_train.py ddp|fsdp STEPS`.

Writes its progress to BENCH_MARKS (see `recovery_train.py`), and at the end prints one JSON object:
milliseconds per step, tokens per second, and how long saves blocked the loop.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

from bench.recovery_train import mark

WIDTH, HEADS, DEPTH, LENGTH, BATCH, WORDS = 1024, 16, 12, 1024, 16, 32_000
WARM_STEPS = 20
EVERY = 100  # longer than one save takes, or the next save waits for the last


def main() -> None:
    mark("begin")
    kind, steps = sys.argv[1], int(sys.argv[2])
    import torch
    from torch.nn import functional

    import shoal.train

    if "WORLD_SIZE" not in os.environ:  # Shoal makes no group for a lone member, FSDP2 needs one
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1
        )
    ctx = shoal.train.init(keep=2)
    mark("joined")
    torch.manual_seed(0)
    layers = [
        torch.nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            device=ctx.device,
        )
        for _ in range(DEPTH)
    ]
    words = torch.nn.Embedding(WORDS, WIDTH, device=ctx.device)
    head = torch.nn.Linear(WIDTH, WORDS, bias=False, device=ctx.device)
    model: torch.nn.Module = torch.nn.Sequential(words, *layers, head)
    if kind == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=mixed)
        fully_shard(model, mp_policy=mixed)
    elif ctx.world > 1 or torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state = {"model": model, "optimizer": optimizer}
    ctx.restore(state)
    mark("restored")
    generator = torch.Generator(device=ctx.device).manual_seed(1)
    took: list[float] = []
    blocked: list[float] = []
    last = time.perf_counter()
    for step, _ in ctx.steps([None], steps=steps):
        batch = torch.randint(WORDS, (BATCH, LENGTH + 1), device=ctx.device, generator=generator)
        with torch.autocast("cuda", torch.bfloat16, enabled=kind != "fsdp"):
            scores = model(batch[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log(loss=loss)
        torch.cuda.synchronize()
        ended = time.perf_counter()
        saved = ctx.save(state, every=EVERY)
        now = time.perf_counter()
        if saved:
            blocked.append(now - ended)
        took.append(ended - last)
        last = now
        mark(str(step))
    ctx.close()
    if ctx.rank == 0:
        step_s = statistics.median(took[WARM_STEPS:])
        figures = {
            "step_ms": round(step_s * 1000, 2),
            "tokens_per_s": round(BATCH * LENGTH * ctx.world / step_s),
            "save_blocked_ms": [round(seconds * 1000, 1) for seconds in blocked],
            "parameters_m": round(sum(p.numel() for p in model.parameters()) / 1e6),
        }
        print("figures " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
