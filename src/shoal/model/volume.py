"""Volumes of a job: folders that its nodes have, checked before a member starts there."""

from __future__ import annotations

from typing import NamedTuple

VOLUMES_MAX = 32
# SOURCE:NAME, or SOURCE:NAME:ro. A URL is matched, too, so that its refusal can say why.
VOLUME_PATTERN = r"^(/[^:\0\n]*|[a-z0-9+]+://[^\0\n]*):[A-Za-z][A-Za-z0-9_]{0,31}(:ro|:rw)?(?!\n)$"
VARIABLE = "SHOAL_VOLUME_"


class Volume(NamedTuple):
    """`source` is a folder of the node, which the member finds in the variable of this name."""

    source: str
    name: str
    read_only: bool

    @property
    def variable(self) -> str:
        return VARIABLE + self.name.upper()


def parse(text: str) -> Volume:
    """A text that matches the pattern."""
    words = text.split(":")
    read_only = words[-1] == "ro"
    if words[-1] in ("ro", "rw"):
        words.pop()
    return Volume(":".join(words[:-1]), words[-1], read_only)


def volumes_problem(texts: tuple[str, ...]) -> str:
    """Why they cannot be; empty if they can."""
    names: dict[str, None] = {}
    for text in texts:
        volume = parse(text)
        if "://" in volume.source:
            return (
                f"{volume.source} is a URL, which nodes do not fetch yet; name a folder they share"
            )
        if ".." in volume.source.split("/"):
            return f"{volume.source} holds '..'; write the whole path"
        if volume.variable in names:
            return f"two volumes are named {volume.name}"
        names[volume.variable] = None
    return ""
