"""Requests to language models with the blocks of their prompts: from public traces, or drawn.

Blocks have `BLOCK` tokens, as in Mooncake's trace. Equal leading numbers are an equal beginning.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
FOLDER = Path(
    os.environ.get("SHOAL_TRACES") or Path(__file__).parent.parent.parent / "shared/traces"
)
MOONCAKE = "mooncake-fast25/conversation_trace.jsonl.gz"
AZURE = "azure-llm-2023/{}.csv.gz"
SERVEGEN = "servegen/client_rates.csv.gz"
WINDOW_S = 600  # of servegen's rates
# ServeGen's rates are real, and its lengths were not published with them: each client has a
# beginning of its own, as a product's instructions would be, and lengths are those of Azure.
CLIENT_BLOCKS = 4


class TraceError(Exception):
    """The trace cannot be used; the message has the reason."""


class Request(NamedTuple):
    at_ms: float
    blocks: Sequence[int]  # of the whole prompt, the last one may be part of one
    prompt: int  # tokens
    answer: int


def read(name: str, folder: Path = FOLDER) -> list[Request]:
    if name not in TRACES:
        raise TraceError(f"no trace {name!r}: one of {', '.join(TRACES)}")
    return TRACES[name](folder)


def mooncake(folder: Path) -> list[Request]:
    with _open(folder / MOONCAKE) as file:
        rows = [json.loads(line) for line in file]
    return [
        Request(row["timestamp"], row["hash_ids"], row["input_length"], row["output_length"])
        for row in rows
    ]


def azure(name: str) -> Callable[[Path], list[Request]]:
    """No prompts were published: nothing is shared, as far as anybody knows."""

    def read_one(folder: Path) -> list[Request]:
        numbers = itertools.count()
        begin: datetime.datetime | None = None
        found = []
        for row in _rows(folder / AZURE.format(name)):
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or at
            prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            at_ms = (at - begin).total_seconds() * 1000
            found.append(Request(at_ms, _own(numbers, prompt), max(1, prompt), max(1, answer)))
        return found

    return read_one


def servegen(folder: Path) -> list[Request]:
    """A day of deepseek-r1 in twenty minutes, its 73 clients each with bursts as published."""
    rng, numbers = random.Random("servegen"), itertools.count()
    lengths = [(each.prompt, each.answer) for each in azure("conv")(folder)]
    clients: dict[str, list[int]] = {}
    found, squeeze = [], 72.0
    for row in _rows(folder / SERVEGEN):
        if row["model"] != "deepseek-r1" or int(row["t_s"]) >= 86_400:
            continue
        begin_s, end_s = (int(row["t_s"]) + shift for shift in (0, WINDOW_S))
        own = clients.setdefault(row["client"], [next(numbers) for _ in range(CLIENT_BLOCKS)])
        rate, spread = float(row["rate_rps"]), max(0.1, float(row["iat_cv"] or 1))
        shape = 1 / spread**2  # of a gamma distribution with this coefficient of variation
        at_s = begin_s + rng.gammavariate(shape, squeeze / (rate * shape))
        while at_s < end_s:
            prompt, answer = rng.choice(lengths)
            blocks = [*own, *_own(numbers, prompt)]
            whole = CLIENT_BLOCKS * BLOCK + prompt
            found.append(Request(1000 * at_s / squeeze, blocks, whole, answer))
            at_s += rng.gammavariate(shape, squeeze / (rate * shape))
    return sorted(found, key=lambda each: each.at_ms)


def hot(folder: Path) -> list[Request]:  # noqa: ARG001
    """Everybody begins with the same 8,192 tokens; more requests than one engine can answer."""
    common = 16
    return _drawn(
        "hot",
        6_000,
        60.0,
        list(range(common)),
        common,
        lambda rng: (rng.randrange(100, 1_000), rng.randrange(50, 300)),
    )


def decode(folder: Path) -> list[Request]:  # noqa: ARG001
    """Short prompts that share 512 tokens, and long answers."""
    return _drawn(
        "decode",
        6_000,
        24.0,
        [0],
        1,
        lambda rng: (rng.randrange(50, 500), rng.randrange(800, 2_400)),
    )


def _drawn(
    seed: str,
    count: int,
    per_s: float,
    common: list[int],
    first: int,
    lengths: Callable[[random.Random], tuple[int, int]],
) -> list[Request]:
    rng, numbers = random.Random(seed), itertools.count(first)
    at_ms, found = 0.0, []
    for _ in range(count):
        at_ms += 1000 * rng.expovariate(per_s)
        prompt, answer = lengths(rng)
        blocks = [*common, *_own(numbers, prompt)]
        found.append(Request(at_ms, blocks, len(common) * BLOCK + prompt, answer))
    return found


TRACES: dict[str, Callable[[Path], list[Request]]] = {
    "mooncake": mooncake,
    "azure-code": azure("code"),
    "azure-conv": azure("conv"),
    "servegen": servegen,
    "hot": hot,
    "decode": decode,
}


def _own(numbers: Iterator[int], tokens: int) -> list[int]:
    return list(itertools.islice(numbers, -(-max(1, tokens) // BLOCK)))


def _rows(path: Path) -> list[dict[str, str]]:
    with _open(path) as file:
        return list(csv.DictReader(file))


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror or error}; SHOAL_TRACES names the folder"
        ) from None
