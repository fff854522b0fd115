"""A run that logs like a training script and does no other work: `trainer.py STEPS`.

By the environment: LR (how quickly its loss falls), PACE_S (seconds a step takes), BREAK (the step
at which the first attempt fails).
"""

from __future__ import annotations

import math
import os
import sys
import time

from shoal.train.beats import Beats


def main() -> None:
    steps, pace_s = int(sys.argv[1]), float(os.environ.get("PACE_S", "0.1"))
    rate, us = float(os.environ["LR"]), int(pace_s * 1e6)
    fails = int(os.environ.get("BREAK", "0")) if os.environ["SHOAL_ATTEMPT"] == "1" else 0
    beats = Beats()
    for step in range(1, steps + 1):
        time.sleep(pace_s)
        loss = 0.1 + 10 * math.exp(-rate * step)
        beats.log({"loss": loss, "accuracy": 1 / (1 + loss), "lr": rate / step, "tokens/s": 40_000})
        beats.send(step=step, steps=step, compute_us=us * step, steps_total=steps)
        if step == fails:
            sys.exit("out of luck")


if __name__ == "__main__":
    main()
