"""The connection to a dev environment: a forwarded port, a link, and files that come back."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import cluster
from shoal.cli.dev import environment, returning
from shoal.cli.dev.environment import Server
from shoal.cli.screen import show
from shoal.client import ShoalError
from shoal.forms.failure import REFUSED, Failure

if TYPE_CHECKING:
    from shoal.model.views import JobView

LOOK_S = 3.0
LAST_FILES_S = 30.0  # for files that are still on their way when the job has ended


def open_(name: str | None, home: Path, port: int, *, browser: bool, json: bool) -> int:
    with cluster.connect(home) as client:
        job = client.job(environment.find(client, name).id)
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
                server = environment.server_of(retry, job.id, LOOK_S)
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

    record = returning.load(job.id, job.submitted_ms) if job.spec.package else None
    if job.spec.package and record is None and not json:
        show.note(f"files come back to the machine that started it; here: shoal cp -r {job.id}: .")
    with (
        cluster.connect(home) as client,
        Forward(client, lambda: (job.id, 0), [(port, server.port)], show.note) as forward,
    ):
        link = forward.url + server.path + environment.token_of(client, job.id, server.token)
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
        record = returning.load(job, view.submitted_ms) if view.spec.package else None
        if record is None:
            return
        deadline = time.monotonic() + LAST_FILES_S
        while retry(lambda client: client.files(job)).live and time.monotonic() < deadline:
            time.sleep(0.2)
        _files(retry, record)


def _files(retry: cluster.Retry, record: returning.Record) -> None:
    try:
        returning.bring_back(retry, record)
    except (Failure, ShoalError) as error:
        show.note(f"files have not come back: {error}")


def _open(link: str) -> None:
    from shoal.cli.verbs.login import has_desktop

    if show.at_terminal() and has_desktop():
        import webbrowser

        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(link)
