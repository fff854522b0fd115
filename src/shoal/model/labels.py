"""Labels and taints of nodes, and the conditions that jobs set on them.

A *label* is a key with a value: `pool=a100`. A *condition* is one of `key=value`, `key=a|b`,
`key!=value`, `key` (the node has that label) and `!key`. A *taint* keeps away every job that does
not tolerate it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
KEY_PATTERN = rf"^(?:{_KEY})?(?!\n)$"
CONDITION_PATTERN = rf"^(?:!?{_KEY}|{_KEY}!?={_VALUE}(?:\|{_VALUE})*)(?!\n)$"
TOLERATION_PATTERN = rf"^(?:\*|{_KEY}(?:={_VALUE})?)(?!\n)$"
CONDITIONS_MAX = 64  # of one job
CONDITION_CHARACTERS_MAX = 2000

Condition = Annotated[
    str, msgspec.Meta(pattern=CONDITION_PATTERN, max_length=CONDITION_CHARACTERS_MAX)
]
Toleration = Annotated[str, msgspec.Meta(pattern=TOLERATION_PATTERN, max_length=320)]
Key = Annotated[str, msgspec.Meta(pattern=KEY_PATTERN, max_length=253)]
# Of jobs, which nobody places by them.
LabelKey = Annotated[str, msgspec.Meta(pattern=rf"^{_KEY}(?!\n)$", max_length=253)]
LabelValue = Annotated[str, msgspec.Meta(pattern=rf"^{_VALUE}(?!\n)$", max_length=63)]

NODE = "node"  # every node has this label; its value is the node's name
WIREGUARD = "wireguard"  # a node that can encrypt a gang's network says how in this label
ANY = "*"  # as a toleration: every taint
# Stands for all taints of a node that no job tolerates by name.
OTHER_TAINT = "*"

Words = tuple[str, ...]


class Term(NamedTuple):
    """A condition, taken apart. Without values it asks whether the node has the label at all."""

    key: str
    holds: bool  # false: none of the values, or not the label
    values: tuple[str, ...]

    @property
    def words(self) -> Words:
        return tuple(f"{self.key}={value}" for value in self.values) or (self.key,)


@lru_cache(maxsize=4096)
def term_of(condition: str) -> Term:
    key, equals, values = condition.partition("=")
    if not equals:
        return Term(key.removeprefix("!"), not key.startswith("!"), ())
    return Term(key.removesuffix("!"), not key.endswith("!"), tuple(values.split("|")))


def words_of(labels: Mapping[str, str]) -> Words:
    """Everything that is true of a node with these labels, as words: `pool` and `pool=a100`."""
    return tuple(sorted([*labels, *(f"{key}={value}" for key, value in labels.items())]))


def meets(condition: str, words: Iterable[str]) -> bool:
    term = term_of(condition)
    return any(word in words for word in term.words) is term.holds


@lru_cache(maxsize=65_536)
def admits(where: Words, tolerates: Words, words: Words, taints: Words) -> bool:
    """Whether a job with these conditions may run on a node with these words and taints."""
    return all(tolerated(taint, tolerates) for taint in taints) and all(
        meets(condition, words) for condition in where
    )


def tolerated(taint: str, tolerates: Iterable[str]) -> bool:
    return taint in tolerates or ANY in tolerates or taint.partition("=")[0] in tolerates


@lru_cache(maxsize=4096)
def asked_words(where: Words, tolerates: Words, keys: Words) -> Words:
    """What of the nodes' labels and taints matters to such a job. `keys`: labels of which every
    value matters (`zone=*`). A toleration is marked by `~`."""
    found = [word for condition in where for word in term_of(condition).words]
    found += [word for key in keys for word in (key, f"{key}=*")]
    found += [f"~{toleration}" for toleration in tolerates if toleration != ANY]
    return tuple(dict.fromkeys(found))


def changed(given: Mapping[str, str], by_people: Mapping[str, str | None]) -> dict[str, str]:
    """What the node says of itself, with what people have set (a value) and removed (None)."""
    merged: dict[str, str | None] = {**given, **by_people}
    return {key: value for key, value in merged.items() if value is not None}


def taint_text(key: str, value: str) -> str:
    return f"{key}={value}" if value else key


def taint_pairs(taints: Iterable[str]) -> dict[str, str]:
    """By key. A node has at most one taint of each key."""
    return {key: value for key, _, value in (taint.partition("=") for taint in taints)}


def contradiction(where: Iterable[str]) -> str:
    """Two conditions that no node can meet together, as text; empty if there are none."""
    terms = [(condition, term_of(condition)) for condition in where]
    for number, (one, first) in enumerate(terms):
        for other, second in terms[:number]:
            if first.key == second.key and not _together(first, second):
                return f"{other} and {one}"
    return ""


def _together(one: Term, other: Term) -> bool:
    if one.holds and other.holds:
        return not one.values or not other.values or bool({*one.values} & {*other.values})
    if one.holds == other.holds:
        return True
    wanted, unwanted = (one, other) if one.holds else (other, one)
    if not unwanted.values:
        return False
    return not wanted.values or bool({*wanted.values} - {*unwanted.values})
