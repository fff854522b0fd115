"""What a simulated engine says: the next word is a pure function of the text so far.

So a text that is continued elsewhere is the text that one engine alone would have written, and
greedy decoding of a real one is the same in this.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

SYLLABLES = (
    "ba",
    "do",
    "ke",
    "li",
    "mu",
    "no",
    "pa",
    "ri",
    "so",
    "ta",
    "ve",
    "wu",
    "xi",
    "ya",
    "zo",
    "hu",
)
END = 89  # one word of so many is the last, where the request lets the text decide
BLOCK_SEED = "block"


def state(text: str) -> int:
    return zlib.crc32(text.encode())


def word(at: int) -> str:
    return " " + SYLLABLES[at & 15] + SYLLABLES[at >> 4 & 15] + SYLLABLES[at >> 8 & 15]


def answer(prompt: str, most: int, ends: bool) -> tuple[list[str], bool]:
    """Up to `most` words, and whether the text came to its own end."""
    at, words = state(prompt), []
    for _ in range(most):
        words.append(word(at))
        at = zlib.crc32(words[-1].encode(), at)
        if ends and at % END == 0:
            return words, True
    return words, False


def render(messages: Sequence[dict[str, object]], continued: bool) -> str:
    """A chat as one text. A last message of the assistant that is `continued` has no end."""
    parts = []
    for message in messages:
        parts.append(f"<{message.get('role')}>{_content(message.get('content'))}\n")
    if continued:
        return "".join(parts).removesuffix("\n")
    return "".join(parts) + "<assistant>"


def _content(content: object) -> str:
    if isinstance(content, list):  # parts, of which this engine reads the texts
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def hashes(words: Sequence[str], size: int, adapter: str = "") -> list[int]:
    """Of each full block, and of all before it."""
    last, found = hash((BLOCK_SEED, adapter)), []
    for start in range(0, len(words) - size + 1, size):
        last = hash((last, tuple(words[start : start + size])))
        found.append(last)
    return found
