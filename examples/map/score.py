"""Batch inference: how surprising a text is to the character-level transformer.

    python make_inputs.py 100000 > inputs.jsonl
    shoal map score.py:score inputs.jsonl -o scores.jsonl --init load
    shoal map score.py:score inputs.jsonl -o scores.jsonl --init load --cluster --env MODEL=/nfs/j1

The model is built once in each worker, by `load`. MODEL names trained weights: the checkpoints of a
job, or a file that `torch.save(model.state_dict(), "weights.pt")` wrote. Without it the model is an
untrained one that is the same everywhere. `python ../map_inference.py` does all of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import torch
from torch.nn import functional

import shoal.tasks
from model import ALPHABET, CONTEXT, CharTransformer, encode


def load() -> CharTransformer:
    torch.set_num_threads(1)  # the cores are shared out among the workers already
    torch.manual_seed(0)
    model = CharTransformer()
    weights = os.environ.get("MODEL", "")
    if os.path.isdir(weights):
        from server import load as load_checkpoint

        print(load_checkpoint(model, weights), flush=True)
    elif weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


@torch.no_grad()
def score(line: dict[str, Any]) -> dict[str, Any]:
    """Nats per character."""
    numbers = encode("\n" + line["text"])[None, : CONTEXT + 1]
    scores = shoal.tasks.context()(numbers[:, :-1]).view(-1, len(ALPHABET))
    loss = functional.cross_entropy(scores, numbers[0, 1:])
    return {"id": line["id"], "nats": round(loss.item(), 5)}
