"""The jobs of `shoal dev`: how one is described, found again, and where its server is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.client import Client
    from shoal.model.views import JobRow

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
