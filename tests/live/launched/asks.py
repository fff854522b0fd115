"""Says who torchrun made it, and whether the place where a group would meet answers."""

import os
import socket

place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
socket.create_connection(place, timeout=60).close()
rank, world, local = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
print(f"rank {rank} of {world}, local rank {local}: the others meet here", flush=True)
