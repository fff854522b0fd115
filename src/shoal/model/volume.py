"""Volumes of a job: folders that its nodes have, or fetch from a URL, before a member starts."""

from __future__ import annotations

from typing import NamedTuple

VOLUMES_MAX = 32
# SOURCE:NAME, or SOURCE:NAME:ro.
VOLUME_PATTERN = r"^(/[^:\0\n]*|[a-z0-9+]+://[^\0\n]*):[A-Za-z][A-Za-z0-9_]{0,31}(:ro|:rw)?(?!\n)$"
VARIABLE = "SHOAL_VOLUME_"


class Volume(NamedTuple):
    """`source` is a folder of the node, or a URL that the node fetches. The member finds the folder
    in the variable of this name."""

    source: str
    name: str
    read_only: bool

    @property
    def url(self) -> bool:
        return not self.source.startswith("/")

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
        if volume.url and (wrong := _url_problem(volume, writable=text.endswith(":rw"))):
            return wrong
        if ".." in volume.source.split("/"):
            return f"{volume.source} holds '..'; write the whole path"
        if volume.variable in names:
            return f"two volumes are named {volume.name}"
        names[volume.variable] = None
    return ""


def _url_problem(volume: Volume, *, writable: bool) -> str:
    url = volume.source
    host = url.partition("://")[2].partition("/")[0]
    if writable:
        other = "write to $SHOAL_OUTPUT, or with the program's own client"
        return f"{url} cannot be written as a volume; {other}"
    if ":" in host.rpartition("@")[0]:
        scheme = url.partition("://")[0]
        return f"a {scheme}:// URL holds a password, which everyone can read; use --secret"
    return ""
