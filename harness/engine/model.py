"""An engine of language models without a clock: continuous batching, prompts read in chunks, a
cache of prefixes. A step takes what a table says.

The driver says when: `submit`, then `begin` a run of steps, which says when it ends, then `finish`
it then. On virtual time a run is as long as nothing changes; `cut` shortens it when a request
arrives in the middle, because an engine looks at its queue between two steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence as Items

import msgspec

from harness.engine.blocks import Blocks


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs, and how much an engine can do at a time."""

    step_ms: float = 8.0
    prompt_ms: float = 0.11  # for each token of a prompt that is read
    attention_ms: float = 0.0  # for each million of (token read x tokens before it)
    sequence_ms: float = 0.05  # for each answer that grows by a token
    context_ms: float = 0.0001  # for each token that such an answer looks back at
    block_tokens: int = 16
    blocks: int = 65_536
    batch_max: int = 256
    chunk_tokens: int = 8_192  # of prompts and answers in a step
    adapter_ms: float = 500.0  # to load one


# Llama-3-70B's shape on eight A800: 140 GFLOP a token and 2.6 MFLOP a pair of tokens at 1.25
# PFLOP/s (half of the peak); 140 GB of weights and 320 KB of cache a token at 12 TB/s.
LLAMA_70B = Table(
    step_ms=12.0,
    prompt_ms=0.112,
    attention_ms=2.1,
    sequence_ms=0.05,
    context_ms=0.000027,
    block_tokens=512,
    blocks=2_700,
    batch_max=128,
)


class Sequence:
    """A request in an engine. `hashes`: of the full blocks of its prompt, or of all its text."""

    __slots__ = (
        "answer",
        "cached",
        "first_ms",
        "hashes",
        "id",
        "last_ms",
        "owned",
        "plain",
        "prompt",
        "read",
        "since",
        "submitted_ms",
    )

    def __init__(self, key: int, hashes: Items[int], prompt: int, answer: int) -> None:
        self.id, self.hashes = key, hashes
        self.prompt, self.answer = max(1, prompt), max(1, answer)
        self.cached = self.read = 0  # tokens of the prompt
        self.since = 0  # the engine's count of steps when its answer began
        self.owned: list[int] = []
        self.plain = 0
        self.submitted_ms = self.first_ms = self.last_ms = math.nan


class Done(msgspec.Struct):
    """What a run of steps brought."""

    steps: int
    first: list[Sequence]  # those whose first token came
    ended: list[Sequence]


class Engine:
    def __init__(self, table: Table) -> None:
        self.table = table
        self.blocks = Blocks(table.blocks)
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []  # their prompts
        self.growing: dict[int, Sequence] = {}  # their answers
        self.prompt_tokens = self.hit_tokens = self.answer_tokens = 0
        self.steps = 0  # that answers have grown by
        self.busy_ms = 0.0
        self._context = 0  # tokens that growing answers look back at
        self._ends: list[tuple[int, int]] = []  # the count of steps at an answer's end, its id
        self._chunks: list[tuple[Sequence, int]] = []
        self._from_ms = self._until_ms = math.nan  # the run under way
        self._run = 0

    @property
    def running(self) -> int:
        return len(self.reading) + len(self.growing)

    @property
    def working(self) -> bool:
        return self._run > 0

    def submit(self, sequence: Sequence, now_ms: float) -> None:
        sequence.submitted_ms = now_ms
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Its client is gone."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.reading:
            self.reading.remove(sequence)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not sequence]
            self._release(sequence)
        elif self.growing.get(sequence.id) is sequence:
            self._leave(sequence)

    def begin(self, now_ms: float, steps: int = 1) -> float | None:
        """Begins up to `steps` equal steps. When they end, or None if there is nothing to do."""
        self._admit()
        self._chunks = self._chunked()
        if not self._chunks and not self.growing:
            self._run = 0
            return None
        self._run = 1 if self._chunks else max(1, min(steps, self._until_an_end()))
        self._from_ms = now_ms
        self._until_ms = now_ms + self._took_ms(self._run)
        return self._until_ms

    def cut(self, now_ms: float) -> float | None:
        """A request came: the run ends with its present step. The new end, if it is another."""
        if self._run <= 1:
            return None
        low, high = 1, self._run
        while low < high:  # the first step that ends at or after now
            middle = (low + high) // 2
            if self._from_ms + self._took_ms(middle) >= now_ms:
                high = middle
            else:
                low = middle + 1
        self._run = low
        self._until_ms = self._from_ms + self._took_ms(low)
        return self._until_ms

    def finish(self) -> Done:
        steps, self._run = self._run, 0
        now_ms = self._until_ms
        self.busy_ms += now_ms - self._from_ms
        self.steps += steps
        self.answer_tokens += steps * len(self.growing)
        self._context += steps * len(self.growing)
        done = Done(steps, [], [])
        while self._ends and self._ends[0][0] <= self.steps:
            sequence = self.growing.get(heapq.heappop(self._ends)[1])
            if sequence is not None:
                self._leave(sequence)
                sequence.last_ms = now_ms
                done.ended.append(sequence)
        for sequence, tokens in self._chunks:
            self._read(sequence, tokens)
            if sequence.read == sequence.prompt:
                self._first(sequence, now_ms, done)
        self._chunks = []
        return done

    def _took_ms(self, steps: int) -> float:
        table = self.table
        growing = len(self.growing)
        context = steps * self._context + growing * steps * (steps - 1) // 2
        each = table.step_ms + table.sequence_ms * growing
        read_ms = 0.0
        for sequence, tokens in self._chunks:
            pairs = tokens * (sequence.read + tokens / 2)
            read_ms += table.prompt_ms * tokens + table.attention_ms * pairs / 1e6
        return steps * each + table.context_ms * context + read_ms

    def _until_an_end(self) -> int:
        while self._ends and self._ends[0][1] not in self.growing:
            heapq.heappop(self._ends)  # canceled
        return self._ends[0][0] - self.steps

    def _admit(self) -> None:
        """In order of arrival. Room for the whole answer is kept, so nobody is ever set back."""
        size, chunk = self.table.block_tokens, self.table.chunk_tokens
        ahead = sum(each.prompt - each.read for each in self.reading)
        while self.waiting and self.running < self.table.batch_max and ahead < chunk:
            sequence = self.waiting[0]
            # The last token of a prompt is read in any case: it makes the first of the answer.
            full = min(len(sequence.hashes), (sequence.prompt - 1) // size)
            hit = self.blocks.found(sequence.hashes[:full])
            need = min(-(-(sequence.prompt + sequence.answer) // size), self.blocks.count)
            if not self.blocks.take(sequence.hashes[:hit], need - hit):
                return
            self.waiting.popleft()
            sequence.owned, sequence.plain = list(sequence.hashes[:hit]), need - hit
            sequence.cached = sequence.read = hit * size
            self.prompt_tokens += sequence.prompt
            self.hit_tokens += sequence.cached
            self.reading.append(sequence)
            ahead += sequence.prompt - sequence.read

    def _chunked(self) -> list[tuple[Sequence, int]]:
        left = self.table.chunk_tokens - len(self.growing)
        chunks = []
        for sequence in self.reading:
            tokens = min(left, sequence.prompt - sequence.read)
            if tokens <= 0:
                break
            chunks.append((sequence, tokens))
            left -= tokens
        return chunks

    def _read(self, sequence: Sequence, tokens: int) -> None:
        size = self.table.block_tokens
        before, sequence.read = sequence.read, sequence.read + tokens
        self._fill(sequence, before // size, sequence.read // size)

    def _fill(self, sequence: Sequence, begin: int, end: int) -> None:
        for each in itertools.islice(sequence.hashes, begin, end):
            if sequence.plain and self.blocks.fill(each):
                sequence.plain -= 1
                sequence.owned.append(each)

    def _first(self, sequence: Sequence, now_ms: float, done: Done) -> None:
        self.reading.remove(sequence)
        sequence.first_ms = sequence.last_ms = now_ms
        sequence.since = self.steps
        self.answer_tokens += 1
        done.first.append(sequence)
        if sequence.answer == 1:
            self._release(sequence)
            done.ended.append(sequence)
            return
        self.growing[sequence.id] = sequence
        self._context += sequence.prompt + 1
        heapq.heappush(self._ends, (self.steps + sequence.answer - 1, sequence.id))

    def _leave(self, sequence: Sequence) -> None:
        del self.growing[sequence.id]
        grown = sequence.prompt + 1 + self.steps - sequence.since
        self._context -= grown
        size = self.table.block_tokens
        self._fill(sequence, sequence.prompt // size, (grown - 1) // size)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.owned, sequence.plain)
        sequence.owned, sequence.plain = [], 0
