"""Volumes of a job: folders that its nodes have, or fetch from a URL, before a member starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

VOLUMES_MAX = 32
VOLUME_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]{0,31}(?!\n)$"
# SOURCE:NAME, or SOURCE:NAME:ro.
VOLUME_PATTERN = r"^(/[^:\0\n]*|[a-z0-9+]+://[^\0\n]*):[A-Za-z][A-Za-z0-9_]{0,31}(:ro|:rw)?(?!\n)$"
VARIABLE = "SHOAL_VOLUME_"
READERS = ".shoal-readers"  # in its folder: a socket, while its files are fetched as they are read


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
        return f"a {scheme}:// URL contains a password that everyone can read; use --secret"
    return ""


def urls_problem(names: tuple[str, ...], texts: tuple[str, ...]) -> str:
    """Why these are not volumes from URLs; empty if they are."""
    urls = [volume.name for volume in map(parse, texts) if volume.url]
    wrong = next((name for name in names if name not in urls), "")
    if not wrong:
        return ""
    others = f"; those are {', '.join(urls)}" if urls else ""
    return f"{wrong} is not the name of a volume from a URL of this job{others}"


def share(paths: Iterable[str], member: int, members: int) -> list[str]:
    """The files of this member: each file has one, and no member has two more than another. A file
    stays with its member, as far as that allows, if the gang grows or shrinks."""
    if not 0 <= member < members:
        raise ValueError(f"there is no member {member} of {members}")
    marks = sorted((hashlib.sha256(path.encode()).digest(), path) for path in paths)
    each, more = divmod(len(marks), members)
    free = [each + (number < more) for number in range(members)]
    own: list[str] = []
    for mark, path in marks:
        key = int.from_bytes(mark[:8])
        while not free[owner := _jump(key, members)]:
            key = (key * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        free[owner] -= 1
        if owner == member:
            own.append(path)
    return sorted(own)


def _jump(key: int, buckets: int) -> int:
    """Jump consistent hashing (Lamping and Veach, 2014): a bucket more takes only its part of the
    keys from each of the others."""
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        key = (key * 2862933555777941757 + 1) % (1 << 64)
        following = (bucket + 1) * (1 << 31) // ((key >> 33) + 1)
    return bucket
