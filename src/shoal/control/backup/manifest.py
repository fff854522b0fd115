"""What a backup is: a tar file that ends with a list of its members and their checksums.

The list comes last, so a file that was cut off is not a backup.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shoal.database.formats import VERSION

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 30  # a member takes about 150 bytes
PIECE_BYTES = 1 << 20

# Folders that may be large: saved if the user asks for them.
PARTS = ("logs", "outputs", "packages", "checkpoints")

Progress = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all


class BackupError(Exception):
    """A backup cannot be made, read or put back: one line that says why and what to do."""


class Member(msgspec.Struct, frozen=True):
    """A file of the home. Links have a size of 0 and no checksum."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`seq` is the last event; `database` is where the events are, if not in the home: then this
    backup holds none of them."""

    format: int = FORMAT
    version: str = VERSION
    cluster: str
    machine: str
    saved_ms: int
    parts: tuple[str, ...] = ()
    database: str = ""
    seq: int = 0
    newest_ms: int = 0
    live_jobs: int = 0
    finished_jobs: int = 0
    members: tuple[Member, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(member.size for member in self.members)


def name_of(cluster: str, saved_ms: int) -> str:
    """Names of one cluster sort by their age."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(saved_ms / 1000))
    return f"shoal-{cluster}-{stamp}.tar"


def older(folder: Path, cluster: str, keep: int) -> list[Path]:
    """The backups of this cluster in the folder, by the names that we give, without the newest."""
    pattern = re.compile(rf"shoal-{re.escape(cluster)}-\d{{8}}T\d{{6}}Z\.tar")
    found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    return found[:-keep]


def read(path: Path) -> Manifest:
    """The list alone; `verify` compares it with the rest."""
    with opened(path) as (_, _, manifest):
        return manifest


@contextmanager
def opened(path: Path) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo], Manifest]]:
    """The archive, its members without the manifest, and the manifest. Refuses a file that is not a
    complete backup, or that a newer version wrote."""
    if path.exists() and not path.is_file():  # opening a pipe would wait forever
        raise _foreign(path)
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(tarfile.open(path, "r:"))
            found = archive.getmembers()
        except (tarfile.TarError, EOFError):
            raise _foreign(path) from None
        last = found[-1] if found else None
        if last is None or last.name != MANIFEST or not last.isreg():
            raise _foreign(path)
        body = archive.extractfile(last)
        assert body is not None
        yield archive, found[:-1], _decode(path, body.read(MANIFEST_BYTES_MAX))


def _decode(path: Path, body: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _foreign(path) from None
    if manifest.format > FORMAT or _numbers(manifest.version) > _numbers(VERSION):
        raise BackupError(
            f"{path} was written by shoal {manifest.version[:32]}, and this is {VERSION}: "
            "install that version or a newer one"
        )
    return manifest


def _foreign(path: Path) -> BackupError:
    return BackupError(f"{path} is not a backup of Shoal, or it is not complete: use another one")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def verify(path: Path, progress: Progress) -> Manifest:
    """Read all of it, and compare every member with the list."""
    with opened(path) as (archive, found, manifest):
        wanted = {member.name: member for member in manifest.members}
        if len(wanted) != len(manifest.members) or {one.name for one in found} != set(wanted):
            raise BackupError(f"{path} is damaged: its list does not match what it holds")
        done = 0
        for info in found:
            member = wanted[info.name]
            if not info.isreg():
                continue
            if info.size != member.size or _sum_of(archive, info) != member.sha256:
                raise BackupError(f"{path} is damaged: {info.name} is not what was saved")
            done += info.size
            progress("verifying", done, manifest.bytes)
    return manifest


def _sum_of(archive: tarfile.TarFile, info: tarfile.TarInfo) -> str:
    source, digest = archive.extractfile(info), hashlib.sha256()
    assert source is not None
    try:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
    except (tarfile.TarError, EOFError):
        return ""
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
