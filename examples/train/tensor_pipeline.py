"""PyTorch's own tensor and pipeline parallelism: two stages, each split over its members.

    shoal run -n 4 --retries 3 -- python tensor_pipeline.py

Two members hold the first half of the layers, two the second. Sharded checkpoints of torch's own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain import checkpoint_file, newest, own_device, point_at_newest
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

WORDS, WIDTH, LAYERS, STAGES, BATCH, PARTS, SAVE_EVERY = 128, 64, 4, 2, 64, 4, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    device = own_device()
    kind = device.type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    shape = (STAGES, dist.get_world_size() // STAGES)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("pipeline", "tensor"))
    number = mesh["pipeline"].get_local_rank()
    model = stage(number).to(device)
    plan = {"layer*.up": ColwiseParallel(), "layer*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = newest("tensor-pipeline")
    if first:
        load(model, optimizer, first)
        print(f"goes on with step {first}", flush=True)
    group = mesh["pipeline"].get_group()
    part = PipelineStage(model, number, STAGES, device, group=group)
    schedule = ScheduleGPipe(part, n_microbatches=PARTS, loss_fn=functional.cross_entropy)
    for step in range(first, steps):
        numbers, answers = batch(step, device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(numbers)
        else:
            schedule.step(target=answers, losses=losses)
        optimizer.step()
        if dist.get_rank() == dist.get_world_size() - 1:  # a member of the last stage
            print(f"step {step} done: loss {torch.stack(losses).mean():.6f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            save(model, optimizer, step + 1)
    dist.barrier()
    dist.destroy_process_group()


def stage(number: int) -> nn.Sequential:
    """Its layers, with the names that they have in the whole model, and in its checkpoints."""
    torch.manual_seed(0)
    names = ["words", *(f"layer{n}" for n in range(LAYERS)), "answer"]
    parts = [nn.Embedding(WORDS, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS)]
    whole = list(zip(names, parts, strict=True))
    half = len(whole) // STAGES
    mine = nn.Sequential()
    for name, layer in whole[number * half : (number + 1) * half]:
        mine.add_module(name, layer)
    return mine


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Something that can be learned: for each number, which one it stands for."""
    numbers = (torch.arange(BATCH) + step * BATCH) % WORDS
    return numbers.to(device), ((numbers * 7 + 3) % WORDS).to(device)


# Stages have optimizers of their own: without this, each would save groups under the same names.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    place = str(checkpoint_file(f"tensor-pipeline-{done}"))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place)
    point_at_newest("tensor-pipeline", done)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    saved = {"model": weights, "optimizer": moments}
    dcp.load(saved, checkpoint_id=str(checkpoint_file(f"tensor-pipeline-{done}")))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=FLAT,
    )


if __name__ == "__main__":
    main()
