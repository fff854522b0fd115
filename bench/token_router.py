"""Our token router's own code on virtual time: its choice, its index, what it learns."""
# ruff: noqa: ARG002  (all policies have the same methods)

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.token_traces import BLOCK, Request
from shoal.model.tokens import RoutedReplica, RoutedService
from shoal.router.books import Books
from shoal.router.index import BLOCK_CHARS
from shoal.router.world import CHARS_PER_TOKEN, Service, Turn

PARTS = BLOCK * int(CHARS_PER_TOKEN) // BLOCK_CHARS  # blocks of the router in one of a trace


class Cache:
    """It is asked in the order of `exchange.py`: place, first token, usage, end."""

    def __init__(self, replicas: int) -> None:
        with tempfile.TemporaryDirectory(prefix="tokens-") as folder:  # nothing is saved there
            self.service = Service(_wanted(replicas), Books(Path(folder)))
        self.service.update(self.service.wanted)
        self.turns: dict[int, tuple[Turn, float, int, int]] = {}

    def choose(self, request: Request, number: int, now_ms: float) -> int:
        turn = Turn(parts(request), request.prompt)
        assert self.service._admit(turn, wake=False)
        assert turn.replica is not None
        at = int(turn.replica.id)
        self.turns[number] = turn, now_ms, request.prompt, at
        return at

    def first(self, number: int, now_ms: float) -> None:
        turn, sent_ms, _, _ = self.turns[number]
        self.service.first(turn, (now_ms - sent_ms) / 1000)

    def ended(self, number: int, cached: int, now_ms: float) -> None:
        turn, _, prompt, _ = self.turns.pop(number)
        self.service.learn(turn, int(prompt * CHARS_PER_TOKEN), prompt, cached)
        self.service.leave(turn, worked=True)


def parts(request: Request) -> tuple[int, ...]:
    """The router's numbers of the prompt's blocks: 512 tokens of four characters are eight."""
    full = request.prompt * PARTS // BLOCK
    found = [hash((block, part)) for block in request.blocks for part in range(PARTS)]
    return tuple(found[:full])


def _wanted(replicas: int) -> RoutedService:
    named = (RoutedReplica(id=str(i), address="127.0.0.1", port=1) for i in range(replicas))
    return RoutedService(name="virtual", replicas=tuple(named))
