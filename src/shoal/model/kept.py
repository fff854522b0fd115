"""Kept folders: what a job writes to its output or checkpoint folder, copied to the head."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.blocks import Peer, digest
from shoal.model.job import MemberRef

COUNTED = 1 << 62  # of a snapshot that counts: more bytes than one can have
NO_PEER = "no other node can hold it now"  # it goes through the head then
PIECE_BYTES = 256 * 1024  # of a file, in one message
PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255  # of each part; no file system has longer ones
PATH_PARTS_MAX = 32
FILES_MAX = 10_000  # of one folder
OUTPUT = "SHOAL_OUTPUT"  # in a member's environment: its kept folder


class Kind(enum.StrEnum):
    """Which of a job's folders."""

    OUTPUT = "output"
    CHECKPOINT = "checkpoint"


class FilePiece(msgspec.Struct, frozen=True, tag=True):
    """`data` belongs at `offset` of the file of `size` bytes at this path of the job's folder. The
    pieces of one copy have the same `serial`, and come in order. `size` -1: the job has removed the
    file. `why`: the node cannot keep it, for this reason."""

    ref: MemberRef
    kind: Kind
    path: str
    serial: int
    size: int
    offset: int = 0
    data: bytes = b""
    modified_ms: int = 0
    why: str = ""


class KeptFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    modified_ms: int


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint folder as it was at one moment, with nothing half written. Every file of it has
    been copied: from now on, these are the ones that count. With a `manifest`, none has been: the
    node itself holds them, and another one is to get them from it before they count."""

    ref: MemberRef
    serial: int
    files: tuple[KeptFile, ...]
    manifest: bytes = b""


class CopyHeld(msgspec.Struct, frozen=True, tag=True):
    """A node holds a copy of the checkpoints with this manifest. `got`: not yet, but so many bytes
    of it; `problem`: it does not, for this reason."""

    job: str
    manifest: str
    got: int | None = None
    problem: str = ""


class HoldCopy(msgspec.Struct, frozen=True):
    """Get a copy from these nodes and hold it, while all that the tenant has here stays within
    `bound` bytes. Without a manifest: hold nothing of the job but what `keep` names."""

    job: str
    manifest: str = ""
    keep: tuple[str, ...] = ()
    tenant: str = ""
    size: int = 0
    bound: int = 0
    peers: tuple[Peer, ...] = ()


class FileAnswer(msgspec.Struct, frozen=True):
    """How many bytes of this copy are kept. `problem`: why they are not; `again`: the same file may
    be taken later, from its beginning. `lost`: files of this snapshot are not at the head, so that
    they have to be sent before it counts."""

    kind: Kind
    serial: int
    kept: int
    problem: str = ""
    again: bool = False
    lost: bool = False
    hold: HoldCopy | None = None  # not an answer, but this wish


class FileWanted(msgspec.Struct, frozen=True):
    """A member of this job is to start on the node that asks: send its folder. Without a path, the
    list of its files. `snapshot`: the one that was listed; 0: any, for agents that cannot say."""

    ref: MemberRef
    kind: Kind
    path: str = ""
    offset: int = 0
    snapshot: int = 0


class FileSent(msgspec.Struct, frozen=True):
    """The answer: `files`, or the bytes of one of them."""

    ref: MemberRef
    kind: Kind
    path: str = ""
    offset: int = 0
    data: bytes = b""
    files: tuple[KeptFile, ...] = ()
    attempt: int = 0  # the newest that has made a snapshot
    problem: str = ""
    snapshot: int = 0  # its number
    held: tuple[HoldCopy, ...] = ()  # files that other nodes have


class Copied(msgspec.Struct, frozen=True):
    """The head has a snapshot of the job's checkpoints. `step`: the newest in it, if that is known;
    0: it is not."""

    job: str
    attempt: int
    step: int
    at_ms: int
    held_by: tuple[str, ...] = ()  # nodes; none: the head itself


class FilesView(msgspec.Struct, kw_only=True):
    """The files that a job has kept. `notes`: what is not kept, and why."""

    job: str
    files: list[KeptFile]
    total_bytes: int
    notes: list[str] = []
    live: bool = False  # more may come
    url: str = ""  # where they are, if not in the cluster's store
    encrypted: bool = False  # `shoal cp` decrypts them; sizes are those of the clear text
    held_by: list[str] = []  # nodes that each have a copy of the checkpoints; none: the head has it


class FilePart(msgspec.Struct, kw_only=True):
    """Bytes of a kept file from `offset` on. A file with another `version` has been replaced."""

    path: str
    offset: int
    size: int
    modified_ms: int
    version: str
    data: bytes
    encrypted: bool = False  # and `size` and `offset` count encrypted bytes


class Received(msgspec.Struct, kw_only=True):
    """How many bytes of it are here."""

    kept: int


class HandedFiles(msgspec.Struct, kw_only=True):
    """All files of the saved work of a job."""

    files: Annotated[list[KeptFile], msgspec.Meta(max_length=FILES_MAX)]


class FileKey(msgspec.Struct, kw_only=True):
    """With it, the encrypted files of this job can be read."""

    job: str
    key: bytes


def held_key(job: str, manifest: str) -> str:
    """By which a door knows a copy of checkpoints."""
    return digest("checkpoint", job, manifest)


def path_problem(path: str) -> str:
    """Why the head does not take a file of this name; empty if it does."""
    parts = path.split("/")
    try:
        size = len(path.encode())
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if not path or any(part in ("", ".", "..") for part in parts):
        return "its name is not a relative path"
    if not path.isprintable():
        return "its name has characters that cannot be printed"
    if size > PATH_BYTES_MAX or longest > NAME_BYTES_MAX or len(parts) > PATH_PARTS_MAX:
        return f"its name is longer than {PATH_BYTES_MAX} bytes or {PATH_PARTS_MAX} folders"
    return ""
