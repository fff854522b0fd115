"""Volumes from URLs, with a real S3: fetched once, shared, fetched again when they change."""

from __future__ import annotations

import http.server
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.cli.screen.explanation import page
from shoal.client import ShoalError
from shoal.core.state.events.runs import JobPlaced
from shoal.model.service import Scale
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports
from tests.needs import need, need_root
from tests.reading.shards import write_images
from tests.s3 import s3_server

need("s3fs")

UID = 61_931
READ = """
import os, shoal.data
samples = [one["__key__"] for one in shoal.data.open("data", match="00[01].tar", shuffle=False)]
print(os.getuid(), samples, sorted(os.listdir(os.environ["SHOAL_VOLUME_DATA"])))
"""
SHOW = "cd $SHOAL_VOLUME_DATA && pwd && cat deep/words && stat -c %a . deep deep/words"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as env:
        yield env


def files_of(env: dict[str, str]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        key=env["AWS_ACCESS_KEY_ID"],
        secret=env["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=env["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
    )


def logged(live: Live, words: str) -> int:
    return len(re.findall(words, (live.home.nodes / "n1" / "agent.log").read_text()))


def test_a_volume_from_s3_is_fetched_once_shared_and_fetched_again_when_it_changes(
    live: Live, s3: dict[str, str]
) -> None:
    bucket = files_of(s3)
    bucket.mkdir("data")
    bucket.pipe_file("data/set/deep/words", b"first words")
    bucket.pipe_file("data/set/large", bytes(3_000_000))
    public = {name: value for name, value in s3.items() if name != "AWS_SECRET_ACCESS_KEY"}
    live.client.set_secret("s3", s3["AWS_SECRET_ACCESS_KEY"].encode())
    fields: dict[str, Any] = {
        "env": public,
        "secrets": ("s3=AWS_SECRET_ACCESS_KEY",),
        "volumes": ["s3://data/set:data"],
    }
    gang = live.run(SHOW, members=2, gpus=1, **fields)
    assert live.wait(gang) == "succeeded", live.client.job(gang).why
    said = {live.output(gang, member) for member in (0, 1)}
    assert len(said) == 1, "they share one folder"
    assert "first words555\n555\n444" in said.pop()
    assert logged(live, "volume .* is here: s3://data/set, 3000011 bytes") == 1
    again = live.run(SHOW, **fields)
    assert live.wait(again) == "succeeded"
    assert live.output(again) == live.output(gang)
    assert logged(live, "volume .* is used again") == 1
    bucket.pipe_file("data/set/deep/words", b"other words")
    changed = live.run(SHOW, **fields)
    assert live.wait(changed) == "succeeded"
    assert "other words" in live.output(changed)
    assert logged(live, "volume .* is here") == 2
    listing = "find $SHOAL_VOLUME_DATA -type f -printf '%P\\n'"
    dealt = live.run(listing, members=2, gpus=1, volume_shard=["data"], **fields)
    assert live.wait(dealt) == "succeeded"
    assert sorted(live.output(dealt, member) for member in (0, 1)) == ["deep/words\n", "large\n"]
    placed = [one.event for one in live.client.events(after=-60).events]
    whys = [event.why for event in placed if isinstance(event, JobPlaced)]
    assert "n1 holds 100 % of data" in whys[-1]
    missing = live.run("true", **(fields | {"volumes": ["s3://nowhere/set:data:ro"]}))
    denied = live.run("true", env=public, volumes=["s3://data/set:data"])
    assert live.wait(missing) == live.wait(denied) == "failed"
    why = live.client.job(missing).why
    assert "volume data: there is nothing at s3://nowhere/set" in why
    why = live.client.job(denied).why
    assert "volume data: s3://data/set must not be read" in why and "--secret" in why
    left = [path.name for path in (live.home.nodes / "n1" / "volumes").glob(".*")]
    assert left == [], "nothing half is left"


class Slow(http.server.BaseHTTPRequestHandler):
    """Sends a tenth of its file, and waits."""

    hold = threading.Event()

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5000000")
        self.send_header("ETag", '"one"')
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(bytes(500_000))
        self.wfile.flush()
        self.hold.wait(60)

    def log_message(self, *_: object) -> None:
        pass


def test_a_job_that_waits_for_its_volume_says_so_and_can_be_cancelled(
    live: Live, tmp_path: Path
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/big.bin"
            job = live.run("true", volumes=[f"{url}:big"])
            until(
                lambda: "fetching volume big: 0.5 of 5.0 MB" in live.client.job(job).why,
                more=lambda: live.client.job(job).why,
            )
            live.client.cancel(job)
            assert live.wait(job) == "cancelled"
            volumes = live.home.nodes / "n1" / "volumes"
            until(lambda: not list(volumes.glob(".*")), "nothing half is left")
        finally:
            Slow.hold.set()
            server.shutdown()
    (tmp_path / "words").write_text("from a file")
    job = live.run("cat $SHOAL_VOLUME_DATA/words", volumes=[f"file://{tmp_path}/words:data"])
    assert live.wait(job) == "succeeded"
    assert live.output(job) == "from a file"
    job = live.run("true", volumes=["nosuch://x/y:data"])
    assert live.wait(job) == "failed"
    assert "volume data: fsspec knows no nosuch://" in live.client.job(job).why
    with pytest.raises(ShoalError, match="cannot be written as a volume"):
        live.run("true", volumes=["s3://bucket/data:data:rw"])
    with pytest.raises(ShoalError, match="contains a password"):
        live.run("true", volumes=["https://me:word@host/data:data"])


def test_the_user_of_a_tenant_fetches_its_own_copy_and_cannot_write_to_it(
    live: Live, s3: dict[str, str]
) -> None:
    need_root()
    files_of(s3).pipe_file("data/own/deep/words", b"of a tenant")
    live.client.add_tenant("apart", uid=UID)
    script = f"{SHOW} && id -u && chmod u+w deep/words; touch deep/new; ls /proc/mounts"
    fields = {"env": s3, "volumes": ["s3://data/own:data"]}
    job = live.run(script, tenant="apart", **fields)
    assert live.wait(job) == "succeeded", live.client.job(job).why
    said = live.output(job)
    assert f"of a tenant555\n555\n444\n{UID}\n" in said
    assert said.count("Read-only file system") == 2
    before = logged(live, "is here: s3://data/own")
    other = live.run(SHOW, **fields)
    assert live.wait(other) == "succeeded"
    assert logged(live, "is here: s3://data/own") == before + 1, "tenants share no copy"


def test_weights_arrive_once_and_are_the_same_files_for_all_replicas_of_a_node(
    live: Live, tmp_path: Path
) -> None:
    need_gateway()
    live.client.set_policy(msgspec.structs.replace(live.client.policy(), **replica_ports()))
    (tmp_path / "weights.bin").write_bytes(bytes(3_000_000))
    serving = Serving(live, "weights")
    stat = "stat -c %d:%i:%s $SHOAL_VOLUME_MODEL/weights.bin"
    replica = serving.shell(f"{stat} && exec {sys.executable} -m tests.gateway.replica $PORT v1")
    replica = msgspec.structs.replace(replica, volumes=(f"file://{tmp_path}:model",))
    serving.put(replica, Scale(least=2, most=2))
    jobs = [one.job for one in serving.settles().replicas]
    said = {live.output(job).partition("\n")[0] for job in jobs}
    assert len(jobs) == 2 and len(said) == 1, "one inode has one page cache"
    assert said.pop().endswith(":3000000")
    assert logged(live, f"is here: file://{tmp_path},") == 1
    parts = {"volumes", "until it listened on its port", "until the gateway served it"}
    until(
        lambda: all(parts <= _measured(live, job) for job in jobs),
        more=lambda: "\n".join(page(live.client.explanation(jobs[0]))),
    )
    live.client.stop_service("weights")
    until(serving.gone)
    for job in jobs:  # what the events say stays
        assert parts - {"until the gateway served it"} <= _measured(live, job)


def _measured(live: Live, job: str) -> set[str]:
    """Parts of its start."""
    lines = page(live.client.explanation(job))
    rows = lines[lines.index("    its start:") + 1 :]
    return {line.split("  ")[-1] for line in rows if "not measured" not in line}


@pytest.mark.parametrize("tenant", ["default", "lazy"])
def test_a_lazy_volume_comes_as_its_shards_are_read(
    live: Live, s3: dict[str, str], tenant: str, tmp_path: Path
) -> None:
    uid = os.getuid()
    if tenant == "lazy":
        need_root()
        uid = UID + 1
        live.client.add_tenant("lazy", uid=uid)
    for number in range(3):
        shard = write_images(tmp_path / f"{number:03}.tar", range(2 * number, 2 * number + 2))
        files_of(s3).pipe_file(f"data/{tenant}/{number:03}.tar", shard.read_bytes())
    fields = {"volumes": [f"s3://data/{tenant}:data"], "volume_lazy": ["data"], "tenant": tenant}
    job = live.run('exec "$SHOAL_PYTHON" -c "$READ"', env={**s3, "READ": READ}, **fields)
    assert live.wait(job) == "succeeded", live.client.job(job).why
    names = [".shoal-readers", "000.tar", "001.tar"]
    assert f"{uid} ['00000', '00001', '00002', '00003'] {names}" in live.output(job)
