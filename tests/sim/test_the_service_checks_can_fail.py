"""Services that are wrong on purpose are caught by what really happened."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from storm.fuzz import SeedFailed, Size, run_seed

from shoal.core.books.scale import Wish
from shoal.core.features.service import serve
from shoal.core.scheduling import cycle
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.events.services import ReplicaReady, ServiceSet, ServiceStopped
from shoal.core.state.round import Round
from shoal.model.job import Job, StopCause
from shoal.model.service import Rollout, Service, ServiceLoad

SEEDS_MAX = 240
SIZE = Size(calm_ms=300_000, services_part=1.0)

Mutate = Callable[[pytest.MonkeyPatch], None]


def drain_the_old_before_the_new_are_ready(patch: pytest.MonkeyPatch) -> None:
    size = serve._size

    def hasty(round_: Round, service: Service, jobs: list[Job]) -> None:
        size(round_, service, jobs)
        for job in jobs:
            serving = job.id in service.ready and job.id not in service.draining
            if serving and job.spec.version != service.version:
                serve._drain(round_, service, job, "away with it")

    patch.setattr(serve, "_size", hasty)


def stop_without_draining(patch: pytest.MonkeyPatch) -> None:
    def cut(round_: Round, service: Service, job: Job, why: str) -> None:
        serve._stop(round_, job, StopCause.CANCEL, why)

    patch.setattr(serve, "_drain", cut)


def let_go_of_who_has_work(patch: pytest.MonkeyPatch) -> None:
    go = serve._let_drained_go

    def blind(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad | None) -> None:
        go(round_, service, jobs, load and msgspec.structs.replace(load, replicas={}))

    patch.setattr(serve, "_let_drained_go", blind)


def believe_everybody_to_be_ready(patch: pytest.MonkeyPatch) -> None:
    greet = serve._greet

    def naive(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
        everybody = tuple(job.id for job in jobs)
        greet(round_, service, jobs, msgspec.structs.replace(load, ready=everybody))

    patch.setattr(serve, "_greet", naive)


def never_greet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serve, "_greet", lambda *_: None)


def go_back_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serve, "TRIES_MAX", 1)


def never_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serve, "_go_back", lambda *_: None)


def start_the_version_before(patch: pytest.MonkeyPatch) -> None:
    def older(**fields: Any) -> JobSubmitted:
        spec = fields["spec"]
        version = max(1, spec.version - 1)
        return JobSubmitted(**{**fields, "spec": msgspec.structs.replace(spec, version=version)})

    patch.setattr(serve, "JobSubmitted", older)


def number_versions_anew(patch: pytest.MonkeyPatch) -> None:
    def first(**fields: Any) -> ServiceSet:
        return ServiceSet(**{**fields, "version": 1})

    patch.setattr(serve, "ServiceSet", first)


def forget_what_still_runs(patch: pytest.MonkeyPatch) -> None:
    tend = serve._tend

    def hasty(round_: Round, name: str, service: Service, load: ServiceLoad | None) -> None:
        if service.stopping and round_.state.replicas.get(name):
            why = "nobody looks"
            round_.emit(ServiceStopped(at_ms=round_.now_ms, service=name, why=why))
        else:
            tend(round_, name, service, load)

    patch.setattr(serve, "_tend", hasty)


def never_stop(patch: pytest.MonkeyPatch) -> None:
    size = serve._size

    def deaf(round_: Round, service: Service, jobs: list[Job]) -> None:
        if not service.stopping:
            size(round_, service, jobs)

    patch.setattr(serve, "_size", deaf)


def want_more_than_the_most(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serve, "wish", lambda *_: Wish(99, "the more the better"))


def replace_nobody(patch: pytest.MonkeyPatch) -> None:
    start = serve._start

    def only_once(round_: Round, service: Service) -> None:
        if not service.failures:
            start(round_, service)

    patch.setattr(serve, "_start", only_once)


def greet_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """Who was ready once is ready forever, also in its next attempt."""
    once: set[str] = set()
    greet = serve._greet

    def trusting(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
        greet(round_, service, jobs, load)
        for job in jobs:
            if job.id in service.ready:
                once.add(job.id)
            elif job.id in once and job.phase.value == "running":
                serve._emit_replica(round_, ReplicaReady, service, job, "as before")

    patch.setattr(serve, "_greet", trusting)


def leave_those_that_hang(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serve, "_replace_hung", lambda *_: None)


def call_anybody_hung(patch: pytest.MonkeyPatch) -> None:
    def at_once(round_: Round, service: Service, *_: object) -> None:
        for job_id in list(service.ready):
            job = round_.state.jobs[job_id]
            serve._stop(round_, job, StopCause.FAILURE, "it hangs")

    patch.setattr(serve, "_replace_hung", at_once)


def let_all_old_ones_leave_first(patch: pytest.MonkeyPatch) -> None:
    def hasty(_round: Round, service: Service, _jobs: list[Job], old: list[Job]) -> list[Job]:
        return old if service.spec.rollout is Rollout.REPLACE else []

    patch.setattr(serve, "leave_first", hasty)


def let_gangs_answer_where_they_meet(patch: pytest.MonkeyPatch) -> None:
    def one_port(**fields: Any) -> JobPlaced:
        return JobPlaced(**{**fields, "door": ""})

    patch.setattr(cycle, "JobPlaced", one_port)


# Seeds that show what few of them do, or show it soonest.
EARLY = {
    drain_the_old_before_the_new_are_ready: 4,
    go_back_at_once: 9,
    never_go_back: 9,
    leave_those_that_hang: 15,
    let_all_old_ones_leave_first: 3,
    let_gangs_answer_where_they_meet: 4,
    let_go_of_who_has_work: 2,
    never_greet: 3,
    never_stop: 2,
    replace_nobody: 17,
    start_the_version_before: 8,
    number_versions_anew: 8,
    greet_again_after_a_restart: 9,
}


@pytest.mark.parametrize(
    ("mutate", "caught"),
    [
        (drain_the_old_before_the_new_are_ready, "is drained, which leaves"),
        (stop_without_draining, "is stopped without being drained"),
        (let_go_of_who_has_work, "is said to be drained, but has work in flight"),
        (believe_everybody_to_be_ready, "its probe has not answered"),
        (never_greet, "ready replicas of"),
        (go_back_at_once, "goes back after [12] failures"),
        (never_go_back, "stuck: s. has|stuck: s. is not all of version"),
        (start_the_version_before, "is a replica of s. that nobody wants"),
        (number_versions_anew, "became version 1 after"),
        (forget_what_still_runs, "is gone, but"),
        (never_stop, "stuck: "),
        (want_more_than_the_most, "is to have 99 replicas"),
        (replace_nobody, "ready replicas of|more replicas|not all of version"),
        (greet_again_after_a_restart, "its probe has not answered"),
        (leave_those_that_hang, "hangs, and is not replaced"),
        (let_all_old_ones_leave_first, "is drained, which leaves"),
        (let_gangs_answer_where_they_meet, "answers where its members meet"),
        (call_anybody_hung, "is said to hang, but it answers|is not yet ready"),
    ],
)
def test_what_is_wrong_on_purpose_is_caught(
    mutate: Mutate, caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    early = [EARLY[mutate]] if mutate in EARLY else []
    failures = (_failure(seed) for seed in (*early, *range(SEEDS_MAX)))
    first = next((failure for failure in failures if failure), "nobody noticed")
    assert re.search(caught, first)


def _failure(seed: int) -> str:
    try:
        run_seed(seed, SIZE)
    except SeedFailed as failure:
        return str(failure)
    return ""
