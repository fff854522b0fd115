"""A character-level transformer that survives whatever happens to its nodes.

    python chars.py                              alone
    torchrun --nproc-per-node 2 chars.py         without Shoal
    shoal run -n 2 -- python chars.py            with it

About two minutes on two CPU cores: the loss falls from 4.4 to below 2.0 (nats per character), where
guessing from the character before gives 2.5. Then it writes a few lines of its own.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import shoal.train
from data import Text
from model import ALPHABET, CharTransformer

GOAL = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all members")
    options = parser.parse_args()

    ctx = shoal.train.init()
    torch.manual_seed(0)
    model = CharTransformer().to(ctx.device)
    trained = DistributedDataParallel(model) if ctx.world > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
    state = {"model": trained, "optimizer": optimizer}
    ctx.restore(state)
    loader = DataLoader(Text(), options.batch, shuffle=True)
    recent = 0.0
    for step, (text, following) in ctx.steps(loader, steps=options.steps):
        scores = trained(text.to(ctx.device)).view(-1, len(ALPHABET))
        loss = functional.cross_entropy(scores, following.to(ctx.device).view(-1))
        optimizer.zero_grad()
        (loss * ctx.weight).backward()
        optimizer.step()
        ctx.log(loss=loss)
        if ctx.can_save:
            ctx.save(state, every="auto")
        recent = loss.item() if not recent else 0.95 * recent + 0.05 * loss.item()
        if ctx.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {recent:.3f}", flush=True)
    if ctx.rank == 0 and recent:
        print(f"loss {recent:.3f}: {'reached' if recent < GOAL else 'above'} the goal of {GOAL}")
        print(model.write("The value of ", 160))


if __name__ == "__main__":
    main()
