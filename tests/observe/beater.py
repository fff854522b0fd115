"""A member that tells of its steps and does no other work: `beater.py STEPS`.

By the environment: PACE_S (seconds a step takes), SLOW (the member that needs all of it; the others
wait for it), FAIL (a text to end with, as an error).
"""

from __future__ import annotations

import os
import sys
import time

from shoal.train.beats import Beats


def main() -> None:
    steps = int(sys.argv[1])
    pace_s = float(os.environ.get("PACE_S", "0.05"))
    rank, slow = int(os.environ.get("RANK", "0")), int(os.environ.get("SLOW", "0"))
    own_us = int(pace_s * 1e6) if rank == slow else int(pace_s * 4e5)
    wait_us = int(pace_s * 1e6) - own_us
    beats = Beats()
    for step in range(1, steps + 1):
        time.sleep(pace_s)
        beats.log({"loss": 10 / step, "lr": 0.001})
        beats.send(
            step=step,
            steps=step,
            compute_us=own_us * step,
            wait_us=wait_us * step,
            steps_total=steps,
        )
    print(f"done {steps}", flush=True)
    if os.environ.get("FAIL"):
        sys.exit(os.environ["FAIL"])


if __name__ == "__main__":
    main()
