"""Code that travels, in a real cluster: sent once per node, and through the controller's death."""

from __future__ import annotations

import time
from pathlib import Path

from harness.waiting import until

from shoal.link.packing import pack
from tests.live.cluster import Live, live_cluster

LARGE = 64 << 20


def send(live: Live, folder: Path) -> str:
    package = pack(folder)
    with package.file as file:
        live.client.send_package(package.sha256, package.size, file)
    return package.sha256


def test_a_gang_gets_its_code_on_each_node_once(tmp_path: Path) -> None:
    (tmp_path / "code.sh").write_text("echo $SHOAL_NODE $PWD")
    with live_cluster(nodes=2, gpus=0) as live:
        sha = send(live, tmp_path)
        spec = live.spec(
            "sh", "code.sh", package=sha, members=4, members_per_node=2, cpu_milli=1000
        )
        job = live.client.submit(spec).id
        assert live.wait(job) == "succeeded", live.client.job(job).why
        places = {live.output(job, member) for member in range(4)}
        assert places == {
            f"{node} {live.home.node(node)}/packages/{sha}\n" for node in ("n1", "n2")
        }
        again = live.client.submit(spec).id
        assert live.wait(again) == "succeeded"
        for node in ("n1", "n2"):
            log = (live.home.node(node) / "agent.log").read_text()
            assert log.count(f"package {sha[:12]} is here") == 1


def test_a_controller_killed_while_it_sends_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "code.sh").write_text("stat -c %s ballast")
    with (tmp_path / "ballast").open("wb") as file:
        file.truncate(LARGE)
    with live_cluster(nodes=1, gpus=0) as live:
        sha = send(live, tmp_path)
        part = live.home.node("n1") / "packages" / f".{sha}.blocks" / "parts" / "0"
        job = live.client.submit(live.spec("sh", "code.sh", package=sha)).id
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_blocks * 512 < 1 << 20:  # they come in any order
            assert time.monotonic() < deadline
        live.kill_controller()
        had = part.stat().st_blocks * 512
        assert had < LARGE, "it was killed too late for this test to tell anything"
        until(lambda: live.client.job(job).state in ("starting", "succeeded"))
        assert live.wait(job, timeout_s=120) == "succeeded", live.client.job(job).why
        assert live.output(job) == f"{LARGE}\n"
        view = live.client.job(job)
        assert (view.attempt, view.failures, view.losses) == (1, 0, 0)
        log = (live.home.node("n1") / "agent.log").read_text()
        assert log.count(f"fetching package {sha[:12]} from byte 0") == 1


def test_while_code_is_fetched_the_job_is_starting_and_why_says_so(tmp_path: Path) -> None:
    with (tmp_path / "ballast").open("wb") as file:
        file.truncate(LARGE)
    with live_cluster(nodes=1, gpus=0) as live:
        sha = send(live, tmp_path)
        job = live.client.submit(live.spec("true", package=sha)).id
        seen: set[tuple[str, str]] = set()
        deadline = time.monotonic() + 60
        while live.client.job(job).finished_ms is None and time.monotonic() < deadline:
            why = live.client.why(job)
            seen.add((why.state, why.why.partition(":")[0]))
        doing = {text for state, text in seen if state == "starting" and text.startswith("n1 ")}
        assert doing & {
            "n1 is requesting its working directory",
            "n1 is fetching its working directory",
            "n1 is unpacking its working directory",
        }, seen
