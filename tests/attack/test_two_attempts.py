"""No two attempts of a job are alive at once, however its node ends. The jobs themselves keep the
record: whatever is alive writes its attempt, again and again, into the folder they share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from tests.live.cluster import Live, live_cluster

# A grandchild in a session of its own, which outlives its parent: it writes on its own.
WRITES = """
setsid sh -c 'while :; do echo $SHOAL_ATTEMPT >>"$RECORD"; sleep 0.01; done' &
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=1) as made:
        yield made


def pids(live: Live, node: str) -> tuple[int, int]:
    info = msgspec.json.decode((live.home.node(node) / "agent.json").read_bytes())
    return int(info["keeper"]), int(info["pid"])


def attempts(record: Path) -> list[int]:
    return [int(line) for line in record.read_text().split()] if record.exists() else []


@pytest.mark.parametrize("victims", ["the keeper", "the keeper and its agent"])
def test_descendants_are_gone_before_the_death_of_their_node_is_known(
    live: Live, tmp_path: Path, victims: str
) -> None:
    record = tmp_path / "record"
    job = live.run(WRITES, gpus=1, env={"RECORD": str(record)})
    assert live.wait(job, "running") == "running"
    until(lambda: 1 in attempts(record))
    keeper, agent = pids(live, live.client.job(job).nodes[0])
    os.kill(keeper, signal.SIGKILL)
    if victims != "the keeper":
        os.kill(agent, signal.SIGKILL)
    until(lambda: attempts(record).count(2) > 50)
    written = attempts(record)
    first = written.index(2)
    beside = written[first:].count(1)
    assert beside == 0, f"attempt 1 wrote {beside} times after attempt 2 had begun"
    live.client.cancel(job)
    live.wait(job)
