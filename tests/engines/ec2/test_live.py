"""A whole cluster whose nodes are instances of Moto: they boot with their user data, join, are
taken back, and go, and a controller that is killed in between leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest
from harness.engines import On

from tests.engines.ec2.conftest import need_moto

need_moto()

from shoal.link.wire import PROTOCOL  # noqa: E402
from tests.engines.ec2.machines import Machines, settings_in  # noqa: E402

if TYPE_CHECKING:
    from tests.engines.ec2.cloud import Cloud

SPOT: dict[str, Any] = {"market": "spot", "lasts": "2h", "labels": {"pool": "a"}}
FOR_EVER = ("sh", "-c", "exec sleep 600")


class Here:
    def __init__(self, on: On, ec2: Cloud, machines: Machines) -> None:
        self.on = on
        self.ec2 = ec2
        self.machines = machines

    def supply(self, **words: object) -> None:
        self.on.set_supply(
            **{
                "region": "us-east-1",
                "image": "ami-12c6146b",
                "types": "g4dn.xlarge",
                "python": sys.executable,
                "folder": str(self.on.scratch / "disk"),
                "gpus": 0,
                "cpus": 1,
                "memory": "200M",
                "least": 0,
                "most": 2,
                "idle": "5m",
                **words,
            }
        )

    def run(self, *words: str) -> str:
        return self.on.shoal("run", *words).split()[0]

    def state(self, job: str) -> tuple[str, int]:
        with self.on.client() as client:
            found = client.job(job)
        return found.state, found.attempt

    def ids(self) -> list[str]:
        return [one["InstanceId"] for one in self.ec2.instances()]

    def orders(self) -> list[str]:
        with self.on.client() as client:
            return [one.id for one in client.supply().orders]

    def until_gone(self) -> None:
        self.on.shoal("policy", "set", "fair")  # without a supply
        self.on.until(lambda: not self.ids() and not self.orders(), "all to be given back")
        self.on.until(lambda: not self.machines.running, "machines to be off")
        assert self.ec2.client().describe_volumes()["Volumes"] == []


@pytest.fixture(scope="module")
def here(region: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    region.clear()
    on = On("ec2", tmp_path_factory.mktemp("ec2"))
    on.env = region.env
    machines = Machines(region, on.scratch)
    on.shoal("up", "--port", "0", "--nodes", "0")
    try:
        yield Here(on, region, machines)
    finally:
        on.shoal("down")
        machines.end()


def join_status(here: Here, token: str, name: str, order: str) -> tuple[int, str]:
    """What the head says to a machine that shows this token."""
    spec = {"id": name, "cpu_milli": 1000, "memory_mb": 100, "origin": "lent", "order": order}
    url = json.loads((here.on.home / "controller.json").read_text())["url"]
    body = json.dumps({"spec": spec, "protocol": PROTOCOL}).encode()
    headers = {"Authorization": f"Bearer {token.partition('.')[0]}"}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(f"{url}/v1/join", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, ""
    except HTTPError as error:
        return error.code, error.read().decode()


def test_an_instance_comes_for_a_job_and_its_token_opens_nothing_afterwards(here: Here) -> None:
    here.supply(**SPOT)
    job = here.run("--where", "pool=a", "--", "true")
    here.on.until(lambda: here.state(job)[0] == "succeeded", "the job to succeed")
    (instance,) = here.ids()
    (order,) = here.orders()
    token = settings_in(here.ec2.user_data(instance)).token
    assert token.partition(".")[0] not in (here.on.home / "join-token").read_text()
    for name in ("lent-1", "lent-2"):
        status, said = join_status(here, token, name, order)
        assert status in (401, 422) and '"key":' not in said, said
    rules = (here.machines.folder(instance) / "rules").read_text()
    assert "169.254.169.254 -m owner ! --uid-owner 0 -j REJECT" in rules


def test_a_job_leaves_a_spot_instance_before_it_is_taken_back(here: Here) -> None:
    here.supply(**SPOT)
    job = here.run("--preemptible", "--stop-grace", "1s", "--", *FOR_EVER)
    here.on.until(lambda: here.state(job) == ("running", 1), "the job to run")
    (first,) = here.ids()
    with here.on.client() as client:
        (node,) = client.nodes()
    assert node.labels["ec2.instance"] == first and node.labels["ec2.market"] == "spot"
    assert node.ends_in_ms is not None  # its time is limited
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 20))
    notice = json.dumps({"action": "terminate", "time": moment})
    here.machines.answers[first]["spot/instance-action"] = notice
    here.on.until(lambda: here.state(job) == ("running", 2), "the job to run elsewhere")
    assert "EC2 spot notice: terminate" in here.on.shoal("events", "--job", job)
    before = here.orders()
    here.machines.interrupt(first)
    second = next(one for one in here.ids() if one != first)
    here.machines.interrupt(second)  # without a notice
    here.on.until(lambda: not {*before} & {*here.orders()}, "the end to be seen")
    assert "EC2 took the spot instance back" in here.on.shoal("events")
    here.supply(**SPOT, price=9)  # a supply that was changed is asked at once
    here.on.until(lambda: here.state(job) == ("running", 3), "the job to run again")
    here.on.shoal("cancel", job)
    here.until_gone()


def test_a_controller_that_is_killed_before_the_answer_leaves_nothing_behind(here: Here) -> None:
    def kill() -> None:
        pid = json.loads((here.on.home / "controller.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)

    here.supply()
    here.ec2.lost["RunInstances"], here.ec2.at_loss = 1, kill
    job = here.run("--", "true")
    here.on.until(lambda: here.state(job)[0] == "succeeded", "the job to succeed")
    here.until_gone()
    launched = here.ec2.instances("terminated")
    orders = [
        tag["Value"] for one in launched for tag in one["Tags"] if tag["Key"] == "shoal-order"
    ]
    assert len(orders) == len(set(orders)), "an order was launched twice"
