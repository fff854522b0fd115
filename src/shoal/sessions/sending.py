"""Files from here into a running job: a process beside its member receives and renames them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from shoal.client import Client, ShoalError
from shoal.model.session import Kind
from shoal.sessions.session import Session
from shoal.sessions.streams import PIECE_BYTES, Ended, Stream

SAID_BYTES_MAX = 4096
LOST_CODE = 255

# $1: where to, $2: the file's name, $3: its size. It has its name only when it is whole.
_FILE = """
set -e
to=$1
case $to in */) mkdir -p -- "$to" ;; esac
if [ -d "$to" ]; then to="${to%/}/$2"; fi
folder=$(dirname -- "$to")
mkdir -p -- "$folder"
part="$folder/.shoal-cp.$$"
trap 'rm -f -- "$part"' EXIT
cat > "$part"
[ "$(wc -c < "$part")" -eq "$3" ] || { echo "only a part arrived" >&2; exit 1; }
mv -f -- "$part" "$to"
"""
_FOLDER = 'set -e; mkdir -p -- "$1"; tar -x -o -f - -C "$1"'

Progress = Callable[[int], None]
Tell = Callable[[str], None]  # a line about a job that has to be woken first


def send_file(
    client: Client, target: tuple[str, int], source: Path, to: str, progress: Progress, tell: Tell
) -> None:
    """`to` is relative to the member's working directory. ShoalError says why it did not work."""
    size = source.stat().st_size
    words = ("sh", "-c", _FILE, "sh", to or ".", source.name, str(size))
    with source.open("rb") as file:
        _send(client, target, words, lambda pipe: _pump(file, pipe, size), progress, tell)


def send_folder(
    client: Client, target: tuple[str, int], source: Path, to: str, progress: Progress, tell: Tell
) -> None:
    """The folder's content goes into the folder `to`, which is made if it is not there."""

    def pack(pipe: _Pipe) -> None:
        file = cast(IO[bytes], pipe)
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            try:
                archive.add(source, ".")
            except OSError as error:  # unreadable, or shorter than a moment before
                name = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                raise ShoalError(f"{source} could not be read to its end: {name}") from None

    words = ("sh", "-c", _FOLDER, "sh", to or ".")
    _send(client, target, words, pack, progress, tell)


class _Pipe:
    """The other process's input, as a file to write to."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session = session
        self._stream: Stream = session.fixed[0]
        self._progress = progress
        self._sent = 0

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), PIECE_BYTES):
            _ask(self._session, self._stream.write(bytes(data[start : start + PIECE_BYTES])))
        self._sent += len(data)
        self._progress(self._sent)
        return len(data)


def _pump(file: IO[bytes], pipe: _Pipe, size: int) -> None:
    """No more than was announced: the file may grow meanwhile."""
    left = size
    while left and (data := file.read(min(left, 16 * PIECE_BYTES))):
        pipe.write(data)
        left -= len(data)


def _send(
    client: Client,
    target: tuple[str, int],
    words: tuple[str, ...],
    work: Callable[[Any], None],
    progress: Progress,
    tell: Tell,
) -> None:
    session = Session(client, Kind.EXEC, tell=tell, command=words)
    said = bytearray()
    try:
        session.begin(*target)
        readers = [
            threading.Thread(target=_listen, args=(session, stream, said), daemon=True)
            for stream in session.fixed
        ]
        for reader in readers:
            reader.start()
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended: its words say why
            work(_Pipe(session, progress))
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(session.fixed[0].end)
        for reader in readers:
            reader.join()
        session.over.wait()
        ended = session.ended or Ended(code=LOST_CODE, why="the connection was lost")
    finally:
        session.close()
    if ended.code or ended.why:
        lines = said.decode(errors="replace").strip().splitlines()
        why = ended.why or (lines[-1] if lines else f"it ended with code {ended.code}")
        raise ShoalError(f"it could not be written in the job: {why}")


def _listen(session: Session, stream: Stream, said: bytearray) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        while data := _ask(session, stream.read()):
            if len(said) < SAID_BYTES_MAX:
                said += data


def _ask(session: Session, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, session.loop).result()


def total_bytes(source: Path) -> int:
    if not source.is_dir():
        return source.stat().st_size
    found = (Path(folder) / name for folder, _, names in os.walk(source) for name in names)
    return sum(path.lstat().st_size for path in found)
