"""One cluster for the tests of this folder; none of them leaves it worse than it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.cluster import Live, live_cluster

BEATER = Path(__file__).with_name("beater.py")
SOURCE = BEATER.parent.parent.parent / "src"


class Observed(Live):
    """With jobs that tell of their steps."""

    def train(self, steps: int, *, members: int = 1, pace_s: float = 0.05, **env: str) -> str:
        env = {"PACE_S": str(pace_s), "PYTHONPATH": str(SOURCE), **env}
        command = (sys.executable, str(BEATER), str(steps))
        spec = self.spec(*command, env=env, members=members, gpus=1, name="beater")
        return self.client.submit(spec).id


@pytest.fixture(scope="session")
def observed() -> Iterator[Observed]:
    with live_cluster(nodes=2, gpus=4) as live:
        one = Observed(live.home)
        yield one
        one.client.close()
