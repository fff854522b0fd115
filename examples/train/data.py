"""Data that every machine with Python has, or can make: a text, and images of digits."""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch.utils.data import Dataset, TensorDataset

from model import CONTEXT, encode


class Text(Dataset):
    """Python's own reference manual, some hundred thousand characters of English prose, cut into
    pieces of CONTEXT characters, each with the same piece one character on."""

    def __init__(self) -> None:
        manual = topics.topics
        self.numbers = encode("\n".join(manual[name] for name in sorted(manual)))

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // CONTEXT

    def __getitem__(self, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = piece * CONTEXT
        window = self.numbers[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


# Five columns of seven dots for each digit, a column being the bits of a number.
FONT = (
    (62, 81, 73, 69, 62), (0, 66, 127, 64, 0), (66, 97, 81, 73, 70), (33, 65, 69, 75, 49),
    (24, 20, 18, 127, 16), (39, 69, 69, 69, 57), (60, 74, 73, 73, 48), (1, 113, 9, 5, 3),
    (54, 73, 73, 73, 54), (6, 73, 73, 41, 30),
)  # fmt: skip


def digits(count: int, seed: int) -> TensorDataset:
    """Images of 16 x 16: a digit somewhere, larger or smaller, bright or dim, in noise."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.tensor(
        [[[column >> row & 1 for column in columns] for row in range(7)] for columns in FONT]
    ).float()
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.4 * torch.rand(count, 1, 16, 16, generator=generator)
    for number in range(count):
        large = bool(torch.rand((), generator=generator) < 0.5)
        glyph = glyphs[labels[number]]
        glyph = glyph.repeat_interleave(2, 0).repeat_interleave(2, 1) if large else glyph
        height, width = glyph.shape
        top = int(torch.randint(17 - height, (), generator=generator))
        left = int(torch.randint(17 - width, (), generator=generator))
        ink = 0.6 + 0.4 * torch.rand((), generator=generator)
        images[number, 0, top : top + height, left : left + width] += ink * glyph
    return TensorDataset(images, labels)
