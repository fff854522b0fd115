"""The two models of the examples: a character-level transformer and a small image classifier."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

# All that the transformer reads and writes; anything else becomes a space.
ALPHABET = "\n !\"'(),-./0123456789:;=?ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
CONTEXT = 64


def encode(text: str) -> torch.Tensor:
    known = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([known.get(character, known[" "]) for character in text])


def decode(numbers: torch.Tensor) -> str:
    return "".join(ALPHABET[number] for number in numbers.tolist())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = batch, length, 3, self.heads, width // self.heads
        parts = self.queries_keys_values(self.before_attention(x)).view(shape)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(x)


class CharTransformer(nn.Module):
    """Predicts the next character from up to CONTEXT before it."""

    def __init__(self, width: int = 96, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.characters(numbers) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, beginning: str, length: int, warmth: float = 0.8) -> str:
        """Goes on with a text."""
        numbers = encode(beginning or "\n")[None].to(self.head.weight.device)
        for _ in range(length):
            scores = self(numbers[:, -CONTEXT:])[:, -1] / warmth
            following = torch.multinomial(scores.softmax(-1), 1)
            numbers = torch.cat([numbers, following], 1)
        return decode(numbers[0])


class DigitNet(nn.Sequential):
    """Tells which digit a 16 x 16 image shows."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(24 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
