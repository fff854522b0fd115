"""What a member of a gang finds in its environment: its rank, the others, and its GPUs."""

import os


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print(f"member {rank} of {size}, attempt {os.environ['SHOAL_ATTEMPT']}")
    print(f"  on node {os.environ['SHOAL_NODE']} as local rank {os.environ['LOCAL_RANK']}")
    print(f"  with GPUs [{os.environ['CUDA_VISIBLE_DEVICES']}]")
    print(f"  the gang meets at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")


if __name__ == "__main__":
    main()
