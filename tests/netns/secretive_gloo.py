"""Torch over gloo, as any script uses it: sums, and says how fast a large one was."""

import os
import time

import torch
import torch.distributed as dist

WORDS = b"attack at dawn, says the member"
MB, TIMES = 16, 8

dist.init_process_group("gloo")
data = torch.frombuffer(bytearray(WORDS * 4096), dtype=torch.uint8)
held = data.clone() if dist.get_rank() == 0 else torch.zeros_like(data)
dist.broadcast(held, 0)
assert bytes(held.numpy().tobytes()) == WORDS * 4096
numbers = torch.ones(MB << 18)
dist.all_reduce(numbers)
began = time.monotonic()
for _ in range(TIMES):
    dist.all_reduce(numbers)
took_s = time.monotonic() - began
assert int(numbers[0]) == dist.get_world_size() ** (1 + TIMES)
print(f"{TIMES * MB / took_s:.0f} MB/s at {os.environ['MASTER_ADDR']} heard", flush=True)
dist.destroy_process_group()
