"""Dev environments: how their jobs are described and found, the way there, and files that come
back."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cli import cluster
from shoal.cli.screen import show
from shoal.cli.screen.files import Fetch
from shoal.cli.screen.show import Spinner, note
from shoal.client import ShoalError, contexts
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.link.packing import listed
from shoal.machine.files import write_private
from shoal.model.kept import FilesView, KeptFile, Kind, path_problem

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.client import Client
    from shoal.model.views import JobRow, JobView


LOOK_S = 3.0
LAST_FILES_S = 30.0  # for files that are still on their way when the job has ended


def open_(name: str | None, home: Path, port: int, *, browser: bool, json: bool) -> int:
    with cluster.connect(home) as client:
        job = client.job(find(client, name).id)
    return connect(job, home, port, browser=browser, json=json)


def connect(job: JobView, home: Path, port: int, *, browser: bool, json: bool) -> int:
    """Until Ctrl-C, or the end of the job."""
    try:
        with cluster.Retry(home) as retry:
            server = _wait(retry, job, quiet=json)
            return _hold(retry, job, server, home, port, browser=browser, json=json)
    except KeyboardInterrupt:
        name = job.name or job.id
        again = f"shoal dev open {name}, or end it: shoal dev stop {name}"
        show.note(f"{name} keeps running; connect again: {again}")
        return 0


def _wait(retry: cluster.Retry, job: JobView, *, quiet: bool) -> Server:
    with show.Spinner(quiet=quiet) as spinner:
        while True:
            if retry(lambda client: client.job(job.id)).state in ("dozing", "asleep"):
                retry(lambda client: client.wake(job.id))
            seen = retry(lambda client: client.job(job.id, wait_for="running", wait_s=LOOK_S))
            if seen.state == "running" or seen.finished_ms is not None:
                server = server_of(retry, job.id, LOOK_S)
                if server is not None and seen.finished_ms is None:
                    return server
            if seen.finished_ms is not None:
                raise Failure(f"{job.id} has ended: {seen.why}; see: shoal logs {job.id}", REFUSED)
            spinner(f"{job.id} is {seen.state}" + (f": {seen.why}" if seen.why else ""))


def _hold(
    retry: cluster.Retry,
    job: JobView,
    server: Server,
    home: Path,
    port: int,
    *,
    browser: bool,
    json: bool,
) -> int:
    from shoal.sessions import Forward

    record = load(job.id, job.submitted_ms) if job.spec.package else None
    if job.spec.package and record is None and not json:
        show.note(f"files come back to the machine that started it; here: shoal cp -r {job.id}: .")
    with (
        cluster.connect(home) as client,
        Forward(client, lambda: (job.id, 0), [(port, server.port)], show.note) as forward,
    ):
        link = forward.url + server.path + token_of(client, job.id, server.token)
        if json:
            named = {"name": job.name, "job": job.id, "url": link, "node": forward.node}
            show.as_json(named, lines=True)
        else:
            show.line(link)
            show.note("Ctrl-C ends the connection; the environment keeps running")
        if browser:
            _open(link)
        while True:
            seen = retry(lambda client: client.job(job.id, wait_for="finished", wait_s=LOOK_S))
            if record is not None:
                _files(retry, record)
            if seen.finished_ms is not None:
                break
    last_files(job.id, home)
    if not json:
        show.note(f"{job.name or job.id} has ended ({seen.state}): {seen.why}")
    return 0 if seen.state in ("succeeded", "cancelled") else 1


def last_files(job: str, home: Path) -> None:
    """When the job has ended, and what it wrote is at the head."""
    with cluster.Retry(home) as retry:
        view = retry(lambda client: client.job(job, wait_for="finished", wait_s=LAST_FILES_S))
        record = load(job, view.submitted_ms) if view.spec.package else None
        if record is None:
            return
        deadline = time.monotonic() + LAST_FILES_S
        while retry(lambda client: client.files(job)).live and time.monotonic() < deadline:
            time.sleep(0.2)
        _files(retry, record)


def _files(retry: cluster.Retry, record: Record) -> None:
    try:
        bring_back(retry, record)
    except (Failure, ShoalError) as error:
        show.note(f"files have not come back: {error}")


def _open(link: str) -> None:
    from shoal.cli.verbs.login import has_desktop

    if show.at_terminal() and has_desktop():
        import webbrowser

        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(link)


# Files that change in a dev environment come back to the folder they were sent from.
#
# Only where the folder was sent: on shared storage there is one folder. A file that was changed
# here as well is never replaced; the job's version is put beside it.


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


# The jobs of `shoal dev`: how one is described, found again, and where its server is.


EDITORS = ("jupyter", "code")
READY = b"shoal dev: ready "  # server.py prints it
SCAN_BYTES_MAX = 8 * 1024 * 1024  # of output before that line; an environment may be built first
MARK = "# shoal dev"
# Shoal's own Python, or the image's: the editor is whatever the job's PATH has.
START = f'{MARK} $2\nexec "${{SHOAL_PYTHON:-python3}}" -c "$1" "$2" "$3"'
DEFAULT_NAME = "dev"
WAIT_S = 30.0
TRIES = 3


class Server(msgspec.Struct):
    """Where the editor's server is, as it says itself. `token` is a file in the job."""

    port: int
    path: str
    token: str


def command(editor: str, idle_s: float) -> list[str]:
    if editor not in EDITORS:
        raise Failure(f"--editor: there is no {editor[:40]!r}; use {' or '.join(EDITORS)}", USAGE)
    source = Path(__file__).with_name("server.py").read_text()
    return ["sh", "-c", START, "shoal-dev", source, editor, f"{idle_s:g}"]


def is_one(row: JobRow) -> bool:
    return MARK in row.command


def listing(client: Client, *, ended: bool = False) -> list[JobRow]:
    return [row for row in client.jobs(finished=ended, limit=1000) if is_one(row)]


def free_name(client: Client) -> str:
    taken = {row.name for row in listing(client)}
    names = [DEFAULT_NAME, *(f"{DEFAULT_NAME}-{number}" for number in range(2, 1000))]
    return next(name for name in names if name not in taken)


def find(client: Client, name: str | None) -> JobRow:
    """By its name or its id; without one, the only one there is."""
    rows = listing(client)
    found = [row for row in rows if name in (None, row.name, row.id)]
    if len(found) == 1:
        return found[0]
    if not rows:
        raise Failure("there is no dev environment; start one with: shoal dev", REFUSED)
    names = ", ".join(row.name or row.id for row in rows[:8])
    if name is None or found:
        raise Failure(f"NAME: there are several ({names}); name one, or its job id", USAGE)
    raise Failure(f"NAME: there is no dev environment {name[:40]!r}; there is {names}", REFUSED)


def server_of(retry: Retry, job: str, wait_s: float) -> Server | None:
    """None if it has not said so within `wait_s`."""
    seen, offset = b"", 0
    while len(seen) < SCAN_BYTES_MAX:
        at, wait = offset, wait_s
        view = retry(lambda client: client.logs(job, offset=at, wait_s=wait))  # noqa: B023
        seen += view.data
        offset += len(view.data)
        start = seen.find(READY)
        end = seen.find(b"\n", start)
        if start >= 0 and end >= 0:
            place: Any = seen[start + len(READY) : end]
            return msgspec.json.decode(place, type=Server)
        if not view.data:
            return None
    return None


def token_of(client: Client, job: str, path: str) -> str:
    """Read beside the job, so that only people who may enter it can use its link."""
    for _ in range(TRIES):
        token = _output(client, job, ("cat", "--", path)).decode(errors="replace").strip()
        if token.isalnum():
            return token
    how = f"shoal exec {job} -- cat {path}"
    raise Failure(f"cannot read the token of {job}; does this work: {how}", REFUSED)


def _output(client: Client, job: str, command: tuple[str, ...]) -> bytes:
    """What a command beside the job prints."""
    import asyncio

    from shoal.model.session import Kind
    from shoal.sessions.session import Session

    session, found = Session(client, Kind.EXEC, command=command), b""
    try:
        session.begin(job, 0)
        stream = session.fixed[0]
        session.loop.call_soon_threadsafe(stream.end)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while piece := asyncio.run_coroutine_threadsafe(stream.read(), session.loop).result(
                WAIT_S
            ):
                found += piece
    finally:
        session.close()
    return found
