"""The command line of a container, word by word, for each runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.agent.faults import CannotStart
from shoal.agent.images.render import Box, Mount, render
from shoal.agent.images.runtimes import Facts, Gpus, Runtime, find
from shoal.model.commands import Launch, Limits
from shoal.model.job import MemberRef

GOLDEN = Path(__file__).parent / "golden"
OPERATOR = Launch(
    node="n1",
    incarnation=1,
    ref=MemberRef("j7", 1, 0),
    argv=("python", "train.py", "--rate", "0.1"),
    env={},
    workdir="/home/me/project",
    stop_grace_ms=10_000,
    gpus=(2, 3),
    cpu_milli=1500,
    memory_mb=2048,
    image="docker.io/pytorch/pytorch:2.4",
)
TENANT = msgspec.structs.replace(
    OPERATOR, uid=70_001, tenant="red", limits=Limits(processes=500, cpu_hard=True)
)
BOX = Box(
    name="shoal-abc-j7.1.0",
    node="abc",
    env={"CUDA_VISIBLE_DEVICES": "2,3", "TOKEN": "hidden", "RANK": "0"},
    workdir="/home/me/project",
    mounts=(
        Mount("/home/me/project", writable=True),
        Mount('/data/a,b"c', writable=False),
    ),
    folder="/nodes/n1/containers/shoal-abc-j7.1.0",
    image="docker.io/pytorch/pytorch:2.4",
)
ROOT = Facts(
    user=0,
    group=0,
    gpus=Gpus.NAMED,
    files=(1024, 4096),
    processes=(500, 1000),
    memory_mb=8000,
    limits=True,
)
USER = msgspec.structs.replace(ROOT, user=1000, group=100, limits=False)
CASES: dict[str, tuple[str, Facts, Launch, Box]] = {
    "podman-operator": ("podman", ROOT, OPERATOR, BOX),
    "podman-tenant": ("podman", ROOT, TENANT, msgspec.structs.replace(BOX, group="/shoal/j7.1.0")),
    "podman-user": ("podman", USER, OPERATOR, BOX),
    "docker-operator": ("docker", ROOT, OPERATOR, BOX),
    "docker-tenant": ("docker", ROOT, TENANT, BOX),
    "docker-user": ("docker", USER, OPERATOR, BOX),
    "apptainer-user": (
        "apptainer",
        USER,
        OPERATOR,
        msgspec.structs.replace(
            BOX, image="/nodes/n1/images/x.sif", mounts=(Mount("/data", writable=False),)
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_words_are_these(case: str) -> None:
    name, facts, launch, box = CASES[case]
    rendered = render(Runtime(name, (f"/usr/bin/{name}",)), facts, launch, box)
    env = [f"{key}={value}" for key, value in rendered.env.items()]
    parts = [*rendered.words, "", *env, "", rendered.variables]
    text = "\n".join(parts).rstrip() + "\n"
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    assert "hidden" not in " ".join(rendered.words)


def rendered(name: str = "podman", facts: Facts = ROOT, box: Box = BOX, **fields: Any) -> str:
    launch = msgspec.structs.replace(OPERATOR, **fields)
    return " ".join(render(Runtime(name, (name,)), facts, launch, box).words)


def test_a_node_without_a_driver_gives_no_devices() -> None:
    """Its GPUs exist only as numbers, for tests and demonstrations."""
    facts = msgspec.structs.replace(ROOT, gpus=Gpus.NONE)
    for name in ("podman", "docker", "apptainer"):
        words = rendered(name, facts, msgspec.structs.replace(BOX, mounts=()))
        assert not any(flag in words for flag in ("--device", "--gpus", "--nv"))


def test_gpus_that_containers_cannot_get_are_a_clear_reason() -> None:
    facts = msgspec.structs.replace(ROOT, gpus=Gpus.UNNAMED)
    with pytest.raises(CannotStart, match="nvidia-ctk cdi generate"):
        rendered(facts=facts)
    assert "--device" not in rendered(facts=facts, gpus=())


def test_a_share_of_a_gpu_names_the_gpu_and_not_its_number_in_the_daemon() -> None:
    box = msgspec.structs.replace(BOX, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert "--device=nvidia.com/gpu=3" in rendered(box=box, gpus=(3,), gpu_milli=500)


def test_a_gang_of_containers_has_its_gpus_on_the_node_and_each_member_its_own_number() -> None:
    """NVLink is found only between GPUs that the container has; others stay outside."""
    env = {"CUDA_VISIBLE_DEVICES": "3", "SHOAL_JOB_GPUS": "1,3,10"}
    box = msgspec.structs.replace(BOX, env=env)
    launch = msgspec.structs.replace(OPERATOR, env=env, gpus=(3,))
    found = render(Runtime("podman", ("podman",)), ROOT, launch, box)
    given = [word for word in found.words if word.startswith("--device=nvidia.com")]
    assert given == [f"--device=nvidia.com/gpu={gpu}" for gpu in (1, 3, 10)]
    assert "CUDA_VISIBLE_DEVICES=1" in found.variables.splitlines()


@pytest.mark.parametrize(
    ("name", "uid"), [("LD_PRELOAD", 0), ("PATH", 0), ("CONTAINERS_CONF", 0), ("NOTES", 70_001)]
)
def test_a_variable_of_several_lines_must_not_steer_the_runtime(name: str, uid: int) -> None:
    box = msgspec.structs.replace(BOX, env={name: "/tmp/evil\n"})
    with pytest.raises(CannotStart, match=f"env: {name} has several lines"):
        rendered(box=box, uid=uid)


def test_apptainer_runs_nothing_of_a_tenant_that_is_kept_apart() -> None:
    with pytest.raises(CannotStart, match="cannot keep tenants apart"):
        rendered("apptainer", uid=70_001)


def test_the_first_runtime_in_the_path_is_used_unless_the_node_says_which(tmp_path: Path) -> None:
    def has(*names: str) -> dict[str, str]:
        for name in names:
            (tmp_path / name).touch(mode=0o755)
        return {"PATH": str(tmp_path)}

    assert find(has()) is None
    assert find(has("apptainer")) == Runtime("apptainer", (f"{tmp_path}/apptainer",))
    assert find(has("docker")) == Runtime("docker", (f"{tmp_path}/docker",))
    path = has("podman")
    assert find(path) == Runtime("podman", (f"{tmp_path}/podman",))
    chosen = find({**path, "SHOAL_CONTAINERS": "docker --host unix:///x"})
    assert chosen == Runtime("docker", (f"{tmp_path}/docker", "--host", "unix:///x"))
    assert find({**path, "SHOAL_CONTAINERS": "none"}) is None
