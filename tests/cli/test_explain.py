"""`shoal explain`: the page as it is printed, for histories that really happened in the core."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import cast

from shoal.cli.screen.explanation import WIDTH, page
from shoal.core.answers.explain import attempts_of, learned_of
from shoal.core.state.events.base import JobEvent, Reader
from shoal.ledger.accounts import ABOUT, Account
from shoal.model.explanation import Explanation
from shoal.model.job import Note
from shoal.model.ledger import AccountSum, CostView
from shoal.model.reason import render
from tests.core.build import Cluster
from tests.core.training import Training

START_MS = 1_790_000_000_000
HOUR_US = 3_600_000_000


ADMIN = cast(Reader, SimpleNamespace(text=render))


def story(cluster: Cluster, job_id: str, tails: dict[tuple[int, int], str]) -> Explanation:
    job = cluster.job(job_id)
    history = [event.rendered(ADMIN) for event in cluster.log]
    log = [event for event in history if not isinstance(event, JobEvent) or event.job == job_id]
    attempts = attempts_of(log, lambda *at: tails.get(at, ""))
    return Explanation(
        id=job.id,
        name=job.spec.name or "",
        tenant=job.spec.tenant,
        state=job.outcome.value if job.outcome else job.phase.value,
        why=job.why,
        command="python train.py",
        members=job.spec.members,
        submitted_ms=job.submitted_ms,
        finished_ms=job.finished_ms,
        now_ms=cluster.now_ms,
        code=job.code,
        complete=True,
        attempts=attempts,
        learned=learned_of(history, job_id),
    )


def text(one: Explanation) -> str:
    return "\n".join(page(one, datetime.UTC))


def test_a_gang_that_loses_a_node_and_then_runs_out_of_memory() -> None:
    cluster = Training(nodes="abc", gpus=8)
    cluster.now_ms = START_MS
    cluster.hear("a", "b", "c")
    job = cluster.run(name="big", tenant="research", members=2, gpus=8, checkpoint_ms=60_000)
    cluster.walk(job, 400, saved_step=380)
    lost = cluster.job(job).members[1].slice.node
    cluster.learn_gone(lost)
    cluster.deliver()
    cluster.end(job, 143, member=0)
    cluster.hear("a", "b", "c")
    cluster.reboot(lost)
    cluster.hear("a", "b", "c")
    cluster.deliver()
    cluster.hear("a", "b", "c")
    assert cluster.job(job).attempt == 2
    cluster.wait(600_000)
    nodes = [member.slice.node for member in cluster.job(job).members]
    cluster.books[nodes[1]].exited(
        next(ref for ref in cluster.books[nodes[1]].alive if ref.job == job), 1, "", 512
    )
    cluster.hear("a", "b", "c")
    cluster.deliver()
    cluster.end(job, 143, member=0)
    said = "Traceback\n  loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    told = text(story(cluster, job, {(2, 1): said}))
    assert told == GANG.format(kept=nodes[0], lost=lost, new=nodes[1]).strip("\n"), told
    assert all(len(line) <= WIDTH for line in told.splitlines())


GANG = """
j1 (big) has failed: member 1 on {new} exited 1
submitted 2026-09-21 14:13:20 for research, 2 members: python train.py
waited 0ms for its first start; 16m 40s since submission, 2 attempts

Attempt 1, 2026-09-21 14:13:20, on {kept}, {lost}: ran 6m 40s, node lost
    lost with {lost}; restarts elsewhere (does not count as a retry); 6m 39s of work on 16
      GPUs lost
    member 1 on {lost} failed first: no exit code
    it ran from step 0 to 400, saved up to 380: 20 steps of work lost
    compute-bound: 100 % of each step is the job's own work (1000 of 1000 ms, all 400
      steps)

Attempt 2, 2026-09-21 14:20:00, on {kept}, {new}: ran 10m, out of memory (probably)
    member 1 on {new} exited 1
    because it printed 'cuda out of memory'
    member 1 on {new} failed first: exit code 1 in step 512
    its last lines:
    | Traceback
    |   loss.backward()
    | torch.OutOfMemoryError: CUDA out of memory.
    full log: shoal logs j1 --attempt 2 --member 1
    it ran from step 380 to 512, saved nothing: 132 steps of work lost
    try a smaller batch, GPUs with more memory, or a larger --memory

What it cost
    unknown: this cluster keeps no ledger
"""


def test_a_job_that_is_refused_again_and_again_is_told_in_short() -> None:
    cluster = Cluster()
    cluster.join("n1", gpus=1)
    cluster.now_ms = START_MS
    cluster.hear("n1")
    job = cluster.run(gpus=1, restart="on-failure", retries=30, backoff_ms=0)
    for _ in range(20):
        cluster.wait(1_000)
        cluster.end(job, 5)
        cluster.deliver()
        cluster.hear("n1")
    tails = {(number, 0): "no such file: data.bin\n" for number in range(1, 40)}
    told = text(story(cluster, job, tails))
    assert "(13 more like these)" in told
    assert told.count("no such file: data.bin") == 1
    assert told.count("its last lines were the same as in the previous attempt") == 6
    assert "Attempt 21" in told and "still going" in told
    assert len(told.splitlines()) < 60, "one page"


def test_a_job_that_never_started_has_a_page_too() -> None:
    cluster = Cluster()
    cluster.join("n1", gpus=1)
    job = cluster.submit(gpus=1)
    waiting = cluster.submit(gpus=1)
    cluster.wait(5_000)
    page_of = story(cluster, waiting, {})
    page_of.labels = {"run": "a", "big": ""}
    page_of.notes = [Note(1, "", "old"), Note(2, "ada", "a\x1bb\nc " + "long " * 40)]
    told = text(page_of)
    assert "waited 5s for its first start" in told
    assert "\nlabels: run=a, big\nnote by ada: a\\x1bb c long " in told
    assert "... (1 older note)\n" in told
    assert max(map(len, told.splitlines())) <= WIDTH
    assert told.endswith("unknown: this cluster keeps no ledger")
    cluster.cancel(waiting)
    assert "was cancelled" in text(story(cluster, waiting, {}))
    assert job != waiting


def test_what_is_known_of_a_straggler_is_on_the_page() -> None:
    cluster = Training(nodes="abcd", gpus=1)
    job = cluster.run(members=4, gpus=1)
    cluster.walk(job, 60, slow={2: 3})
    told = text(story(cluster, job, {}))
    assert "What was learned about its nodes" in told
    assert "became suspect because of this job: member 2 of j1" in " ".join(told.split())


def test_text_of_a_job_cannot_hurt_the_terminal() -> None:
    cluster = Cluster()
    cluster.join("n1", gpus=1)
    job = cluster.run(gpus=1, name="x")
    cluster.end(job, 1, why="\x1b[2J\x07bad")
    told = text(story(cluster, job, {(1, 0): "\x1b[31mred\x1b[0m\n" + "y" * 4000}))
    assert "\x1b" not in told and "\x07" not in told
    assert max(map(len, told.splitlines())) < 230


def test_what_the_ledger_knows_is_told_too() -> None:
    cluster = Cluster()
    cluster.join("n1", gpus=1)
    job = cluster.run(gpus=1)
    cluster.wait(3_600_000)
    accounts = [
        AccountSum(
            account=account.value,
            title=ABOUT[account].title,
            group=ABOUT[account].group,
            gpu_us=gpu_us,
            gpu_ms=gpu_us / 1000,
            share=gpu_us / HOUR_US,
        )
        for account, gpu_us in ((Account.STARTUP, HOUR_US // 50), (Account.USEFUL, HOUR_US))
    ]
    cost = CostView(
        job=job,
        gpu_us=HOUR_US + HOUR_US // 50,
        gpu_ms=0,
        accounts=accounts,
        currency="EUR",
        cost=2.5,
        energy_wh=700,
        co2_g=250,
    )
    lines = page(story(cluster, job, {}), datetime.UTC, cost)
    assert lines[-4:] == [
        "    1.02 GPU-hours in total",
        "      1.00 GPU-hours (98 %) useful work",
        "      72 GPU-seconds (2 %) startup",
        "    2.50 EUR, 0.7 kWh, 0.25 kg of CO2",
    ]
