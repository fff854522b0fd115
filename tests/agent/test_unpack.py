"""Packages made by hand to do harm, and what becomes of them."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.agent.packages import BadPackage, Damaged, remove, unpack


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    data = b"harm" if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    return info.tobuf(tarfile.PAX_FORMAT) + data.ljust(512 if data else 0, b"\0")


END = b"\0" * 1024


def long_header(records: dict[str, str]) -> bytes:
    create = tarfile.TarInfo._create_pax_generic_header  # type: ignore[attr-defined]
    return bytes(create(records, tarfile.XHDTYPE, "utf-8")) + entry("after")


def _sparse() -> bytes:
    """1.5 KB that `tarfile` makes a gibibyte of: one byte, and its place at the very end."""
    info = tarfile.TarInfo("sparse")
    info.size, info.mode = 512, 0o644
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:398], header[398:410] = b"07777777000\0", b"00000001000\0"
    header[483:495] = b"10000000000\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"x" * 512


SPARSE = _sparse()


def hidden(kind: bytes, data: bytes) -> bytes:
    """Headers where a folder's or a link's content would be: `tarfile` reads on right there."""
    info = tarfile.TarInfo("cover")
    info.type, info.linkname, info.size = kind, "after", len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data + entry("after")


def unpacked(tmp_path: Path, data: bytes) -> Path:
    archive, target = tmp_path / "archive", tmp_path / "packages" / "target"
    target.parent.mkdir(exist_ok=True)
    archive.write_bytes(data)
    unpack(archive, hashlib.sha256(data).hexdigest(), target)
    return target


def test_a_package_is_read_only_and_programs_stay_programs(tmp_path: Path) -> None:
    data = entry("a/run", mode=0o755) + entry("a/text") + entry("b", tarfile.SYMTYPE, "a/text")
    target = unpacked(tmp_path, data + END)
    modes = {name: (target / name).stat().st_mode & 0o777 for name in ("a", "a/run", "a/text")}
    assert modes == {"a": 0o555, "a/run": 0o555, "a/text": 0o444}
    assert target.stat().st_mode & 0o777 == 0o555
    assert (target / "b").read_bytes() == b"harm"
    remove(target)
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        entry("../harm"),
        entry("a/../../harm"),
        entry("/tmp/shoal-harm"),
        entry("link", tarfile.SYMTYPE, "..") + entry("link/harm"),
        entry("link", tarfile.SYMTYPE, "/tmp") + entry("link/shoal-harm"),
        entry("a/link", tarfile.SYMTYPE, "../../.."),
        entry("in", tarfile.SYMTYPE, "a") + entry("in/harm"),
        entry("in", tarfile.SYMTYPE, "a") + entry("in", tarfile.DIRTYPE),
        entry("twice") + entry("twice"),
        entry("link", tarfile.SYMTYPE, "twice") + entry("link"),
        entry("hard") + entry("other", tarfile.LNKTYPE, "hard"),
        entry("hard", tarfile.LNKTYPE, "/etc/passwd"),
        entry("device", tarfile.CHRTYPE),
        entry("block", tarfile.BLKTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        entry("a") + entry("a/below"),
        entry("short").replace(b"00000000004\0", b"00000777777\0"),
        entry("a/b/c/top", tarfile.SYMTYPE, "../../..")
        + entry("out", tarfile.SYMTYPE, "a/b/c/top/.."),
        entry("out", tarfile.SYMTYPE, "a/b/c/top/..")
        + entry("a/b/c/top", tarfile.SYMTYPE, "../../.."),
        entry("here", tarfile.SYMTYPE, "here"),
        SPARSE,
        hidden(tarfile.DIRTYPE, SPARSE),
        hidden(tarfile.SYMTYPE, entry("device", tarfile.CHRTYPE)),
        long_header({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        long_header({"size": str(1 << 40)}),
        long_header({"path": "x" * 100_000}),
        long_header({"path": "d/" * 2000 + "x"}),
        entry("contiguous", tarfile.CONTTYPE),
        entry("global", tarfile.XGLTYPE),
        entry("longname", tarfile.GNUTYPE_LONGNAME),
        b"this is no archive" * 100,
        os.urandom(4096),
    ],
    ids=range(32),
)
def test_what_would_reach_out_of_its_folder_is_refused_whole(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((BadPackage, OSError)):
        unpacked(tmp_path, data + END)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "packages"]
    assert list((tmp_path / "packages").iterdir()) == []
    assert not Path("/tmp/shoal-harm").exists()


def test_another_content_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(entry("a") + END)
    with pytest.raises(Damaged):
        unpack(tmp_path / "archive", "0" * 64, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_it_is_all_there_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of it."""
    real: Callable[..., None] = __import__("shutil").copyfileobj
    written: list[int] = []

    def full(source: io.BytesIO, target: io.BytesIO, length: int) -> None:
        written.append(1)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        real(source, target, length)

    monkeypatch.setattr("shoal.agent.packages.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        unpacked(tmp_path, entry("a") + entry("b") + END)
    assert list((tmp_path / "packages").iterdir()) == []


def test_a_header_is_never_read_whole_however_long_it_says_it_is(tmp_path: Path) -> None:
    """400 MB of a name once made an agent of 1.2 GB; here the file is all holes."""
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.XHDTYPE, 400 << 20
    archive = tmp_path / "archive"
    with archive.open("wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(401 << 20)
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    tracemalloc.start()
    try:
        with pytest.raises(BadPackage, match="too long"):
            unpack(archive, sha256, tmp_path / "target")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_links_that_stay_inside_through_others_are_followed(tmp_path: Path) -> None:
    data = entry("a/b/file") + entry("a/c/up", tarfile.SYMTYPE, "../b")
    data += entry("through", tarfile.SYMTYPE, "a/c/up/../b/file")
    data += entry("nowhere", tarfile.SYMTYPE, "is/not/there")
    target = unpacked(tmp_path, data + END)
    assert (target / "through").read_bytes() == b"harm"
    remove(target)
