"""What is said of an action before it is done is what the action does."""

from __future__ import annotations

from shoal.core.answers.preview import (
    cancel_lines,
    cancelled,
    closed_text,
    drain_lines,
    drained,
    gpu_hours_text,
    requeue_lines,
    requeued,
)
from shoal.core.invariants import verify
from shoal.model.job import Phase
from shoal.model.node import NodeIntent
from shoal.model.preview import Deed
from shoal.model.reason import Reader, render
from shoal.model.report import SetIntent
from tests.core.build import Cluster

HOUR_MS = 3_600_000
OTHER = Reader(tenant="blue")


def shown(lines: list[str], reader: Reader | None = None) -> list[str]:
    return [render(line, reader) if reader else render(line) for line in lines]


def test_a_drain_does_what_was_said_of_it() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=4)
    moves = cluster.run(gpus=2, name="moves", checkpoint_ms=HOUR_MS)
    where = cluster.job(moves).members[0].slice.node
    gang = cluster.run(gpus=2, members=2, members_per_node=1, priority=-1)
    cluster.wait(2 * HOUR_MS + 60_000)
    cluster.hear("a", "b")
    nodes = [cluster.node(where)]
    effects = {one.job.id: one for one in drained(cluster.state, nodes, cluster.now_ms)}
    verify(cluster.state)  # what is free has not changed
    assert effects[moves].deed is Deed.MOVES
    assert effects[gang].deed is Deed.WAITS
    assert effects[moves].unsaved_ms < HOUR_MS < effects[gang].unsaved_ms
    assert effects[gang].gpu_ms == 4 * effects[gang].unsaved_ms
    lines = shown(drain_lines(nodes, list(effects.values())))
    assert lines == [
        f"1 job moves to a node with room: {moves} (moves) to {effects[moves].to[0]}",
        f"1 job stops and waits for room: {gang}",
        "up to 8.1 GPU-hours since the last save may be lost",
        f"1 job has no checkpoint and starts over: {gang}",
    ]
    assert "moves)" not in " ".join(shown(drain_lines(nodes, list(effects.values())), OTHER))
    cluster.intend(where, NodeIntent.DRAINING)
    for job_id in (moves, gang):
        for member, one in enumerate(cluster.job(job_id).members):
            if not one.over:
                cluster.deliver()
                cluster.exit(job_id, 143, member)
    cluster.hear("a", "b")
    cluster.step()
    assert cluster.job(gang).phase is Phase.WAITING
    assert tuple(one.slice.node for one in cluster.job(moves).members) == effects[moves].to


def test_a_drain_waits_for_what_must_not_run_twice() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    stays = cluster.run(gpus=1, restart="never")
    (effect,) = drained(cluster.state, [cluster.node("a")], cluster.now_ms)
    assert effect.deed is Deed.STAYS
    assert shown(drain_lines([cluster.node("a")], [effect])) == [
        f"1 job keeps running until it ends (restart: never): {stays}"
    ]
    assert drain_lines([cluster.node("a")], []) == ["no job runs on a"]


def test_a_cancel_says_what_is_lost_and_who_depends_on_it() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    job_id = cluster.run(gpus=2)
    lost = cluster.submit(after=(job_id,))
    freed = cluster.submit(after=(f"{job_id}:any",))
    cluster.wait(HOUR_MS)
    cluster.hear("a")
    effects = cancelled(cluster.state, [cluster.job(job_id)], cluster.now_ms)
    assert shown(cancel_lines(cluster.state, effects)) == [
        f"1 job stops: {job_id}",
        "2 GPU-hours since the last save will be lost",
        f"1 job depends on it and is cancelled, too: {lost}",
        f"1 job waits for it to end and may start then: {freed}",
    ]
    again = requeued(cluster.state, [cluster.job(job_id)], cluster.now_ms)
    assert shown(requeue_lines(again)) == [
        f"1 job stops and waits in the queue again: {job_id}",
        "up to 2 GPU-hours since the last save may be lost",
        f"1 job has no checkpoint and starts over: {job_id}",
    ]
    cluster.cancel(job_id)
    cluster.deliver()
    cluster.end(job_id, 143)
    cluster.step()
    assert cluster.job(lost).state == "cancelled"
    assert cluster.job(freed).phase is Phase.STARTING


def test_who_closed_a_node_and_why_is_known() -> None:
    cluster = Cluster()
    cluster.join("a")
    assert closed_text(cluster.node("a"), cluster.now_ms) == ""
    cluster.ask(SetIntent("a", NodeIntent.DRAINING, "ada", "replacing a memory module"))
    cluster.wait(3 * HOUR_MS)
    text = closed_text(cluster.node("a"), cluster.now_ms)
    assert text == "drained 3h ago by ada: replacing a memory module"


def test_gpu_time_is_rounded_for_people() -> None:
    assert gpu_hours_text(59_000) == "59s of GPU time"
    assert gpu_hours_text(HOUR_MS) == "1 GPU-hour"
    assert gpu_hours_text(12_340_000) == "3.4 GPU-hours"
    assert gpu_hours_text(HOUR_MS * 1_234) == "1,234 GPU-hours"
