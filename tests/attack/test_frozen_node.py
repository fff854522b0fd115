"""An agent that is frozen beyond the grace time, on the very machine of its controller."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from tests.live.cluster import Live, live_cluster

# The member and a child that went into a session of its own both keep a diary.
DIARY = """
write() { while :; do echo $SHOAL_ATTEMPT $(date +%s%N) >>"$0"; sleep 0.02; done; }
setsid sh -c 'while :; do echo $SHOAL_ATTEMPT $(date +%s%N) >>"$0"; sleep 0.02; done' "$0" &
write
"""


def attempts(diary: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for line in diary.read_text().splitlines() if diary.exists() else ():
        attempt, stamp = line.split()
        found.setdefault(int(attempt), []).append(int(stamp))
    return found


def freeze(live: Live, node: str, *whom: str) -> None:
    info = msgspec.json.decode((live.home.node(node) / "agent.json").read_bytes())
    for who in whom:
        os.kill(int(info[who]), signal.SIGSTOP)


@pytest.mark.parametrize(
    "whom",
    [pytest.param(("pid",), marks=pytest.mark.soak), ("keeper", "pid")],
    ids=["agent", "agent and keeper"],
)
def test_the_next_attempt_begins_when_nothing_of_the_last_is_left(
    tmp_path: Path, whom: tuple[str, ...]
) -> None:
    with live_cluster(nodes=2, gpus=1) as live:
        policy = live.client.policy()
        live.client.set_policy(
            msgspec.structs.replace(policy, silent_after_ms=1_500, grace_ms=3_000)
        )
        diary = tmp_path / "diary"
        job = live.client.submit(live.spec("sh", "-c", DIARY, str(diary), gpus=1)).id
        assert live.wait(job, "running") == "running"
        until(lambda: len(attempts(diary).get(1, ())) > 10)
        [node] = live.client.job(job).nodes
        freeze(live, node, *whom)
        until(lambda: len(attempts(diary).get(2, ())) > 10)
        written = attempts(diary)
        assert max(written[1]) < min(written[2]), "both attempts ran at the same time"
        assert live.client.job(job).failures == 0
        with contextlib.suppress(OSError):
            live.client.cancel(job)
        assert live.wait(job) == "cancelled"
