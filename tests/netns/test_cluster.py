"""A cluster of four hosts keeps its promises when links between them do not."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.hosts import Host, Net
from harness.waiting import WAIT_S

from shoal.model.job import JobSpec
from shoal.model.node import NodeIntent
from shoal.model.service import Probe, Route, Scale, ServiceSpec
from shoal.model.views import ServiceView
from tests.netns.cluster import POLICY, SHOAL, Cluster

HERE = Path(__file__).parent
GANG = f"exec {sys.executable} {HERE / 'gang.py'}"
LONG_STEPS = 160  # eight seconds and more: links are silent by then
NAMES = ("n1", "h1", "h2", "h3")


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    made = Cluster(net, NAMES[1:])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _as_new(cluster: Cluster) -> Iterator[None]:
    """Each test begins with all hosts ready, and leaves none cut off."""
    cluster.until(lambda: cluster.ready() == set(NAMES), "not all hosts are ready")
    yield
    for host in cluster.hosts.values():
        host.mend()
    for job in cluster.ask(lambda client: client.jobs()):
        cluster.ask(lambda client, id_=job.id: client.cancel(id_))  # type: ignore[misc]
    (cluster.shared / "finish").unlink(missing_ok=True)
    cluster.ask(lambda client: client.set_policy(POLICY))
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.OPEN))


def start_gang(cluster: Cluster) -> str:
    """Over three hosts that are not the head; returns when they take steps together."""
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.CORDONED))
    job = cluster.submit(GANG, members=3, gpus=1, restart="on-node-loss")
    cluster.wait(job, "running")
    steps_go_on(cluster, job)
    return job


def steps_go_on(cluster: Cluster, job: str, count: int = 5) -> None:
    goal = len(cluster.lines(f"{job}.steps")) + count
    cluster.until(lambda: len(cluster.lines(f"{job}.steps")) > goal, f"{job} does not go on")


def finish(cluster: Cluster, job: str) -> list[str]:
    """Let it end; returns the attempt that took each step. None is missing, none is there twice."""
    (cluster.shared / "finish").touch()
    assert cluster.wait(job).state == "succeeded", cluster.story()
    steps = cluster.lines(f"{job}.steps")
    assert [int(step) for _, step in steps] == list(range(len(steps)))
    return [attempt for attempt, _ in steps]


def of_attempt(host: Host, job: str, attempt: int) -> bool:
    """Do processes of this attempt live on the host, whoever knows of them?"""
    script = f"grep -lz '^SHOAL_REF={job}[.]{attempt}[.]' /proc/[0-9]*/environ 2>/dev/null"
    return bool(host.run("sh", "-c", script).stdout)


def test_a_gang_whose_link_is_cut_goes_on_elsewhere_and_never_twice(cluster: Cluster) -> None:
    job = start_gang(cluster)
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.OPEN))
    cut_off = cluster.hosts[cluster.job(job).gang[1].node]
    cut_off.cut()
    cluster.until(lambda: cluster.job(job).attempt == 2, "it was not healed")
    assert cluster.wait(job, "running").attempt == 2
    assert cut_off.name not in {member.node for member in cluster.job(job).gang}
    steps_go_on(cluster, job)
    assert of_attempt(cut_off, job, 1), "its processes do not know that they were given up"
    cut_off.mend()
    cluster.until(lambda: cut_off.name in cluster.ready(), "it does not come back")
    assert not of_attempt(cut_off, job, 1)
    steps_go_on(cluster, job)
    assert set(finish(cluster, job)) == {"1", "2"}
    done = cluster.job(job)
    assert (done.attempt, done.losses) == (2, 1)


def test_a_head_that_is_cut_off_disturbs_nobody(cluster: Cluster) -> None:
    patient = msgspec.structs.replace(POLICY, grace_ms=600_000)
    cluster.ask(lambda client: client.set_policy(patient))
    job = start_gang(cluster)
    cluster.head.cut()
    cluster.until(lambda: cluster.ready() <= {"n1"}, "it still hears of them")
    steps_go_on(cluster, job, count=LONG_STEPS)
    cluster.head.mend()
    cluster.until(lambda: cluster.ready() == {*NAMES[1:]}, "they do not come back")
    steps_go_on(cluster, job)
    assert set(finish(cluster, job)) == {"1"}


def test_output_is_whole_over_a_slow_link_and_one_that_loses_packets(cluster: Cluster) -> None:
    cluster.hosts["h1"].slow("4mbit")
    cluster.hosts["h2"].lose(0.2)
    job = cluster.submit("seq 1 50000", members=4, gpus=1)
    assert cluster.wait(job).state == "succeeded"
    wanted = "".join(f"{number}\n" for number in range(1, 50_001)).encode()
    for member in range(4):
        assert cluster.output(job, member) == wanted
    assert cluster.hosts["h1"].held_up() > 0
    assert cluster.hosts["h2"].lost_packets() > 0


WORK = """
import os, pathlib, time, beside

met = pathlib.Path("SHARED")

def work(value):
    (met / os.environ["SHOAL_NODE"]).touch()
    while len(list(met.iterdir())) < 4:  # else the first to start might do it all
        time.sleep(0.05)
    time.sleep(0.05)
    return [beside.double(value), os.environ["SHOAL_NODE"], os.getcwd()]
"""


def test_code_and_inputs_travel_to_all_hosts_and_a_map_survives_a_link_that_is_cut(
    cluster: Cluster, tmp_path: Path
) -> None:
    met = cluster.shared / "met"
    met.mkdir()
    (tmp_path / "work.py").write_text(WORK.replace("SHARED", str(met)))
    (tmp_path / "beside.py").write_text("def double(value): return 2 * value")
    (tmp_path / "inputs").write_text("".join(f"{number}\n" for number in range(600)))
    out, part = cluster.shared / "out", cluster.shared / "out.part"
    script = f'cd {tmp_path} && exec "$@" map work.py:work inputs -o {out} --cluster -n 4 -g 1'
    mapping = cluster.head.start("sh", "-c", script, "sh", *SHOAL)
    cluster.until(lambda: part.exists() and '"h1"' in part.read_text(), "h1 has no results")
    cluster.hosts["h1"].cut()
    assert mapping.wait(WAIT_S) == 0, "see the head's log"
    lines = [msgspec.json.decode(line) for line in out.read_text().splitlines()]
    assert [value for value, _, _ in lines] == [2 * number for number in range(600)]
    assert {node for _, node, _ in lines} == set(NAMES)
    assert len({place for _, _, place in lines}) == 4, "each host has its own copy"
    cluster.until(lambda: not cluster.ask(lambda client: client.jobs()), "its job lingers")


def test_replicas_on_three_hosts_answer_at_one_url(cluster: Cluster) -> None:
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.CORDONED))
    replica = JobSpec(command=(sys.executable, str(HERE / "server.py")), gpus=1)
    spec = ServiceSpec(
        name="where",
        replica=replica,
        scale=Scale(least=3, most=3),
        probe=Probe(path="/"),
        route=Route(service="where"),
    )
    cluster.ask(lambda client: client.submit_service(spec))
    cluster.until(lambda: view(cluster).ready == 3, "not all replicas are ready")
    seen: set[str] = set()
    cluster.until(lambda: seen.add(get(cluster)) or seen == {*NAMES[1:]}, "not all answer")  # type: ignore[func-returns-value]
    cluster.hosts["h3"].cut()
    for _ in range(100):
        assert get(cluster) in NAMES
    cluster.until(lambda: view(cluster).ready < 3, "a replica that nobody reaches counts as ready")
    assert {get(cluster) for _ in range(20)} == {"h1", "h2"}
    cluster.ask(lambda client: client.stop_service("where"))


def view(cluster: Cluster) -> ServiceView:
    return cluster.ask(lambda client: client.service("where"))


def get(cluster: Cluster) -> str:
    url = urlsplit(view(cluster).url)
    with cluster.head.network():
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        connection.request("GET", url.path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
    assert answer.status == 200, f"{answer.status}: {body}"
    return body
