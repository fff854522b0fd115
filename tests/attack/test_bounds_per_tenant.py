"""One tenant fills what all tenants share, and another one notices nothing.

Stores whose bounds are large are attacked where their bounds can be made small: live jobs in
tests/core/test_caps.py, history in tests/control/test_store.py (with both databases), samples in
tests/database/test_stores.py, outputs in tests/control/test_outputs.py, builds of environments in
tests/agent/test_environment_turns.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from shoal.api.audit import SAME_MAX
from shoal.client import Client
from shoal.core.state.events.runs import JobCheckpointed
from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live, live_cluster

SAVING = """
import os, socket, time, msgspec
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect(b"\\0" + os.environ["SHOAL_BEATS"].encode())
for step in range(1, 401):
    time.sleep(0.005)
    link.send(msgspec.msgpack.encode(
        {"ref": os.environ["SHOAL_REF"], "step": step, "steps": step, "saved_step": step}))
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as made:
        for tenant, user in (("red", "mallory"), ("blue", "ann")):
            made.client.add_tenant(tenant)
            made.client.add_user(user, {tenant: Role.MEMBER})
        yield made


def sign(live: Live, user: str) -> Client:
    return Client(live.client.url, live.client.add_token(NewToken(user=user)).secret)


def test_a_process_that_saves_all_the_time_does_not_flood_the_log(live: Live) -> None:
    """Of 400 saves within seconds, a few are events, and the last one is known."""
    with sign(live, "mallory") as mallory:
        job = mallory.submit(live.spec(sys.executable, "-c", SAVING, tenant="red")).id
        assert live.wait(job) == "succeeded"
        events = [one.event for one in live.client.events(job=job).events]
        steps = [event.step for event in events if isinstance(event, JobCheckpointed)]
        assert len(steps) < 20, steps
        assert steps[-1] == 400


def test_requests_that_change_nothing_do_not_flush_the_audit_log(live: Live) -> None:
    with sign(live, "mallory") as mallory, sign(live, "ann") as ann:
        job = mallory.submit(live.spec("true", tenant="red")).id
        mine = ann.submit(live.spec("true", tenant="blue")).id
        for _ in range(SAME_MAX + 200):
            mallory.label_job(job, {"a": "b"})
        ann.label_job(mine, {"a": "b"})
        same = live.client.audit(user="mallory", verb="notices", limit=5_000).entries
        every = live.client.audit(user="mallory", limit=5_000).entries
        assert len(same) <= len(every) <= SAME_MAX + 20
        on = [(one.who, one.on) for one in live.client.audit(limit=3).entries]
        assert ("ann", mine) in on
