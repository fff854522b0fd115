"""The formats of a shard: where its samples are, and how one is read.

An index says where samples are. It is made once for a shard, by reading what is needed to count
them: the headers of a tar, the lines of a JSON file, the footer of a Parquet file.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

OPEN_MAX = 64  # files that one reader holds open
PARQUET_BYTES = 256 << 20  # of row groups in a window; the order depends on it
BLOCK = 512  # of a tar
NAME_BYTES_MAX = 1 << 16
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".tgz")


class DataError(Exception):
    """Names the shard and what is wrong with it, in one line."""

    one_line = True  # how `shoal.train` ends a run that it stops


class Place(NamedTuple):
    """One sample: what another process needs to read it."""

    path: str
    stamp: tuple[int, int]  # the file's size and time when it was indexed
    where: tuple[Any, ...]
    size: int


class Index(NamedTuple):
    """The samples of one shard. `groups` are runs of them that are read together; `heavy` is
    what each of these takes in memory while one of its samples is in use."""

    path: str
    stamp: tuple[int, int]
    groups: list[range]
    heavy: list[int]
    where: Callable[[int], tuple[tuple[Any, ...], int]]

    def place(self, number: int) -> Place:
        return Place(self.path, self.stamp, *self.where(number))


def kind_of(name: str) -> str:
    """Empty if it is not a shard."""
    if name.rsplit("/", 1)[-1].startswith("."):
        return ""
    lower = name.lower()
    kind = next((kind for kind in FORMATS if lower.endswith(kind)), "")
    if not kind and lower.endswith(COMPRESSED) and any(f"{one}." in lower for one in FORMATS):
        raise DataError(f"{name} is compressed as a whole, so no sample can be found in it")
    return kind


def index(path: str, name: str, group: int) -> Index:
    """`group`: samples that are shuffled together, where the format does not group them."""
    try:
        with open(path, "rb") as file:
            return FORMATS[kind_of(name)].index(path, stamp_of(file.fileno()), file, group)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None
    except DataError as error:
        raise DataError(f"{name} {error}") from None


class Files:
    """Reads samples. A process has its own: neither open files nor row groups travel."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Handle] = OrderedDict()
        self._tables: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def read(self, place: Place) -> dict[str, Any]:
        kind = kind_of(place.path)
        try:
            return FORMATS[kind].read(self, place)
        except (DataError, OSError, ValueError) as error:
            raise DataError(f"{place.path}: {error}") from None

    def bytes_of(self, place: Place, start: int, size: int) -> bytes:
        handle = self._handle(place.path)
        data = os.pread(handle.file, size, start)
        if place.stamp != stamp_of(handle.file) or len(data) < size:
            raise DataError("it changed while it was read")
        return data

    def _handle(self, path: str) -> Handle:
        with self._lock:
            if path not in self._open:
                self._open[path] = Handle(path)
                if len(self._open) > OPEN_MAX:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def table(self, place: Place, group: int) -> Any:
        """A row group of a Parquet file. The last ones are kept, within a bound."""
        key = place.path, group
        with self._loading:
            if key not in self._tables:
                self.bytes_of(place, 0, 4)  # is it still the file that was indexed?
                self._tables[key] = _parquet().ParquetFile(place.path).read_row_group(group)
                while len(self._tables) > 1 and self._held() > 2 * PARQUET_BYTES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(key)
            return self._tables[key]

    def _held(self) -> int:
        return sum(int(table.nbytes) for table in self._tables.values())


class Handle:
    """An open file: closed when the last thread that reads from it is done."""

    def __init__(self, path: str) -> None:
        self.file = -1
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


def stamp_of(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


class Format(Protocol):
    def index(self, path: str, stamp: tuple[int, int], file: Any, group: int, /) -> Index: ...
    def read(self, files: Files, place: Place) -> dict[str, Any]: ...


class Tar:
    """As `webdataset` writes them: files with the same name up to the first dot are a sample."""

    def index(self, path: str, stamp: tuple[int, int], file: Any, group: int) -> Index:
        samples: list[tuple[str, list[tuple[str, int, int]]]] = []
        try:
            for name, start, size in members(file.fileno(), stamp[0]):
                key, suffix = _names(name)
                if suffix and (not samples or samples[-1][0] != key):
                    samples.append((key, []))
                if suffix:
                    samples[-1][1].append((suffix, start, size))
        except ValueError as error:
            raise DataError(f"is damaged after {len(samples)} samples: {error}") from None

        def where(number: int) -> tuple[tuple[Any, ...], int]:
            key, fields = samples[number]
            _, last, size = fields[-1]
            return (key, *fields), last + size - fields[0][1]

        return Index(path, stamp, *_groups(len(samples), group), where)

    def read(self, files: Files, place: Place) -> dict[str, Any]:
        """All fields of a sample at once: between them are only headers."""
        key, *fields = place.where
        first = fields[0][1]
        data = files.bytes_of(place, first, place.size)
        sample: dict[str, Any] = {"__key__": key}
        for suffix, start, size in fields:
            sample[suffix] = data[start - first : start - first + size]
        return sample


def members(file: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file of a tar. Python's own `tarfile` takes six times
    as long, which is as long as reading the samples."""
    at, long_name, long_size = 0, b"", -1
    while (head := os.pread(file, BLOCK, at)).strip(b"\0"):
        if len(head) < BLOCK or _octal(head[148:156]) != sum(head) - sum(head[148:156]) + 8 * 32:
            raise ValueError(f"no header at byte {at}")
        size = long_size if long_size >= 0 else _octal(head[124:136])
        start, kind = at + BLOCK, head[156:157]
        at = start + -(-size // BLOCK) * BLOCK
        if size < 0 or at > end:
            raise ValueError(f"it ends at byte {end}, in the middle of a file")
        if kind in b"xL":  # what is too long for the header that follows
            said = os.pread(file, min(size, NAME_BYTES_MAX), start)
            fields = _pax(said) if kind == b"x" else {b"path": said.rstrip(b"\0")}
            long_name, long_size = fields.get(b"path", b""), int(fields.get(b"size", b"-1"))
            continue
        if kind in b"0\0":
            prefix = head[345:500].rstrip(b"\0") if head[257:263] == b"ustar\0" else b""
            short = head[:100].partition(b"\0")[0]
            name = long_name or (prefix + b"/" + short if prefix else short)
            yield name.decode(errors="surrogateescape"), start, size
        long_name, long_size = b"", -1
    if not head:
        raise ValueError("it has no end mark, so it was not written to its end")


def _octal(field: bytes) -> int:
    """Or, from 8 GiB on, a binary number."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0") or b"0"
    return int(digits, 8) if digits.isdigit() else -1


def _pax(data: bytes) -> dict[bytes, bytes]:
    """Records such as '30 path=a/long/name\\n'."""
    found, at = {}, 0
    while at < len(data):
        length, _, _ = data[at : at + 20].partition(b" ")
        record = data[at + len(length) + 1 : at + int(length) - 1]
        name, _, found_value = record.partition(b"=")
        found[name] = found_value
        at += max(int(length), 1)
    return found


def _names(name: str) -> tuple[str, str]:
    """The sample and the field, or no field if it belongs to none."""
    folder, slash, base = name.rpartition("/")
    if name.startswith("/") or ".." in folder.split("/") or "\0" in name:
        raise DataError(f"holds a name out of its folder: {name[:100]!r}")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower() if stem else ""


class Json:
    """A sample on each line."""

    def index(self, path: str, stamp: tuple[int, int], file: Any, group: int) -> Index:
        starts, sizes, at = array("Q"), array("Q"), 0
        for line in file:
            if not line.isspace():
                starts.append(at)
                sizes.append(len(line))
            at += len(line)

        def where(number: int) -> tuple[tuple[Any, ...], int]:
            return (starts[number],), sizes[number]

        return Index(path, stamp, *_groups(len(starts), group), where)

    def read(self, files: Files, place: Place) -> dict[str, Any]:
        line = files.bytes_of(place, place.where[0], place.size)
        try:
            sample = msgspec.json.decode(line)
        except ValueError as error:
            raise DataError(f"the line at byte {place.where[0]} is not JSON: {error}") from None
        return sample if isinstance(sample, dict) else {"value": sample}


class Parquet:
    """A sample in each row."""

    def index(self, path: str, stamp: tuple[int, int], file: Any, _group: int) -> Index:
        try:
            about = _parquet().ParquetFile(file).metadata
        except (ValueError, OSError) as error:
            raise DataError(f"is damaged ({str(error).splitlines()[0][:200]})") from None
        groups, heavy, at = [], [], 0
        for number in range(about.num_row_groups):
            found = about.row_group(number)
            groups.append(range(at, at + found.num_rows))
            heavy.append(int(found.total_byte_size))
            at += found.num_rows

        def where(number: int) -> tuple[tuple[Any, ...], int]:
            group = bisect_right(groups, number, key=lambda rows: rows.start) - 1
            rows = groups[group]
            return (group, number - rows.start), heavy[group] // len(rows)

        return Index(path, stamp, groups, heavy, where)

    def read(self, files: Files, place: Place) -> dict[str, Any]:
        row_group, row = place.where
        table = files.table(place, row_group)
        return {name: table.column(name)[row].as_py() for name in table.column_names}


FORMATS: dict[str, Format] = {
    ".tar": Tar(),
    ".jsonl": Json(),
    ".ndjson": Json(),
    ".parquet": Parquet(),
}


def _groups(count: int, group: int) -> tuple[list[range], list[int]]:
    groups = [range(at, min(at + group, count)) for at in range(0, count, group)]
    return groups, [0] * len(groups)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError("needs pyarrow: pip install pyarrow") from None
    return pyarrow.parquet
