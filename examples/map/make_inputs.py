"""Writes N texts as JSON lines: `python make_inputs.py 1000 > inputs.jsonl`."""

from __future__ import annotations

import json
import random
import sys

WORDS = ["the", "order", "of", "a", "shoal", "is", "made", "by", "all", "and", "kept", "by", "none"]


def main() -> None:
    chance = random.Random(0)
    for number in range(int(sys.argv[1])):
        text = " ".join(chance.choices(WORDS, k=chance.randint(3, 12)))
        print(json.dumps({"id": number, "text": text}))


if __name__ == "__main__":
    main()
