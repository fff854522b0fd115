"""Many clients at once, and controllers and heads that are killed: what was answered stays true."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from harness.clients import Recorder, whole_log
from harness.clusters import Head, Measured, two_heads
from harness.history import OK, Op, check
from harness.records import launched
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.model.job import JobSpec
from tests.live.cluster import Live, live_cluster
from tests.needs import need

CLIENTS = 8
KILLS = 3
BETWEEN = 30  # answers from one kill to the next


def test_what_clients_were_answered_stays_true_when_controllers_are_killed() -> None:
    seed = int(os.environ.get("SHOAL_SEED", "20261116"))
    dice = random.Random(seed)
    with live_cluster(nodes=2, gpus=2) as live:

        def spec(dice: random.Random) -> JobSpec:
            script = f"sleep {dice.choice((0, 0.1, 0.5))}; exit {dice.choice((0, 0, 3))}"
            sweep, members = None, dice.choice((1, 1, 2))
            if dice.random() < 0.1:
                sweep, members = {"ranges": [[0, 3]]}, 1
            command = ("sh", "-c", script)
            return live.spec(*command, gpus=1, stop_grace_ms=200, sweep=sweep, members=members)

        clients = started(lambda: impatient(live), spec, dice)
        last = 0
        for number in range(1, KILLS + 1):
            until(lambda n=number: answered(clients) > n * BETWEEN)  # type: ignore[misc]
            until(lambda last=last: live.controller_pid() != last)  # type: ignore[misc]
            last = live.kill_controller()
        live.kill_agent("n1")
        until(lambda: answered(clients) > (KILLS + 1) * BETWEEN)
        ops = ended(clients)
        for job in live.client.jobs(limit=10_000):
            live.client.cancel(job.id)
        until(lambda: not live.client.jobs())
        log = whole_log(live.client)
        found = check(ops, log, launched(live.home.nodes))
        assert not found, f"seed {seed}: " + "\n".join(found)
        done = Counter(op.kind for op in ops if op.result == OK)
        assert done.keys() >= {"submit", "cancel", "requeue", "job", "events"}
        assert len(launched(live.home.nodes)) > 10


@pytest.mark.soak  # with several heads; test_several_heads.py shows what becomes of jobs
def test_what_clients_were_answered_stays_true_when_the_leader_is_lost() -> None:
    """Each client knows both heads. The one that leads is killed, and the next is stopped and
    continued when another leads."""
    need("postgres")
    dice = random.Random(int(os.environ.get("SHOAL_SEED", "20261116")))
    spec = JobSpec(command=("true",), env={"PATH": os.environ.get("PATH", os.defpath)})
    with two_heads() as cluster:
        clients = started(lambda: cluster.connect(0.5, 5), lambda _: spec, dice)
        until(lambda: answered(clients) > BETWEEN)
        os.kill(cluster.leader().controller(), signal.SIGKILL)
        until(lambda: answered(clients) > 2 * BETWEEN)
        led = cluster.leader()
        stopped = led.controller()
        os.kill(stopped, signal.SIGSTOP)
        try:
            until(lambda: another_leads(cluster, led))
        finally:
            os.kill(stopped, signal.SIGCONT)
        count = answered(clients)
        until(lambda: answered(clients) > count + BETWEEN)
        found = check(ended(clients), whole_log(cluster.client))
        assert not found, "\n".join(found)


def another_leads(cluster: Measured, led: Head) -> bool:
    (other,) = [head for head in cluster.heads if head is not led]
    with contextlib.suppress(ShoalError), Client(home=other.home, timeout_s=5) as client:
        return any(one.role == "leads" and one.url == other.address().url for one in client.heads())
    return False


def started(
    open_client: Callable[[], Client], spec: Callable[[random.Random], JobSpec], dice: random.Random
) -> list[Recorder]:
    clients = [
        Recorder(number, open_client, spec, dice.randrange(2**32), 0.05)
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    return clients


def ended(clients: list[Recorder]) -> list[Op]:
    for client in clients:
        client.end()
    for client in clients:
        client.join(60)
        assert client.error is None, client.error
    return [op for client in clients for op in client.ops]


def answered(clients: list[Recorder]) -> int:
    return sum(op.result == OK for client in clients for op in list(client.ops))


def impatient(live: Live) -> Client:
    return Client(home=live.home.path, timeout_s=10, patience_s=0.1)
