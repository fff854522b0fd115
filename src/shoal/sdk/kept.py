"""Reads files that a job has kept, in parts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from shoal.client import Client, ShoalError
from shoal.link.sealed_files import SealedFile, SealError, opened
from shoal.model.kept import PIECE_BYTES, FilePart, Kind

CHANGES_MAX = 10  # of a file while it is read; then it is given up


class Changed(Exception):
    """The file was replaced while it was read."""


def parts(client: Client, job_id: str, path: str) -> Iterator[bytes]:
    """ShoalError with status 404 if there is no such file."""
    size, version, sealed = 0, "", None
    while True:
        part = client.file_part(job_id, path, size)
        if (version and part.version != version) or (not part.data and size < part.size):
            raise Changed
        version = part.version
        if part.encrypted:
            try:
                sealed = sealed or opened_with(client, job_id, Kind.OUTPUT, part)
                yield from sealed.open_all(size // PIECE_BYTES, part.data)
            except SealError as error:
                raise ShoalError(f"{job_id}:{path} {error}", "path") from None
        else:
            yield part.data
        size += len(part.data)
        if size >= part.size:
            return


def opened_with(client: Client, job_id: str, kind: Kind, first: FilePart) -> SealedFile:
    """The file whose first part this is, with the key that its job has at the head."""
    key = client.file_key(job_id)
    return opened(key.key, key.job, kind, first.path, first.size, first.data)


def fetch(client: Client, job_id: str, path: str, target: Path) -> Path:
    """In place of `target`, or inside of it if it is a folder. It has its name when it is whole."""
    place = target / Path(path).name if target.is_dir() else target
    new = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        for _ in range(CHANGES_MAX):
            try:
                with new.open("wb") as file:
                    file.writelines(parts(client, job_id, path))
                os.replace(new, place)
                return place
            except Changed:
                continue
    except OSError as error:
        raise ShoalError(f"cannot write {place}: {error.strerror}", "to") from None
    finally:
        new.unlink(missing_ok=True)
    raise ShoalError(
        f"{job_id}:{path} changes faster than it can be read; wait for its end", "path"
    )
