"""A Hugging Face Accelerate script: saves and loads with `save_state`, as its guide shows.

shoal run -n 2 -- python accelerated.py
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from data import digits
from plain import checkpoint_file, options
from torch.nn import functional
from torch.utils.data import DataLoader

from model import DigitNet


def main() -> None:
    asked = options()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    batch = 64 // accelerator.num_processes
    model, optimizer, batches = accelerator.prepare(
        net := DigitNet(),
        torch.optim.Adam(net.parameters(), lr=3e-3),
        DataLoader(digits(asked.samples, seed=1), batch, shuffle=True),
    )
    newest, first = checkpoint_file("accelerate-newest"), 0
    if newest.exists():
        first = int(newest.read_text())
        accelerator.load_state(str(checkpoint_file(f"accelerate-{first}")))
        print(f"goes on with epoch {first}", flush=True)
    for epoch in range(first, asked.epochs):
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(str(checkpoint_file(f"accelerate-{epoch + 1}")))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            new = checkpoint_file("accelerate-newest.new")
            new.write_text(str(epoch + 1))
            os.replace(new, newest)
            print(f"epoch {epoch} done: loss {loss.item():.3f}", flush=True)
    accelerator.wait_for_everyone()  # the threads of the last averaging are done before it goes
    accelerator.end_training()


if __name__ == "__main__":
    main()
