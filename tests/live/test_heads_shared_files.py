"""Two heads whose shared folder is on a real parallel file system, each by a mount of its own: the
leader's mount is held, and then the leader is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness import hosts
from harness.heads import Head, Pair, pair
from harness.hosts import switched
from harness.shared_files import Here, Moose, missing
from harness.waiting import until

from shoal.client import Client
from shoal.client.transport import ShoalError
from shoal.model.job import JobSpec
from tests.needs import need

need("postgres")

pytestmark = pytest.mark.soak

# Counts, keeps a file for each ten, and ends when it is told to.
COUNTS = """
n=0; cd $SHOAL_OUTPUT
until test -e $END; do
    n=$((n + 1)); echo $n; sleep 0.05
    test $((n % 10)) != 0 || { seq $n > .new; mv .new $n; }
done
"""


@pytest.fixture
def sea() -> Iterator[tuple[Moose, Here, Here]]:
    if reason := hosts.missing() or missing(Moose.programs):
        pytest.skip(reason)
    with switched() as net:
        made = Moose(net)
        here = Here(net, "first"), Here(net, "second")
        for one in here:
            (one.home / "sea").mkdir()
        try:
            for one in here:
                made.mount(one, one.home / "sea")
            yield made, *here
        finally:
            for name, client in made.clients.items():
                client.go_on()
                made.unmount(next(one for one in here if one.name == name), client_path(made, name))
                client.kill()


def client_path(sea: Moose, name: str) -> Path:
    return sea.net.scratch / name / "sea"


@pytest.fixture
def heads(sea: tuple[Moose, Here, Here]) -> Iterator[Pair]:
    folders = tuple(one.home / "sea" / "shoal" for one in sea[1:])
    with pair(shared=folders) as made:
        yield made


def text(head: Head, job: str) -> bytes:
    kept = b""
    while data := head.client.logs(job, offset=len(kept)).data:
        kept += data
    return kept


def test_output_is_whole_when_the_leaders_mount_is_held_and_the_leader_is_lost(
    sea: tuple[Moose, Here, Here], heads: Pair, tmp_path: Path
) -> None:
    files, end = sea[0], tmp_path / "end"
    first, second = heads.heads
    assert heads.leader() is first
    env = {"PATH": os.environ["PATH"], "END": str(end)}
    spec = msgspec.convert({"command": ("sh", "-c", COUNTS), "env": env}, JobSpec)
    job = first.client.submit(spec).id
    until(lambda: text(first, job).count(b"\n") > 20, "it counts")
    until(lambda: bool(first.client.files(job).files), "its files are kept")
    held = files.clients["first"]
    with files.held(held):
        until(
            lambda: any(
                "shared" in text_ or "sea" in text_ for text_ in first.client.status().alarms
            ),
            "the leader says that its folder hangs",
            lambda: first.client.status().alarms,
        )
        assert heads.leader() is first, "it leads on"
        with Client.at_home(first.home.path, patience_s=0) as hasty:
            says = f"{client_path(files, 'first')} does not answer"
            for _ in range(3):  # more than it has threads to read with
                with pytest.raises(ShoalError, match=says):
                    hasty.files(job)
            with pytest.raises(ShoalError, match=says):
                hasty.logs(job)
            assert hasty.job(job).state == "running"
            assert hasty.events(after=-1).events
    seen = text(first, job).count(b"\n")
    until(lambda: text(first, job).count(b"\n") > seen, "its output arrives again")
    with files.held(held):
        first.kill()
        heads.wait_for_leader(second)
        seen = text(second, job).count(b"\n")
        until(lambda: text(second, job).count(b"\n") > seen + 20, "its output goes on")
    first.shoal("up")
    roles = {first.name: "standby", second.name: "leads"}
    until(lambda: heads.roles() == roles, "both are there", heads.roles)
    end.touch()
    until(lambda: second.client.job(job).state == "succeeded", "it ends")
    assert second.client.job(job).attempt == 1
    counted = text(second, job).decode().split()
    assert counted == [str(number + 1) for number in range(len(counted))]
    kept = sorted(int(one.path) for one in second.client.files(job).files)
    assert kept == list(range(10, len(counted) + 1, 10))
    for head in (first, second):
        head.shoal("cp", "-r", f"{job}:", str(tmp_path / head.name))
        for number in kept:
            whole = (tmp_path / head.name / str(number)).read_text().split()
            assert whole == [str(one + 1) for one in range(number)]
