"""Requests: accepted, or refused with the field at fault and what would work."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.answers.why import explain
from shoal.core.phases.reserved import reserved
from shoal.core.phases.spec_problem import shape_problem, spec_problem
from shoal.model.job import ARGUMENT_BYTES_MAX, JobSpec
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, Submit
from tests.core.build import Cluster, examples, job_spec


def cluster_of(nodes: list[tuple[int, int, int]]) -> Cluster:
    """Nodes with so many GPUs, CPUs and megabytes."""
    cluster = Cluster()
    for number, (gpus, cpus, memory_mb) in enumerate(nodes):
        cluster.join(f"n{number}", gpus=gpus, cpus=cpus, memory_mb=memory_mb)
    return cluster


def refusal(cluster: Cluster, **fields: object) -> Refused:
    answer = cluster.ask(Submit(job_spec(**fields)))
    assert isinstance(answer, Refused), answer
    return answer


def test_before_any_node_is_known_every_size_may_be_possible() -> None:
    assert Cluster().submit(gpus=200, members=9)


@pytest.mark.parametrize(
    ("fields", "field", "advice"),
    [
        ({"gpus": 9}, "gpus", "ask for at most 8"),
        ({"cpu_milli": 99_000}, "cpus", "ask for at most 32"),
        ({"memory_mb": 9_999}, "memory", "ask for at most 4000"),
        ({"gpus": 4, "members": 4}, "members", "ask for at most 2"),
        ({"gpus": 8, "memory_mb": 4_000}, "gpus", "the rest do not fit together on any node"),
        (
            {"cpu_milli": 32_000, "memory_mb": 4_000},
            "cpus",
            "the rest do not fit together on any node",
        ),
    ],
)
def test_what_can_never_start_is_refused_with_what_could(
    fields: dict[str, int], field: str, advice: str
) -> None:
    cluster = cluster_of([(8, 32, 1_000), (0, 16, 4_000)])
    refused = refusal(cluster, **fields)
    assert refused.field == field
    assert advice in refused.message
    assert cluster.state.jobs == {}


SIZES = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 32), st.integers(1, 4_000)), min_size=1, max_size=4
)
FIELD_OF = {"gpus": ("gpus", 1), "cpus": ("cpu_milli", 1000), "memory": ("memory_mb", 1)}


@examples
@given(
    nodes=SIZES,
    gpus=st.integers(0, 12),
    cpu_milli=st.integers(0, 40_000),
    memory_mb=st.integers(0, 5_000),
    members=st.integers(1, 60),
)
def test_whoever_follows_the_advice_is_accepted(
    nodes: list[tuple[int, int, int]], gpus: int, cpu_milli: int, memory_mb: int, members: int
) -> None:
    cluster = cluster_of(nodes)
    spec = job_spec(gpus=gpus, cpu_milli=cpu_milli, memory_mb=memory_mb, members=members)
    for _ in range(6):  # at most one advice for each field, and one for a whole node
        answer = cluster.ask(Submit(spec))
        if isinstance(answer, Accepted):
            return
        assert isinstance(answer, Refused)
        spec = follow(spec, answer)
    raise AssertionError(f"{nodes}: still refused: {answer}")


def follow(spec: JobSpec, refused: Refused) -> JobSpec:
    if advice := re.search(r"ask for at most ([0-9.]+)", refused.message):
        name, unit = FIELD_OF.get(refused.field, (refused.field, 1))
        best = int(float(advice[1]) * unit)
        assert best < getattr(spec, name)
        return msgspec.structs.replace(spec, **{name: best})
    largest = re.search(r"the largest node has (.*)", refused.message)
    assert largest is not None, refused
    return _as_large_as(spec, largest[1])


def _as_large_as(spec: JobSpec, text: str) -> JobSpec:
    """The size of a node as the message writes it."""
    size = {"gpus": 0, "cpu_milli": 0, "memory_mb": 0}
    for part in text.split(", "):
        number, unit = part.split()
        name = {"GPU": "gpus", "CPU": "cpu_milli", "MB": "memory_mb"}[unit.rstrip("s")]
        size[name] = int(float(number) * (1000 if name == "cpu_milli" else 1))
    return msgspec.structs.replace(spec, **size)


def test_lost_and_cordoned_nodes_count_for_they_may_come_back() -> None:
    cluster = cluster_of([(8, 8, 100)])
    cluster.learn_gone("n0")
    assert cluster.node("n0").health is NodeHealth.LOST
    assert cluster.submit(gpus=8)


def test_a_removed_node_does_not_count() -> None:
    cluster = cluster_of([(8, 8, 100), (2, 8, 100)])
    cluster.learn_gone("n0")
    cluster.intend("n0", NodeIntent.REMOVED)
    assert "at most 2" in refusal(cluster, gpus=4).message
    cluster.reboot("n0")
    cluster.hear("n0")
    assert cluster.submit(gpus=4)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"command": ["a\0b"]}, "command"),
        ({"command": [" "]}, "command"),
        ({"command": ["é" * (ARGUMENT_BYTES_MAX // 2 + 1)]}, "command"),
        ({"command": ["x" * 100_000] * 6}, "command"),
        ({"workdir": "relative/path"}, "workdir"),
        ({"workdir": "/nul\0"}, "workdir"),
        ({"env": {"A": "x\0"}}, "env"),
        ({"env": {"A": "é" * (ARGUMENT_BYTES_MAX // 2)}}, "env"),
        ({"env": {f"A{n}": "x" * 100_000 for n in range(6)}}, "env"),
    ],
)
def test_what_no_process_can_be_given_is_refused(fields: dict[str, object], field: str) -> None:
    refused = spec_problem(job_spec(**fields))
    assert refused is not None
    assert refused.field == field


def test_an_ordinary_command_has_no_problem() -> None:
    spec = job_spec(command=["python", "-c", "print('é')"], workdir="/tmp", env={"A": ""})
    assert spec_problem(spec) is None


@pytest.mark.parametrize(
    ("command", "members", "refused"),
    [
        (["torchrun", "--standalone", "train.py"], 2, True),
        (["python", "-m", "torch.distributed.run", "--standalone", "x.py"], 2, True),
        (["sh", "-c", "cd x && torchrun --nproc-per-node=2 --standalone x.py"], 2, True),
        (["torchrun", "--standalone", "train.py"], 1, False),
        (["torchrun", "--standalone", "--nnodes=1", "train.py"], 2, False),
        (["torchrun", "train.py"], 2, False),
        (["sh", "-c", "torchrun x.py; other --standalone"], 2, False),
    ],
)
def test_a_torchrun_that_would_wait_for_ever_is_refused(
    command: list[str], members: int, refused: bool
) -> None:
    found = shape_problem(job_spec(command=command, members=members))
    assert (found is not None) == refused
    assert found is None or "leave out --standalone" in found.message


@pytest.mark.parametrize(
    "name", ["SHOAL_SERVICE", "SHOAL_REF", "RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"]
)
def test_names_that_shoal_gives_a_meaning_are_refused(name: str) -> None:
    refused = reserved({"MINE": "1", name: "x"}, replica=False)
    assert refused is not None
    assert refused.field == "env"
    assert name in refused.message
    assert "leave it out" in refused.message


def test_what_a_job_may_say_of_itself_is_its_own() -> None:
    own = {"SHOAL_CHECKPOINT_DIR": "/data", "SHOAL_MTBF_S": "60", "HOST": "::", "PORT": "80"}
    assert reserved(own, replica=False) is None
    refused = reserved({"PORT": "80"}, replica=True)
    assert refused is not None
    assert "PORT" in refused.message


def test_a_reserved_name_is_refused_at_submission() -> None:
    assert "SHOAL_SERVICE" in refusal(Cluster(), env={"SHOAL_SERVICE": "x"}).message


def test_the_same_key_is_the_same_job() -> None:
    cluster = Cluster()
    submit = Submit(job_spec(), key="mine")
    first, again = cluster.ask(submit), cluster.ask(submit)
    assert first == Accepted("j1")
    assert again == Accepted("j1", "this submission was already accepted")
    assert len(cluster.state.jobs) == 1


def test_asking_for_what_is_already_so_is_accepted_with_a_note() -> None:
    cluster = cluster_of([(1, 8, 100)])
    job_id = cluster.run()
    cluster.cancel(job_id)
    assert cluster.cancel(job_id) == Accepted(job_id, "already being cancelled")
    assert cluster.last.events == []
    assert cluster.intend("n0", NodeIntent.OPEN) == Accepted("n0", "it is already open")


def test_what_does_not_exist_is_said_to_be_missing() -> None:
    cluster = Cluster()
    for answer in (cluster.cancel("j5"), cluster.intend("n7", NodeIntent.CORDONED)):
        assert isinstance(answer, Refused)
        assert answer.missing


# -- wishes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gpus": 1, "gpu_milli": 0}, "gpu_memory_mb"),
        ({"gpus": 2, "gpu_milli": 500}, "gpus"),
        ({"gpus": 2, "gpu_milli": 0, "gpu_memory_mb": 1}, "gpus"),
        ({"members": 3, "members_per_node": 2}, "members"),
        ({"members": 3, "members_max": 2}, "members_max"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused_on_any_cluster(
    fields: dict[str, int], field: str
) -> None:
    assert refusal(Cluster(), **fields).field == field


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"within": "node"}, 2),
        ({"within": "rack"}, 4),
        ({"within": "block"}, 6),
        ({"within": "rack", "members_per_node": 1}, 2),
        ({"gpu_models": ["new"]}, 2),
        ({"gpu_memory_mb": 41}, 2),
        ({"gpu_milli": 0, "gpu_memory_mb": 20}, 20),
        ({}, 8),
    ],
)
def test_what_no_rack_or_no_such_gpu_ever_holds_is_refused(
    fields: dict[str, object], most: int
) -> None:
    """Found by reading: it was accepted, and the queue was held for it forever."""
    cluster = Cluster()
    for name, place in (("a", "b/r"), ("b", "b/r"), ("c", "b/s")):
        cluster.join(name, gpus=2, place=place, gpu_model="old", gpu_memory_mb=40)
    cluster.join("d", gpus=2, gpu_model="new", gpu_memory_mb=80)
    wish: dict[str, object] = {"gpus": 1, "cpu_milli": 0, "within_required": True, **fields}
    refused = refusal(cluster, **wish, members=most + most % 2 + 2)
    assert refused.field == "members"
    assert f"ask for at most {most}" in refused.message
    assert cluster.submit(**wish, members=most)


def test_an_image_is_refused_where_no_node_can_run_one() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    refused = refusal(cluster, image="work:1")
    assert refused.field == "image"
    assert "install podman, docker or apptainer" in refused.message
    cluster.join("b", containers="podman")
    job = cluster.submit(image="work:1")
    assert [member.slice.node for member in cluster.job(job).members] == ["b"]
    assert refusal(cluster, image="work:1", requirements="numpy").field == "requirements"
    assert "can run images" in refusal(cluster, image="work:1", gpus=1).message


def test_a_job_with_an_image_waits_for_a_node_that_can_run_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.join("b", containers="podman")
    cluster.intend("b", NodeIntent.CORDONED)
    job = cluster.job(cluster.submit(image="work:1"))
    why = render(explain(cluster.state, job, cluster.policy, cluster.now_ms))
    assert "no node can run images" in why
    assert "b is cordoned" in why
    cluster.intend("b", NodeIntent.OPEN)
    assert [member.slice.node for member in job.members] == ["b"]


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("work", True),
        ("docker.io/pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime", True),
        ("registry.lab:5000/team/train@sha256:" + "0" * 64, True),
        ("/images/train.sif", True),
        ("--privileged", False),
        ("dir:work", False),
        ("oci-archive:/root/x.tar", False),
        ("work\n", False),
        ("a b", False),
        ("../work", False),
    ],
)
def test_an_image_has_a_plain_name(name: str, good: bool) -> None:
    if good:
        assert job_spec(image=name).image == name
    else:
        with pytest.raises(msgspec.ValidationError):
            job_spec(image=name)


@pytest.mark.parametrize(
    "variable", ["SHOAL_REF", "SHOAL_NODE_DIR", "RANK", "CUDA_VISIBLE_DEVICES"]
)
def test_a_secret_cannot_take_the_place_of_what_shoal_sets(variable: str) -> None:
    refused = refusal(Cluster(), secrets=(f"token={variable}",))
    assert refused == Refused("secrets", f"token cannot be in {variable}: Shoal sets it itself")


@pytest.mark.parametrize("second", ["token", "other=/token"])
def test_two_secrets_are_not_in_one_file(second: str) -> None:
    refused = refusal(Cluster(), secrets=("token", second))
    assert refused == Refused("secrets", "two of them are to be in the file token")


@pytest.mark.parametrize(
    "fields", [{"env": {"A": "1"}, "secrets": ("x=A",)}, {"secrets": ("y", "y=A", "x=A")}]
)
def test_a_variable_is_set_once(fields: dict[str, object]) -> None:
    refused = refusal(Cluster(), **fields)
    assert refused == Refused("secrets", "x is to be in A, which is already set")
