"""Decides as nanoGPT does: whoever finds RANK in its environment is part of a group."""

from __future__ import annotations

import os


def main() -> None:
    ddp = int(os.environ.get("RANK", -1)) != -1
    if not ddp:
        print("alone", flush=True)
        return
    import torch  # takes seconds, and alone it is not needed
    import torch.distributed as dist

    dist.init_process_group(backend="gloo")
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ranks[int(os.environ["RANK"])] = 1 + int(os.environ["LOCAL_RANK"])
    dist.all_reduce(ranks)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"world of {dist.get_world_size()}, local ranks {(ranks - 1).tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
