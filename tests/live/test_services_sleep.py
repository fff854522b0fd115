"""A service that sleeps without requests: real servers that are frozen, a real HAProxy, one GPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.core.state.events.sleep import JobDozing
from shoal.forms.job import to_service
from shoal.model.service import Route
from tests.gateway.world import Answer, get
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports

BURST = 20


@pytest.fixture
def live() -> Iterator[Live]:
    need_gateway()
    with live_cluster(nodes=1, gpus=1) as made:
        policy = made.client.policy()
        made.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
        yield made


class Burst:
    """Requests at the same moment, and their answers."""

    def __init__(self, serving: Serving, count: int, path: str = "") -> None:
        self.answers: list[Answer] = []
        port = serving.port
        where = f"/{serving.name}/{path}"

        def ask() -> None:
            self.answers.append(get(port, where, method="POST", timeout_s=4 * WAIT_S))

        self._threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def bodies(self) -> list[tuple[int, str]]:
        for thread in self._threads:
            thread.join(5 * WAIT_S)
        return [(answer.status, answer.body) for answer in self.answers]


def test_the_last_replica_sleeps_lends_its_gpu_and_a_burst_wakes_it(
    live: Live, tmp_path: Path
) -> None:
    serving = Serving(live, "chat")
    form = {"name": "chat", "command": ["-"], "sleep_after": "2s", "replicas": "0..1", "idle": "1s"}
    spec = msgspec.structs.replace(
        to_service(form),
        replica=msgspec.structs.replace(serving.replica("v1"), gpus=1),
        route=Route(service="chat", concurrency=8, queue_timeout_ms=300_000),
    )
    scale = msgspec.structs.replace(spec.scale, down_after_ms=1_000)
    live.client.submit_service(msgspec.structs.replace(spec, scale=scale))
    serving.settles()
    before = serving.pids()
    (job,) = before

    began_ms = time.time() * 1000
    stream = Burst(serving, 1, "stream?n=30&every_ms=100")  # 3 s, longer than it may idle
    ((status, text),) = stream.bodies()
    assert (status, text.count("data: v1")) == (200, 30)
    view = serving.settles("asleep")
    assert view.why.startswith(f"{job}: no request for ")
    assert _dozed_ms(live, job)[0] - began_ms > 3_000, "it slept while it answered"
    assert (view.replicas[0].state, view.wanted) in (("dozing", 1), ("asleep", 1))

    # Another job has the GPU. Requests wait, also while the controller is dead.
    release = tmp_path / "release"
    other = live.run(f"while [ ! -e {release} ]; do sleep 0.1; done", gpus=1)
    assert live.wait(other, "running") == "running"
    burst = Burst(serving, BURST)
    until(lambda: serving.view().queued == BURST)
    live.kill_controller()
    until(lambda: f"{other} runs there" in serving.view().why, more=lambda: serving.view())
    assert serving.view().state == "asleep"
    assert not burst.answers
    release.touch()
    assert burst.bodies() == [(200, "v1")] * BURST
    assert serving.pids() == before, "it is the process that slept"

    serving.settles("asleep")
    until(lambda: serving.view().replicas[0].state == "asleep")
    os.kill(before[job], signal.SIGKILL)
    until(lambda: not serving.view().replicas)
    assert serving.settles("idle").wanted == 0
    assert Burst(serving, 1).bodies() == [(200, "v1")]
    assert job not in serving.pids(), "a new one starts for the next request"


def _dozed_ms(live: Live, job: str) -> list[int]:
    events = [record.event for record in live.client.events(after=-1000, limit=1000).events]
    return [one.at_ms for one in events if isinstance(one, JobDozing) and one.job == job]
