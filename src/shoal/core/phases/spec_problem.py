"""What is wrong with the spec of a job, as far as that is known without the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.core.features.array import longest_element, sweep_problem
from shoal.model.job import (
    ARGUMENT_BYTES_MAX,
    COMMAND_BYTES_MAX,
    ENV_BYTES_MAX,
    REQUIREMENTS_BYTES_MAX,
    JobSpec,
)
from shoal.model.labels import contradiction
from shoal.model.report import Refused
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.volume import urls_problem, volumes_problem

ENCRYPTED_MAX = 512  # members: each node knows the keys of all others
ASKED_MAX = 256  # values of labels, and taints, of one job: each may make nodes differ


def spec_problem(spec: JobSpec) -> Refused | None:
    """What the types cannot say: bytes that no process can be given."""
    if "\0" in "".join(spec.command):
        return Refused("command", "contains a NUL byte; remove it")
    if not spec.command[0].strip():
        return Refused("command", "begins with an empty word; name a program, e.g. python train.py")
    if spec.package and (spec.workdir.startswith("/") or ".." in spec.workdir.split("/")):
        return Refused("workdir", "must be a folder of the package: relative, and without '..'")
    if spec.volumes and (wrong := volumes_problem(spec.volumes)):
        return Refused("volumes", wrong)
    for field in ("volume_shard", "volume_lazy"):
        names: tuple[str, ...] = getattr(spec, field)
        if names and (wrong := urls_problem(names, spec.volumes)):
            return Refused(field, wrong)
    if spec.image and spec.requirements:
        return Refused("requirements", "cannot be installed in an image; build them into the image")
    if len(spec.requirements.encode("utf-8", "surrogatepass")) > REQUIREMENTS_BYTES_MAX:
        return Refused("requirements", f"is longer than {REQUIREMENTS_BYTES_MAX // 1024} KiB")
    absolute = spec.workdir.startswith("/") or not spec.workdir or spec.package
    if "\0" in spec.workdir or not absolute:
        return Refused(
            "workdir", "must be an absolute path without NUL bytes, e.g. /home/me/project"
        )
    if spec.env and "\0" in "".join(spec.env.values()):
        return Refused("env", "contains a NUL byte; remove it")
    sizes = [len(word.encode("utf-8", "surrogatepass")) for word in spec.command]
    if max(sizes) > ARGUMENT_BYTES_MAX or sum(sizes) > COMMAND_BYTES_MAX:
        limit = (
            f"{COMMAND_BYTES_MAX // 1024} KiB in all and {ARGUMENT_BYTES_MAX // 1024} KiB a word"
        )
        return Refused("command", f"is longer than {limit}; put long input into a file")
    sizes = [
        len(f"{name}={value}".encode("utf-8", "surrogatepass")) for name, value in spec.env.items()
    ]
    if sizes and (max(sizes) > ARGUMENT_BYTES_MAX or sum(sizes) > ENV_BYTES_MAX):
        limit = (
            f"{ENV_BYTES_MAX // 1024} KiB in all and {ARGUMENT_BYTES_MAX // 1024} KiB a variable"
        )
        return Refused("env", f"is larger than {limit}; put large values into a file")
    if spec.sweep is not None:
        return sweep_problem(spec) or spec_problem(longest_element(spec))
    return None


def shape_problem(spec: JobSpec) -> Refused | None:
    """Wishes that contradict each other, whatever the cluster."""
    if spec.gpus and spec.gpu_milli == 0 and not spec.gpu_memory_mb:
        return Refused("gpu_memory_mb", "says how much of a GPU is meant; ask for at least 1")
    if spec.gpus > 1 and spec.gpu_milli < WHOLE_GPU_MILLI:
        return Refused("gpus", "are whole if there are several; ask for at most 1 to get a part")
    if spec.members_per_node and spec.members % spec.members_per_node:
        return Refused(
            "members",
            f"asks for {spec.members}, which is no multiple of {spec.members_per_node} per node",
        )
    if spec.launcher and max(spec.members, spec.members_max) > 1 and spec.members_per_node != 1:
        return Refused("launcher", "starts the processes of a node itself; set members_per_node: 1")
    if spec.encrypt_network and max(spec.members, spec.members_max) > ENCRYPTED_MAX:
        return Refused("encrypt_network", f"works for at most {ENCRYPTED_MAX} members")
    if spec.encrypt_network and spec.launcher:
        return Refused("encrypt_network", "does not go with launcher: its programs meet elsewhere")
    if spec.members > 1 and not spec.launcher and _stands_alone(spec.command):
        return Refused(
            "command",
            "torchrun --standalone waits forever in a gang; leave out --standalone (Shoal tells "
            "torchrun where to meet), or add --nnodes 1 to let each member train alone",
        )
    if (spec.where or spec.together) and (clash := contradiction(spec.demand.where)):
        return Refused("where", f"no node can have both {clash}; one of several values is key=a|b")
    if len(spec.asked) > ASKED_MAX:
        many = f"names {len(spec.asked)} labels, values and taints; the maximum is {ASKED_MAX}"
        return Refused("where", many)
    if spec.spread and spec.spread == spec.together:
        return Refused("spread", f"and together contradict each other: both name {spec.spread}")
    if 0 < spec.members_max < spec.members:
        return Refused("members_max", f"is less than its {spec.members} members")
    return None


def _stands_alone(command: Sequence[str]) -> bool:
    """torchrun --standalone meets at an address of its own, and waits there for as many nodes as
    the gang has members."""
    return any(
        "--standalone" in part
        and "--nnodes" not in part
        and ("torchrun" in part or "torch.distributed.run" in part)
        for part in re.split(r"[;&|\n]", " ".join(command))
    )
