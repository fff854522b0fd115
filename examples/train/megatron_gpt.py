"""Megatron-core: a small GPT that all members share by tensor parallelism.

    shoal run -n 2 -g 1 --retries 3 -- python megatron_gpt.py     # without -g: on CPUs, over gloo

Its layer spec names torch's attention, because Megatron's own needs CUDA. So does its schedule:
without a GPU, the same model and loss run in a plain loop.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from plain import checkpoint_file, newest, own_device, point_at_newest
from torch.nn import functional

LENGTH, WORDS, BATCH, SAVE_EVERY = 64, 128, 8, 5
ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    own_device()
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(123)
    model = gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if first := newest("megatron"):
        saved = torch.load(checkpoint_file(f"megatron-{first}-{rank}.pt"), weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print(f"goes on with step {first}", flush=True)
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = one_step(model, numbers(step))
        optimizer.step()
        if rank == 0:
            print(f"step {step} done: loss {loss:.6f}", flush=True)
        if (done := step + 1) % SAVE_EVERY == 0:  # each member its own part of the model
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint_file(f"megatron-{done}-{rank}.pt"))
            point_at_newest("megatron", done)
    dist.barrier()
    dist.destroy_process_group()


class Attention(torch.nn.Module):
    """Causal, over this member's heads."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query, key, value, *_: object, **__: object) -> torch.Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.permute(2, 0, 1, 3).flatten(2)  # words, batch, heads and their numbers


def gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=ON_GPU,
    )
    layers = get_gpt_layer_local_spec()
    layers.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(config, layers, vocab_size=WORDS, max_sequence_length=LENGTH)
    return model.cuda() if ON_GPU else model


def numbers(step: int) -> torch.Tensor:
    """Counting, from some number on: something that can be learned."""
    start = torch.arange(BATCH)[:, None] * 7 + step
    counted = (start + torch.arange(LENGTH + 1)) % WORDS
    return counted.cuda() if ON_GPU else counted


def one_step(model: GPTModel, batch: torch.Tensor) -> float:
    if not ON_GPU:
        losses, mean = forward(iter([batch]), model)
        loss, _ = mean(losses)
        loss.backward()
        return float(loss.detach())
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return float(reports[0]["loss"])


def forward(data, model: GPTModel):
    batch = next(data)
    places = torch.arange(LENGTH, device=batch.device).expand(BATCH, LENGTH)
    return model(batch[:, :-1], places, None, labels=batch[:, 1:]), mean_loss


def mean_loss(losses: torch.Tensor):
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


if __name__ == "__main__":
    main()
