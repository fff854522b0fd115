"""The nodes and jobs of the demo, what it promised, and whether it kept it."""

from __future__ import annotations

import sys

import msgspec

from shoal.cli.demo.state import DemoState, Kill, Sights
from shoal.cli.up.hardware import Gpus, Hardware, virtual_nodes
from shoal.ledger.accounts import Account
from shoal.model.job import JobSpec, Outcome, Restart
from shoal.model.ledger import LedgerView
from shoal.model.node import NodeSpec
from shoal.model.resources import plural
from shoal.model.service import Probe, Scale, ServiceSpec

HELD = ("used", "overhead", "wasted")  # groups of accounts of time that jobs held


class Promise(msgspec.Struct, frozen=True):
    text: str
    kept: bool


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    submitted: int
    finished: int
    retried: int
    killed: list[str]  # nodes, by the demo and by whoever watched it
    noticed_ms: int | None  # since the first kill, as the others
    healed_ms: int | None
    back_ms: int | None
    hit: int
    took_ms: int
    resumed_step: int | None  # of the training run, when its node had died
    answers: int  # of the service, as its clients have counted
    failures: int
    lost_gpu_s: float | None  # work that was done again; None: not known
    held_gpu_s: float | None
    kept_home: str = ""  # the cluster that was left up
    promises: list[Promise]

    @property
    def kept(self) -> bool:
        return all(promise.kept for promise in self.promises)


class Loss(msgspec.Struct, frozen=True):
    """GPU time by the ledger: all that jobs held, and the part that was lost to failures."""

    held_gpu_s: float
    lost_gpu_s: float


def loss_of(view: LedgerView) -> Loss:
    held = sum(one.gpu_us for one in view.accounts if one.group in HELD)
    lost = sum(one.gpu_us for one in view.accounts if one.account == Account.RECOMPUTE)
    return Loss(held / 1e6, lost / 1e6)


def result_of(
    state: DemoState,
    submitted: int,
    took_ms: int,
    left_behind: str,
    sights: Sights | None = None,
    loss: Loss | None = None,
    kept_home: str = "",
) -> DemoResult:
    sights = sights or Sights()
    finished = sum(job.outcome is not None for job in state.submitted)
    wrong = [job.name for job in state.submitted if job.outcome is not Outcome.SUCCEEDED]
    hit = [job for job in state.submitted if job.hit]
    healed = [job.healed_ms for job in hit if job.healed_ms is not None]
    first = state.kills[0] if state.kills else None
    resumed = max(sights.training.resumed.values(), default=None)
    promised = [
        Promise("every submitted job finished", finished == submitted),
        Promise(
            "every job succeeded" + (f", except {', '.join(wrong[:5])}" if wrong else ""),
            not wrong,
        ),
        Promise(
            "the loss of the node was noticed",
            first is not None and all(kill.noticed_ms is not None for kill in state.kills),
        ),
        Promise(
            f"{plural(len(hit), 'job')} on that node ran again",
            bool(hit) and len(healed) == len(hit),
        ),
        Promise("the node came back", first is not None and state.all_back),
        Promise("the job that failed at first ran again", state.retried > 0),
    ]
    if sights.training.job:
        text = "the training run went on from its checkpoint"
        promised.append(Promise(f"{text}, step {resumed}" if resumed else text, bool(resumed)))
    if sights.serving.job:
        answers, failures = sights.serving.answers, sights.serving.failures
        text = f"the service answered {answers} requests; {failures} failed"
        promised.append(Promise(text, answers > 0 and failures == 0))
    left = left_behind or "no process and no file remains"
    if not kept_home:
        promised.append(Promise(left, not left_behind))
    return DemoResult(
        submitted=submitted,
        finished=finished,
        retried=state.retried,
        killed=[kill.node for kill in state.kills],
        noticed_ms=_since(first, first.noticed_ms if first else None),
        healed_ms=_since(first, max(healed, default=None)),
        back_ms=_since(first, first.back_ms if first else None),
        hit=len(hit),
        took_ms=took_ms,
        resumed_step=resumed,
        answers=sights.serving.answers,
        failures=sights.serving.failures,
        lost_gpu_s=round(loss.lost_gpu_s, 1) if loss else None,
        held_gpu_s=round(loss.held_gpu_s, 1) if loss else None,
        kept_home=kept_home,
        promises=promised,
    )


def _since(first: Kill | None, moment_ms: int | None) -> int | None:
    return None if first is None or moment_ms is None else max(moment_ms - first.at_ms, 0)


def numbers(result: DemoResult) -> list[str]:
    lines = [
        f"{result.finished} of {plural(result.submitted, 'job')} finished in "
        f"{result.took_ms / 1000:.1f} s, including start"
        + ("" if result.kept_home else " and stop")
    ]
    if result.killed:
        lines.append(
            f"{result.killed[0]} was killed: noticed after {_seconds(result.noticed_ms)}, "
            f"back after {_seconds(result.back_ms)}"
        )
        lines.append(
            f"{plural(result.hit, 'job')} lost members with it; "
            f"all ran again after {_seconds(result.healed_ms)}"
        )
    if len(result.killed) > 1:
        lines.append(f"killed as well: {', '.join(result.killed[1:])}")
    if result.lost_gpu_s is not None and result.held_gpu_s:
        share = result.lost_gpu_s / result.held_gpu_s
        lines.append(
            f"{result.lost_gpu_s:.1f} of {result.held_gpu_s:.0f} GPU-seconds were lost to failures "
            f"({share:.1%})"
        )
    return lines


def promises(result: DemoResult) -> list[tuple[str, bool]]:
    return [(f"{'yes' if p.kept else 'NO '}  {p.text}", p.kept) for p in result.promises]


def _seconds(ms: int | None) -> str:
    return "(never)" if ms is None else f"{ms / 1000:.2f} s"


# The nodes and jobs of the demo.


NODES = 4
GPUS = 8

_STEPS = "for step in $(seq {count}); do echo member $SHOAL_MEMBER step $step; sleep 0.5; done"
_WORK = (sys.executable, "-m", "shoal.cli.demo.work")
ASK_S = 16  # how long the service gets requests
TRAIN_STEPS = 150
TRAIN = "train-a"  # the job that is looked at more closely


def nodes() -> tuple[NodeSpec, ...]:
    """The same on every machine: the demo's jobs use little of what they request."""
    machine = Hardware("demo", cpus=2 * GPUS, memory_mb=NODES * 64 * 1024, gpus=Gpus(0))
    return virtual_nodes(
        machine, nodes=NODES, gpus=GPUS, cpu_milli=None, memory_mb=None, topology="2x2"
    )


# It fails once by itself, also if its node is killed before that.
_FLAKY = "echo attempt $SHOAL_ATTEMPT; sleep 2; test -e failed || { touch failed; exit 1; }"


def jobs(env: dict[str, str], workdir: str) -> list[JobSpec]:
    """A mix: a training run, gangs on whole and on shared nodes, jobs with one GPU, a job that
    fails at first, and a map without GPUs."""

    def job(name: str, members: int, gpus: int, seconds: float) -> JobSpec:
        steps = _STEPS.format(count=int(seconds * 2))
        return JobSpec(
            command=("sh", "-c", steps),
            name=name,
            members=members,
            gpus=gpus,
            env=env,
            workdir=workdir,
            stop_grace_ms=1000,
        )

    flaky = JobSpec(
        command=("sh", "-c", _FLAKY),
        name="flaky",
        gpus=1,
        env=env,
        workdir=workdir,
        restart=Restart.ON_FAILURE,
        retries=3,
        backoff_ms=500,
    )
    train = JobSpec(
        command=(*_WORK, "train", str(TRAIN_STEPS)),
        name=TRAIN,
        priority=1,  # it goes on at once when its node has died
        members=2,
        gpus=5,
        env=env,
        workdir=workdir,
        stop_grace_ms=1000,
    )
    lines = JobSpec(command=(*_WORK, "map"), name="map", env=env, workdir=workdir)
    return [
        train,
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(1, 9)],
        flaky,
        lines,
        job("score", 1, 4, 5),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(1, 5)],
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(9, 17)],
        job("train-b", 2, 8, 4),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(5, 8)],
    ]


def service(env: dict[str, str], workdir: str) -> ServiceSpec:
    """A replica requests more than half of a node's memory, so that no node has two: the one that
    is killed must not take the whole service along."""
    more_than_half = nodes()[0].memory_mb // 2 + 1
    replica = JobSpec(
        command=(*_WORK, "serve"), gpus=1, memory_mb=more_than_half, env=env, workdir=workdir
    )
    scale = Scale(least=2, most=3, target=4)
    return ServiceSpec(name="chat", replica=replica, scale=scale, probe=Probe(path="/health"))


def asker(url: str, env: dict[str, str], workdir: str) -> JobSpec:
    """The job that sends requests to the service."""
    return JobSpec(command=(*_WORK, "ask", url, str(ASK_S)), name="ask", env=env, workdir=workdir)
