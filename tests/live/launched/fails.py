"""Rank 1 fails, and the others wait for it."""

import os

import torch.distributed as dist

for ours, of_mpi in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
    if of_mpi in os.environ:
        os.environ[ours] = os.environ[of_mpi]
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("the learning rate became nan at step 17")
dist.barrier()
