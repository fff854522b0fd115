"""`shoal sleep` and `shoal wake`: jobs lend their GPUs out, and go on where they stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import flag, verb
from shoal.cli.verbs.cancel import JOBS

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.model.views import Done, JobView

LOOK_S = 1.0
DONE = {
    ("sleep", False): "falls asleep",
    ("sleep", True): "is asleep",
    ("wake", False): "wakes as soon as there is room",
    ("wake", True): "is awake",
}
QUIET_S = 2.0  # a wait that is shorter needs no line


@verb(JOBS, flag("--wait", help="Return when they are asleep."))
def sleep(jobs: tuple[str, ...], wait: bool, json: bool, home: Path) -> int:
    """Put jobs to sleep; others use their GPUs.

    What a job has on its GPUs moves to the memory of its nodes, and its
    processes stop. It wakes when it is used (shoal exec, attach, forward, ssh,
    or input to an open session) or with `shoal wake`, and goes on at the
    instruction where it stopped. Only a running job can be put to sleep. If
    one of its members cannot sleep, the job goes on.

    Examples:
      shoal sleep j7
      shoal sleep --wait j7 j8
      shoal sleep j7.3          one element of the array j7
    """
    return _each(jobs, "sleep", wait, json, home)


@verb(JOBS, flag("--wait", help="Return when they are awake."))
def wake(jobs: tuple[str, ...], wait: bool, json: bool, home: Path) -> int:
    """Wake jobs that sleep; they go on where they stopped.

    A job wakes on its own nodes as soon as there is room for it; `shoal why`
    says what it waits for.

    Examples:
      shoal wake j7
      shoal wake --wait j7 j8
    """
    return _each(jobs, "wake", wait, json, home)


def _each(jobs: tuple[str, ...], what: str, wait: bool, json: bool, home: Path) -> int:
    """All are asked before the first is waited for."""
    from shoal.cli import cluster
    from shoal.cli.each import each
    from shoal.client import ShoalError, Unreachable
    from shoal.forms.failure import Failure

    answers: dict[str, Done | ShoalError | Failure] = {}
    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        act = client.sleep if what == "sleep" else client.wake
        for job in asked:
            try:
                answers[job] = cluster.on_job(client, job, lambda _: act(job))  # noqa: B023
            except Unreachable:
                raise
            except (ShoalError, Failure) as error:
                answers[job] = error

    def finish(job: str) -> Done:
        answer = answers[job]
        if isinstance(answer, ShoalError | Failure):
            raise answer
        return _wait(retry, job, what, quiet=json) if wait else answer

    with cluster.Retry(home) as retry:
        return each(asked, finish, DONE[what, wait], json)


def _wait(retry: Retry, job: str, what: str, *, quiet: bool) -> Done:
    from shoal.cli.screen.show import Spinner
    from shoal.forms.failure import REFUSED, Failure
    from shoal.model.views import Done

    goal, since = ("asleep" if what == "sleep" else "running"), time.monotonic()
    with Spinner(quiet=quiet) as spinner:
        while True:
            seen = retry(lambda client: client.job(job, wait_for=goal, wait_s=LOOK_S))
            if seen.state == goal:
                return Done(id=job)
            if seen.finished_ms is not None:
                raise Failure(f"{job} has ended ({seen.state}): {seen.why}", REFUSED)
            if what == "sleep" and seen.state != "dozing":
                raise Failure(f"{job} is {_said(seen)}", REFUSED)
            if time.monotonic() - since >= QUIET_S:
                spinner(f"{job} is {_said(seen)}")


def _said(seen: JobView) -> str:
    return f"{seen.state}: {seen.why}" if seen.why else seen.state
