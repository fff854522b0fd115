"""A mount that does not answer keeps jobs that need it from its node, and nothing else."""

from __future__ import annotations

from shoal.core.answers.why import explain
from shoal.model.job import Fault, MemberRef, Phase
from shoal.model.report import Hung
from tests.core.build import Cluster

MNT_DATA = Hung("/mnt/data")
DATA = {"gpus": 1, "volumes": ("/mnt/data/imagenet:data:ro",)}


def cluster(*nodes: str) -> Cluster:
    made = Cluster()
    for name in nodes:
        made.join(name, gpus=8)
    return made


def hang(made: Cluster, *nodes: str, hung: Hung | None = MNT_DATA) -> None:
    for name in nodes:
        made.books[name].hangs = (hung,) if hung is not None else ()
    made.hear(*nodes)


def why(made: Cluster, job: str) -> str:
    return explain(made.state, made.job(job), made.policy, made.now_ms)


def places(made: Cluster, job: str) -> set[str]:
    return {member.slice.node for member in made.job(job).members}


def test_jobs_that_need_the_mount_go_elsewhere_and_others_do_not_care() -> None:
    made = cluster("a", "b")
    hang(made, "a")
    assert all(places(made, made.submit(**DATA)) == {"b"} for _ in range(3))
    assert all(places(made, made.submit(gpus=1, workdir="/mnt/data")) == {"b"} for _ in range(2))
    assert "a" in {node for _ in range(6) for node in places(made, made.submit(gpus=1))}


def test_a_job_waits_with_a_reason_and_starts_when_the_mount_answers() -> None:
    made = cluster("a", "b")
    hang(made, "a", "b")
    job = made.submit(**DATA)
    made.wait(65_000)
    hang(made, "a", "b")
    assert made.job(job).phase is Phase.WAITING
    assert "a: /mnt/data has not answered for 1m 5s" in why(made, job)
    hang(made, "b", hung=None)
    assert places(made, job) == {"b"}


def test_a_link_to_the_mount_counts_by_the_name_that_the_job_gave_it() -> None:
    made = cluster("a", "b")
    hang(made, "a", hung=Hung("/mnt/nfs", "/data"))
    assert places(made, made.submit(gpus=1, volumes=("/data/x:data",))) == {"b"}
    hang(made, "a", "b", hung=Hung("/mnt/nfs", "/data"))
    waits = made.submit(gpus=1, volumes=("/data:data",))
    assert "/mnt/nfs has not answered" in why(made, waits)
    assert places(made, made.submit(gpus=1, volumes=("/database:data",)))


def test_without_the_folder_of_checkpoints_nothing_starts_there() -> None:
    made = cluster("a", "b")
    hang(made, "a", hung=Hung("/scratch", whole=True))
    assert all(places(made, made.submit(gpus=1)) == {"b"} for _ in range(3))


def test_a_running_job_says_which_mount_it_waits_for_and_is_left_alone() -> None:
    made = cluster("a")
    job = made.run(**DATA)
    hang(made, "a")
    assert made.job(job).phase is Phase.RUNNING
    assert "a: /mnt/data has not answered" in why(made, job)
    hang(made, "a", hung=None)
    assert "answered" not in why(made, job)


def test_a_member_that_could_not_start_there_is_tried_elsewhere_without_using_up_a_retry() -> None:
    made = cluster("a", "b")
    job = made.submit(**DATA)
    (node,) = places(made, job)
    (other,) = {"a", "b"} - {node}
    made.deliver()
    ref = MemberRef(job, 1, 0)
    made.books[node].exited(ref, 127, "/mnt/data does not answer since 14:02", fault=Fault.HANGS)
    hang(made, node)
    made.wait(60_000)
    assert places(made, job) == {other}
    assert made.job(job).failures == 0
    assert made.node(node).record.standing.value == "ok", "it is not the node's own fault"
