"""A lease holds on a real cluster: the node ends the job, though its controller does nothing."""

from __future__ import annotations

import os
import signal

import pytest
from harness.waiting import until

from shoal.client import ShoalError
from shoal.core.state.events.runs import JobStopping
from shoal.model.job import StopCause
from tests.live.cluster import live_cluster

DEAF = "trap '' TERM; echo up; while :; do sleep 0.05; done"
SECOND_MS = 1_000


def test_a_node_ends_a_job_while_its_controller_is_stopped() -> None:
    with live_cluster(nodes=1, gpus=0) as live:
        client = live.client
        spec = live.spec("sh", "-c", DEAF, stop_grace_ms=500, restart="on-failure", retries=3)
        with pytest.raises(ShoalError, match="the lease is over"):
            client.submit(spec, until_ms=client.status().now_ms)
        first_ms = client.status().now_ms + 3_600 * SECOND_MS
        job = client.submit(spec, until_ms=first_ms)
        assert job.until_ms == first_ms
        renewed = client.renew_lease(job.id, first_ms + SECOND_MS)
        assert renewed.until_ms == first_ms + SECOND_MS
        assert renewed.now_ms < first_ms
        assert client.renew_lease(job.id, first_ms).note.startswith("its lease lasts until")
        assert live.wait(job.id, "running") == "running"
        assert "its lease ends in 1h, unless it is renewed" in client.why(job.id).why
        client.cancel(job.id)
        live.wait(job.id)

        for lease_s in (6, 30, 120):  # a busy machine may need longer to start it
            job = client.submit(spec, until_ms=client.status().now_ms + lease_s * SECOND_MS)
            if live.wait(job.id, "running") == "running":
                break
        until(lambda: "up" in live.output(job.id))
        pid = live.controller_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: not live.member_processes())
        finally:
            os.kill(pid, signal.SIGCONT)
        assert live.wait(job.id) == "cancelled"
        over = client.explanation(job.id)
        assert "nobody has renewed it" in over.why
        assert [one.cause.value for one in over.attempts] == ["lease over"]
        causes = [
            one.event.cause
            for one in client.why(job.id).events
            if isinstance(one.event, JobStopping)
        ]
        assert causes == [StopCause.LEASE]
        with pytest.raises(ShoalError, match="has ended"):
            client.renew_lease(job.id, first_ms)
