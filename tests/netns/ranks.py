"""An MPI program: every rank says where it is and what it has, and all add up their ranks. With
`wait`, they stay until something ends them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mpi4py import MPI

ranks = MPI.COMM_WORLD
total = ranks.allreduce(ranks.rank)
have = [os.environ.get(name, "-") for name in ("SHOAL_NODE", "SHOAL_MEMBER", "RANK")]
shared = Path(os.environ["SHARED"])
with (shared / f"{os.environ['SHOAL_JOB_ID']}.ranks").open("a") as file:
    file.write(" ".join(map(str, (ranks.rank, ranks.size, total, *have, os.getpid()))) + "\n")
while "wait" in sys.argv:
    time.sleep(0.05)
