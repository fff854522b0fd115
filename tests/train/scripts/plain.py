"""Steps without end over something that is no DataLoader, and without a state."""

from __future__ import annotations

import time

import shoal.train

if __name__ == "__main__":
    for step, _ in shoal.train.init().steps([None], steps=1 << 40):
        time.sleep(0.01)
        print(f"step {step}", flush=True)
