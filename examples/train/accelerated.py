"""A Hugging Face Accelerate script: saves and loads with `save_state`, as its guide shows.

shoal run -n 2 -- python accelerated.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from plain import checkpoint_file, newest, options, point_at_newest
from torch.nn import functional
from torch.utils.data import DataLoader

from data import digits
from model import DigitNet


def main() -> None:
    asked = options()
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # by the epoch, also after a restart
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    torch.manual_seed(0)
    batch = 64 // accelerator.num_processes
    model, optimizer, batches = accelerator.prepare(
        net := DigitNet(),
        torch.optim.Adam(net.parameters(), lr=3e-3),
        DataLoader(digits(asked.samples, seed=1), batch, shuffle=True),
    )
    if first := newest("accelerate"):
        accelerator.load_state(str(checkpoint_file(f"accelerate-{first}")))
        print(f"goes on with epoch {first}", flush=True)
    for epoch in range(first, asked.epochs):
        batches.set_epoch(epoch)
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(str(checkpoint_file(f"accelerate-{epoch + 1}")))
        point_at_newest("accelerate", epoch + 1)
        if accelerator.is_main_process:
            print(f"epoch {epoch} done: loss {loss.item():.3f}", flush=True)
    accelerator.wait_for_everyone()  # the threads of the last averaging are done before it goes
    accelerator.end_training()


if __name__ == "__main__":
    main()
