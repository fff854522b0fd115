"""What replicas are believed to hold: bounded, corrected, and never a spiral of wrong guesses."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.router.index import (
    BLOCK_CHARS,
    REPLICA_BLOCKS_MAX,
    ROOM_MIN,
    Held,
    Index,
    chain,
)

# Prompts as paths in a tree: sessions share beginnings.
PATHS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def blocks(path: list[int]) -> tuple[int, ...]:
    return chain("".join(str(one) * BLOCK_CHARS for one in path))


@settings(deadline=None)
@given(st.text(max_size=2_000), st.text(max_size=2_000))
def test_texts_share_the_blocks_of_their_common_beginning(one: str, other: str) -> None:
    a, b = chain(one), chain(other)
    common = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    assert len(a) == len(one) // BLOCK_CHARS
    same = common // BLOCK_CHARS
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])
    assert not set(chain(one, "adapter")) & set(a)


@settings(deadline=None)
@given(st.lists(PATHS, max_size=40), st.integers(1, 40))
def test_the_bound_holds_and_what_is_held_is_a_beginning(paths: list[list[int]], most: int) -> None:
    index = Index(most * 2)
    for place, path in enumerate(paths):
        index.send("ab"[place % 2], blocks(path))
        for held in index.replicas.values():
            assert len(held.blocks) <= (most if len(index.replicas) == 2 else most * 2)
            for other in paths[: place + 1]:
                chained = blocks(other)
                flags = [one in held.blocks for one in chained]
                assert flags == sorted(flags, reverse=True)
                assert held.match(chained) == sum(flags)


@settings(deadline=None)
@given(st.lists(PATHS, max_size=30), PATHS)
def test_undo_takes_back_what_only_this_request_brought(
    paths: list[list[int]], last: list[int]
) -> None:
    held = Held()
    for path in paths:
        held.send(blocks(path), 1_000)
    before = set(held.blocks)
    held.undo(held.send(blocks(last), 1_000))
    assert set(held.blocks) == before


class Cache:
    """An engine's own: it drops what was used longest ago."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def ask(self, chained: tuple[int, ...]) -> int:
        had = next((at for at, one in enumerate(chained) if one not in self.blocks), len(chained))
        for one in reversed(chained):
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)
        return had


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(ROOM_MIN * 2, 400))
def test_wrong_guesses_die_out(random, room: int) -> None:  # type: ignore[no-untyped-def]
    """Sessions of growing prompts at an engine whose cache is much smaller than the index: believed
    and true come together, whatever the size of the cache."""
    held, cache = Held(), Cache(room)
    sessions: list[tuple[int, ...]] = [chain(f"{n}" * BLOCK_CHARS) for n in range(40)]
    errors = []
    for turn in range(1_500):
        place = random.randrange(40) if turn % 3 else random.randrange(5)
        grown = (*sessions[place], hash((place, turn)))
        sessions[place] = grown[-30:] if len(grown) <= 30 else (hash((place, turn)),)
        asked = sessions[place]
        sent = held.send(asked, REPLICA_BLOCKS_MAX)
        had = cache.ask(asked)
        errors.append(max(0, sent.matched - had))
        held.correct(sent, had)
        assert len(held.blocks) <= REPLICA_BLOCKS_MAX
    assert sum(one > 1 for one in errors[-500:]) < 50
    if held.room < REPLICA_BLOCKS_MAX:
        assert room * 0.8 < held.room < room * 1.3


def test_a_cache_that_was_emptied_is_found_out_by_one_request() -> None:
    held = Held()
    paths = [blocks([n, n, n, n]) for n in range(4)]
    for path in paths:
        held.send(path, 1_000)
    held.correct(held.send(paths[3], 1_000), 0)
    assert held.match(paths[3]) == 4  # it has read it now
    assert [held.match(path) for path in paths[:3]] == [0, 0, 0]


def test_a_replica_that_is_gone_is_forgotten() -> None:
    index = Index()
    index.send("a", blocks([1]))
    index.send("b", blocks([1]))
    index.keep(["b"])
    assert (index.match("a", blocks([1])), index.match("b", blocks([1]))) == (0, 1)
