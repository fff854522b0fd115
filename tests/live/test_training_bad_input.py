"""What a training job gets wrong ends in one clear line, in `why` and in the events."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.waiting import WAIT_S, until

from shoal.core.state.events.runs import JobFinished
from tests.live.cluster import Live
from tests.needs import need

need("torch")


SCRIPT = Path(__file__).parent.parent / "train" / "scripts" / "tiny.py"
ROOT = SCRIPT.parent.parent.parent.parent


def train(
    live: Live, *arguments: object, env: dict[str, str] | None = None, **fields: object
) -> str:
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **(env or {})}
    words = [str(argument) for argument in arguments]
    return live.client.submit(live.spec(sys.executable, *words, env=env, **fields)).id


def why(live: Live, job: str, state: str = "failed") -> str:
    """One line, and the same in the job's last event."""
    assert live.wait(job, timeout_s=WAIT_S) == state, live.output(job)
    told = live.client.why(job)
    last = [r.event for r in told.events if isinstance(r.event, JobFinished)]
    assert len(last) == 1
    assert last[0].why == live.client.job(job).why
    assert "\n" not in last[0].why
    return last[0].why


def test_a_script_that_is_not_there_is_named(live: Live) -> None:
    assert "can't open file '/nowhere/train.py'" in why(live, train(live, "/nowhere/train.py"))


def test_a_script_that_crashes_at_import_says_what_was_missing(live: Live, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_module\n")
    text = why(live, train(live, script))
    assert "exited 1 (ModuleNotFoundError: No module named 'no_such_module')" in text


def test_a_checkpoint_directory_that_cannot_be_written_is_named(live: Live, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "checkpoints")
    job = train(live, SCRIPT, 8, 2, 1, env={"SHOAL_CHECKPOINT_DIR": place})
    text = why(live, job)
    assert "shoal.train: checkpoint directory" in text
    assert place in text


@pytest.mark.soak  # tests/train does this to gangs without a cluster
def test_a_full_disk_ends_the_job_and_nothing_saved_is_lost(live: Live, tmp_path: Path) -> None:
    saved = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "WIDTH": "256"}
    first = train(live, SCRIPT, 8, 2, 1, env=saved)
    assert live.wait(first, timeout_s=WAIT_S) == "succeeded", live.output(first)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    text = why(live, train(live, SCRIPT, 8, 2, 3, env={**saved, "FILE_BYTES_MAX": "4096"}))
    assert "shoal.train:" in text
    assert "File too large" in text
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.soak  # tests/train does this to gangs without a cluster
def test_damaged_checkpoints_end_the_job_and_are_kept(live: Live, tmp_path: Path) -> None:
    saved = {"SHOAL_CHECKPOINT_DIR": str(tmp_path)}
    first = train(live, SCRIPT, 8, 2, 1, env=saved)
    assert live.wait(first, timeout_s=WAIT_S) == "succeeded", live.output(first)
    shards = list(tmp_path.rglob("*.distcp"))
    assert shards
    for shard in shards:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    text = why(live, train(live, SCRIPT, 8, 2, 3, env=saved))
    assert "checkpoints in" in text
    assert "are damaged; nothing was removed" in text
    assert len(list(tmp_path.rglob("*.distcp"))) == len(shards)


@pytest.mark.soak  # tests/train does this to gangs without a cluster
def test_a_batch_that_the_members_do_not_divide_is_shared_and_one_too_small_refused(
    live: Live,
) -> None:
    uneven = train(live, SCRIPT, 9, 3, 2, members=2)
    assert live.wait(uneven, timeout_s=WAIT_S) == "succeeded", live.output(uneven)
    assert f"used {[2] * 9}" in live.output(uneven)
    text = why(live, train(live, SCRIPT, 8, 1, 1, members=2))
    assert "shoal.train:" in text
    assert "batch" in text


# Takes its steps, and fails once the test has seen them.
FAILS = """
import os, sys, time
from shoal.train.beats import Beats
Beats().send(step=6, steps=6)
while not os.path.exists(f"{sys.argv[1]}/{os.environ['SHOAL_ATTEMPT']}"): time.sleep(0.05)
sys.exit(9)
"""


def test_a_job_that_fails_the_same_way_each_time_is_stopped(live: Live, tmp_path: Path) -> None:
    job = train(live, "-c", FAILS, tmp_path, restart="on-failure", retries=50, backoff_ms=10)
    for attempt in (1, 2, 3):
        until(lambda attempt=attempt: steps_of(live, job) == (attempt, 6))  # type: ignore[misc]
        (tmp_path / str(attempt)).touch()
    assert "failed 3 times with code 9 at step 6" in why(live, job)
    assert live.client.job(job).attempt == 3


def steps_of(live: Live, job: str) -> tuple[int, int]:
    view = live.client.job(job)
    return view.attempt, view.progress.step if view.progress else 0
