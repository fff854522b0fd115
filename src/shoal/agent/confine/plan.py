"""Which mounts a member of a tenant gets: pure.

Permissions keep a tenant's user out of everything that is not its own. The mounts let it reach what
is: its folders are inside the cluster's home, which no other user may enter. So the first folder on
the way that the user may not enter is covered by an empty one, which holds only what it may see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")  # each tenant or member sees its own


class Shown(NamedTuple):
    """A folder that the member needs. `barrier`: the first folder on the way that its user may not
    enter; empty if there is none. Both are real paths, without links."""

    path: str
    source: str
    barrier: str = ""
    writable: bool = False


class Covered(msgspec.Struct, frozen=True, array_like=True):
    """An empty folder in memory over another; sealed when it holds what it should."""

    path: str


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """`source`, opened before anything is covered, appears at `path`."""

    source: str
    path: str
    writable: bool = True
    file: bool = False


class Mounts(msgspec.Struct, frozen=True):
    """In order: `private`, `covered`, `bound`, and `read_only`, which are volumes."""

    private: tuple[Bound, ...] = ()
    covered: tuple[Covered, ...] = ()
    bound: tuple[Bound, ...] = ()
    read_only: tuple[str, ...] = ()


class Order(msgspec.Struct, frozen=True):
    """What the launcher needs to start one process."""

    program: str
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    uid: int
    files: int
    mounts: Mounts
    entrances: tuple[str, ...] = ()  # of its cgroup
    terminal: bool = False  # its input is a terminal, which becomes its own


def mounts(
    shown: Iterable[Shown],
    private: Mapping[str, str],
    inaccessible: Mapping[str, str],
    read_only: tuple[str, ...] = (),
) -> Mounts:
    """`private`: places and the folders that take their place. `inaccessible`: files, such as
    devices, and what takes their place."""
    bound: list[Bound] = []
    covered: list[str] = []
    for one in sorted(set(shown)):
        inside = any(within(one.path, place) for place in private)
        if not (one.barrier or inside):
            continue  # it is in its place already
        if any(within(one.path, other.path) for other in bound):
            continue  # it came with a folder around it
        bound.append(Bound(one.source, one.path, one.writable))
        if not inside and not any(within(one.barrier, other) for other in covered):
            covered = [other for other in covered if not within(other, one.barrier)]
            covered.append(one.barrier)
    bound += [Bound(source, path, file=True) for path, source in sorted(inaccessible.items())]
    return Mounts(
        tuple(Bound(source, place) for place, source in sorted(private.items())),
        tuple(map(Covered, sorted(covered))),
        tuple(bound),
        read_only,
    )


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
