"""Checkpoints on S3: the same promises, with a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.train.checkpoints import MANIFEST, CheckpointStore
from tests.needs import need
from tests.s3 import s3_server
from tests.train.gangs import Gang

need("torch")
need("s3fs")

BUCKET = "models"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a bucket can be reached."""
    with s3_server(tmp_path_factory.mktemp("s3")) as env:
        yield env


def test_a_run_on_s3_goes_on_after_a_kill_and_past_a_damaged_checkpoint(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/run"
    store = CheckpointStore(url)
    store.fs.mkdir(BUCKET)
    env = {"SHOAL_CHECKPOINT_DIR": url, "EVERY": "2"}
    with Gang("tiny.py", 20, 4, 2, env=env | {"DIE_AT": "7"}) as gang:
        assert {member.code for member in gang.end()} == {9}
    newest = next(one for one in store.find() if one.whole)
    with Gang("tiny.py", 20, 4, 2, world=1, env=env | {"DIE_AT": "9"}) as gang:
        assert f"restored {newest.step} " in gang.end()[0].out
    newest, before, *_ = (one for one in store.find() if one.whole)
    store.fs.pipe_file(store.path(newest.name, "__0_0.distcp"), b"not what was written")
    with Gang("tiny.py", 20, 4, 2, world=3, env=env) as gang:
        ended = gang.succeed()
    assert f"{newest.name} is damaged" in ended[0].err
    assert f"restored {before.step} " in ended[0].out
    assert f"used {[2] * 20}" in ended[0].out
    whole = [one for one in store.find() if one.whole]
    assert [one.step for one in whole] == [10, 8]
    assert store.fs.exists(store.path(whole[0].name, MANIFEST))


def test_a_bucket_that_is_not_there_or_not_ours_ends_in_one_line(s3: dict[str, str]) -> None:
    wrong = s3 | {"AWS_SECRET_ACCESS_KEY": "guess", "SHOAL_CHECKPOINT_DIR": f"s3://{BUCKET}/other"}
    with Gang("tiny.py", 20, 4, 2, world=1, env=wrong) as gang:
        ended = gang.end()[0]
    assert ended.code == 1 and "Traceback" not in ended.err
    assert f"checkpoint directory s3://{BUCKET}/other cannot be written" in ended.err
