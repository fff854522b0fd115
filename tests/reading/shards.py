"""Volumes for the tests of `shoal.data`, written by Python's own modules."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], **info: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            for field, value in info.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(data))
    return path


def write_images(path: Path, numbers: Iterable[int]) -> Path:
    """A picture and its class, as `webdataset` pairs them."""
    return write_tar(
        path,
        (
            (f"{number:05}.{field}", data)
            for number in numbers
            for field, data in (("jpg", b"jpg %d" % number), ("cls", b"%d" % (number % 10)))
        ),
    )


def write_lines(path: Path, numbers: Iterable[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))
    return path


def write_volume(folder: Path, *counts: int) -> Path:
    """Samples are numbered through."""
    first = 0
    for shard, count in enumerate(counts):
        write_lines(folder / f"{shard:03}.jsonl", range(first, first + count))
        first += count
    return folder
