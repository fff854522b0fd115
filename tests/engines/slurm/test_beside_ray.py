"""Two engines in one cluster: nodes of a real Slurm beside nodes of a real Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.ray import RealRay, real_ray
from harness.slurm import Slurm

from tests.engines.slurm.site import Site, site
from tests.needs import need

need("ray")

FOR_EVER = "exec sleep 600"
# Each member tells the other where it runs.
MEET = """
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def met():
    if os.environ["RANK"] == "0":
        return socket.create_server(place).accept()[0]
    while True:
        try:
            return socket.create_connection(place)
        except OSError:
            time.sleep(0.1)
with met() as other:
    other.sendall(os.environ["SHOAL_NODE"].encode())
    other.shutdown(socket.SHUT_WR)
    print(os.environ["SHOAL_NODE"], "met", other.makefile().read(), flush=True)
"""


@pytest.fixture
def ray() -> Iterator[RealRay]:
    with real_ray(cpus=1) as made:
        yield made


@pytest.fixture
def there(real: Slurm, ray: RealRay) -> Iterator[Site]:
    """In the end, both engines have got their machines back."""
    with site(real, as_root=True) as made:  # as Ray: others may not use its sockets
        yield made
        if live := [job["id"] for job in made.json("ps")]:
            made.shoal("cancel", *live)
        supply(made, ray, most=0)
        made.until("no order to be left", lambda: not made.json("supply")["orders"])
        made.until("nothing to be held", lambda: not made.slurm_jobs() + ray.holders())


def supply(there: Site, ray: RealRay, most: int) -> None:
    batch: dict[str, object] = {"name": "batch", "engine": "slurm"}
    lent: dict[str, object] = {"name": "lent", "engine": "ray", "address": ray.address}
    lent |= {"token_file": str(ray.token_file), "folder": str(there.home / "nodes")}
    own: dict[str, object] = {"cpus": 1, "most": most, "idle": "10m"}
    there.supplies(batch | own, lent | own)


@pytest.mark.soak  # a Ray takes half a minute to start
@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_jobs_run_on_slurm_and_on_ray_and_then_one_gang_on_both(there: Site, ray: RealRay) -> None:
    supply(there, ray, most=1)
    first = there.run(FOR_EVER)
    there.until_job(first, "running")
    second = there.run(FOR_EVER)
    there.until_job(second, "running")
    assert (there.job(first)["nodes"], there.job(second)["nodes"]) == (["batch-1"], ["lent-1"])
    origins = {node["id"]: node["origin"] for node in there.json("nodes")}
    assert origins == {"batch-1": "batch", "lent-1": "lent"}
    assert len(there.slurm_jobs()) == len(ray.holders()) == 1

    (there.home / "meet.py").write_text(MEET)
    gang = there.run(f"exec {there.python} {there.home}/meet.py", "-n", "2")
    assert there.job(gang)["state"] == "waiting"
    there.shoal("cancel", first, second)
    assert there.until_job(gang, "succeeded", "failed")["state"] == "succeeded"
    said = there.shoal("logs", gang)
    assert "batch-1 met lent-1" in said and "lent-1 met batch-1" in said, said

    reports = {by: there.json("report", "--by", by) for by in ("node", "job")}
    used = {
        by: {row["key"] for row in report["rows"] if row["account"] == "useful"}
        for by, report in reports.items()
    }
    assert used == {"node": {"batch-1", "lent-1"}, "job": {first, second, gang}}
    for report in reports.values():
        assert sum(row["gpu_us"] for row in report["rows"]) == report["capacity_gpu_us"]
