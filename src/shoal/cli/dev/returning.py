"""Files that change in a dev environment come back to the folder they were sent from.

Only where the folder was sent: on shared storage there is one folder. A file that was changed here
as well is never replaced; the job's version is put beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.cli.screen.files import Fetch
from shoal.cli.screen.show import Spinner, note
from shoal.client import contexts
from shoal.link.packing import listed
from shoal.machine.files import write_private
from shoal.model.kept import FilesView, KeptFile, Kind, path_problem

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry

NS_IN_MS = 1_000_000
RECORDS_MAX = 100  # of environments that were started from this machine

State = tuple[int, int]  # when a file was changed, in ns, and its size


class Record(msgspec.Struct, kw_only=True):
    """What was sent, and what has come back."""

    job: str
    submitted_ms: int = 0
    root: str
    here: dict[str, State] = {}  # files as they were here when they were sent or came back
    taken: dict[str, int] = {}  # and when the job had changed what came back
    coming: dict[str, State] = {}  # how files will be here that are on their way


def remember(folder: Path) -> Record:
    """Before the folder is sent."""
    root, files = listed(folder)
    states = {one.name: (one.status.st_mtime_ns, one.status.st_size) for one in files}
    return Record(job="", root=str(root), here=states)


def save(record: Record) -> None:
    folder = contexts.folder() / "dev"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(_place(record.job, record.submitted_ms), msgspec.json.encode(record))
    old = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in old[:-RECORDS_MAX]:
        path.unlink(missing_ok=True)


def load(job: str, submitted_ms: int) -> Record | None:
    """None if the environment was started on another machine."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_place(job, submitted_ms).read_bytes(), type=Record)
    return None


def _place(job: str, submitted_ms: int) -> Path:
    return contexts.folder() / "dev" / f"{job}-{submitted_ms}.json"


def bring_back(retry: Retry, record: Record) -> int:
    """How many files came back."""
    for path, state in record.coming.items():  # of a call that was killed
        if _state(Path(record.root) / path) == state:
            record.here[path] = state
    view = retry(lambda client: client.files(record.job))
    news = [file for file in view.files if record.taken.get(file.path) != file.modified_ms]
    news = [file for file in news if _may_come(record, file)]
    if news:  # whoever is killed in the middle still knows which files are the job's
        record.coming = {one.path: (one.modified_ms * NS_IN_MS, one.size) for one in news}
        save(record)
    for file in news:
        _bring(retry, record, view, file)
    if news:
        record.coming = {}
        save(record)
    return len(news)


def _may_come(record: Record, file: KeptFile) -> bool:
    """Nothing that git would run, and nothing outside of the folder."""
    root = Path(record.root)
    if path_problem(file.path) or ".git" in Path(file.path).parts:
        return False
    return (root / file.path).parent.resolve().is_relative_to(root.resolve())


def _bring(retry: Retry, record: Record, view: FilesView, file: KeptFile) -> None:
    place = Path(record.root) / file.path
    state = _state(place)
    if state is not None and state != record.here.get(file.path):
        place = place.with_name(f"{place.stem}.from-{record.job}{place.suffix}")
        note(f"{file.path} has changed here, too; the job's version is {place.name} beside it")
        kept_as = None
    else:
        note(f"{file.path} has come back")
        kept_as = file.path
    one = msgspec.structs.replace(view, files=[file], total_bytes=file.size)
    with Spinner(quiet=True) as spinner:
        Fetch(retry, record.job, Kind.OUTPUT, spinner).all(one, file.path, place, recursive=False)
    record.taken[file.path] = file.modified_ms
    found = _state(place)
    if kept_as and found is not None:
        record.here[kept_as] = found


def _state(place: Path) -> State | None:
    with contextlib.suppress(OSError):
        seen = os.lstat(place)
        return seen.st_mtime_ns, seen.st_size
    return None
