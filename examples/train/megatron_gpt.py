"""Megatron-core as its own quick start does it: parallel state, a small GPT, its training schedule.

    shoal run -n 2 -g 1 -- python megatron_gpt.py

With GPUs the two members share one model by tensor parallelism. Without a GPU Megatron-core gets as
far as its process groups and a GPT built on the CPU: its schedule and its random number tracker
call torch.cuda. This script says so, and ends with code 0 after that much.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, WORDS, BATCH, STEPS = 64, 128, 8, 20


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if on_gpu:
        model_parallel_cuda_manual_seed(123)
    model = gpt(on_gpu)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"rank {dist.get_rank()}: {parameters} parameters here, "
        f"tensor parallel {parallel_state.get_tensor_model_parallel_world_size()}",
        flush=True,
    )
    if on_gpu:
        train(model.cuda())
    else:
        print("no GPU: megatron-core's training schedule needs CUDA, so this is all", flush=True)
    dist.destroy_process_group()


def gpt(on_gpu: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(),
        gradient_accumulation_fusion=False,
        perform_initialization=True,
        bias_dropout_fusion=on_gpu,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
    )


def train(model: GPTModel) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    schedule = get_forward_backward_func()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward,
            data_iterator=iter([sequences(step)]),
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: {losses}", flush=True)


def sequences(step: int) -> torch.Tensor:
    """Counting, from some number on: something that can be learned."""
    start = torch.arange(BATCH)[:, None] * 7 + step
    return ((start + torch.arange(LENGTH + 1)) % WORDS).cuda()


def forward(data: object, model: GPTModel) -> tuple[torch.Tensor, object]:
    numbers = next(data)  # type: ignore[call-overload]
    places = torch.arange(LENGTH, device=numbers.device).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device=numbers.device).triu(1).bool()
    losses = model(numbers[:, :-1], places, mask, labels=numbers[:, 1:])
    return losses, partial(mean)


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.item()}


if __name__ == "__main__":
    main()
