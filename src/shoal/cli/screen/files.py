"""Copies of kept files: whole under their names, and continued after an interruption."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.kept import PIECE_BYTES, FilePart, FilesView, KeptFile, Kind, path_problem

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import Spinner
    from shoal.client import Client

SHOW_AFTER_S = 2.0
REPLACED_MAX = 10  # a file that is replaced this often while it is read is given up

_REMOTE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,80}):(.*)", re.DOTALL)


class Made(NamedTuple):
    files: int
    size: int
    place: Path


def remote(text: str) -> tuple[str, str]:
    """The job and the path in JOB:PATH."""
    found = _REMOTE.fullmatch(text)
    if found is None:
        raise Failure(
            f"JOB:PATH: {text[:60]!r} names no job; write for example: j7:model.pt", USAGE
        )
    return found[1], found[2].strip("/")


def is_remote(text: str) -> bool:
    """As for scp, unless this machine has a file of that name."""
    return _REMOTE.fullmatch(text) is not None and not os.path.lexists(text)


def send(client: Client, source: Path, target: str, spinner: Spinner, *, recursive: bool) -> Made:
    """A file or folder of this machine into a running job."""
    from shoal.cli.verbs.inside import target_of
    from shoal.sessions.session import send_file, send_folder, total_bytes

    found = _REMOTE.fullmatch(target)
    assert found is not None
    if not source.exists():
        raise Failure(f"SOURCE: there is no file {source} here", REFUSED)
    if source.is_dir() and not recursive:
        raise Failure(f"{source} is a folder; add -r", USAGE)
    if not source.is_dir() and not source.is_file():  # opening a pipe would wait for its writer
        raise Failure(f"SOURCE: {source} is neither a file nor a folder", REFUSED)
    total, began = total_bytes(source), time.monotonic()

    def progress(sent: int) -> None:
        if time.monotonic() - began > SHOW_AFTER_S:
            spinner(f"copied {size_text(min(sent, total))} of {size_text(total)}")

    work = send_folder if source.is_dir() else send_file
    work(client, target_of(client, found[1], None)(), source, found[2], progress, spinner)
    files = sum(len(names) for _, _, names in os.walk(source)) if source.is_dir() else 1
    return Made(files, total, Path(target))


def size_text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


class Fetch:
    def __init__(self, retry: Retry, job: str, kind: Kind, spinner: Spinner) -> None:
        self._retry, self._job, self._kind, self._spinner = retry, job, kind, spinner
        self._began = time.monotonic()
        self._got = self._all = 0

    def all(
        self, view: FilesView, path: str, target: Path, *, recursive: bool, folder: bool = False
    ) -> Made:
        """`folder`: the target is a folder, also if it does not exist yet."""
        job = view.job
        if not view.files:
            where = f" at {path}" if path else ""
            raise Failure(f"{job} has kept no file{where}; see: shoal ls {job}", REFUSED)
        single = len(view.files) == 1 and view.files[0].path == path
        if not single and not recursive:
            what = path or "its output"
            raise Failure(f"{what} is a folder with {len(view.files)} files; add -r", USAGE)
        self._all = view.total_bytes
        if single:
            into = target / Path(path).name if folder or target.is_dir() else target
            self._one(view.files[0], into)
            return Made(1, view.total_bytes, into)
        top = target / Path(path).name if path and target.is_dir() else target
        for file in view.files:
            if path_problem(file.path):
                raise Failure(f"{file.path!r} is not a file's name that can be used here", REFUSED)
            inside = file.path[len(path) :].lstrip("/") if path else file.path
            self._one(file, top / inside)
        return Made(len(view.files), view.total_bytes, top)

    def _one(self, file: KeptFile, place: Path) -> None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(REPLACED_MAX):
                if self._whole(file, place):
                    return
        except OSError as error:
            raise Failure(f"cannot write {place}: {error.strerror}", REFUSED) from None
        raise Failure(f"{file.path} is being replaced all the time; try again later", REFUSED)

    def _whole(self, file: KeptFile, place: Path) -> bool:
        """False: the file was replaced meanwhile."""
        first = self._part(file.path, 0)
        part = place.with_name(f".{place.name[:100]}.{first.version}.part")
        if first.encrypted:
            return self._clear(first, part, place)
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            offset = min(os.fstat(handle).st_size, first.size)  # of a copy that was interrupted
            if not offset:
                offset = _put(handle, first)
            self._show(offset)
            while offset < first.size:
                more = self._part(file.path, offset)
                if more.version != first.version or not more.data:
                    part.unlink(missing_ok=True)
                    return False
                offset += _put(handle, more)
                self._show(offset)
            os.ftruncate(handle, first.size)
            os.utime(handle, ns=(first.modified_ms * 1_000_000,) * 2)
        finally:
            os.close(handle)
        return self._named(part, place, first.size)

    def _named(self, part: Path, place: Path, size: int) -> bool:
        try:
            part.replace(place)
        except FileNotFoundError:  # another copy of the same file was quicker, and took the name
            return False
        self._got += size
        return True

    def _clear(self, first: FilePart, part: Path, place: Path) -> bool:
        """An encrypted file, as clear text. It is read from its beginning: what an interrupted copy
        left was perhaps not checked to its end."""
        from shoal.link.sealed_files import SealError
        from shoal.sdk.kept import opened_with

        more, offset = first, 0
        try:
            sealed = self._retry(lambda client: opened_with(client, self._job, self._kind, first))
            with part.open("wb") as file:
                while True:
                    for clear in sealed.open_all(offset // PIECE_BYTES, more.data):
                        file.write(clear)
                    offset += len(more.data)
                    self._show(file.tell())
                    if offset >= first.size:
                        break
                    more = self._part(first.path, offset)
                    if more.version != first.version or not more.data:
                        part.unlink(missing_ok=True)
                        return False
                os.utime(file.fileno(), ns=(first.modified_ms * 1_000_000,) * 2)
        except SealError as error:
            part.unlink(missing_ok=True)
            raise Failure(f"{first.path} {error}", REFUSED) from None
        return self._named(part, place, sealed.size)

    def _part(self, path: str, offset: int) -> FilePart:
        return self._retry(
            lambda client: client.file_part(self._job, path, offset, kind=self._kind)
        )

    def _show(self, offset: int) -> None:
        if time.monotonic() - self._began > SHOW_AFTER_S:
            self._spinner(f"copied {size_text(self._got + offset)} of {size_text(self._all)}")


def _put(handle: int, part: FilePart) -> int:
    rest, offset = memoryview(part.data), part.offset
    while rest:
        count = os.pwrite(handle, rest, offset)
        rest, offset = rest[count:], offset + count
    return len(part.data)
