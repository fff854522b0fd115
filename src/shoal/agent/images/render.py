"""A container's command line, for each runtime. Pure: the same launch gives the same words.

Values of variables are never among the words, because every user of a machine can read those: they
are in a file in memory (`variables`), or in the environment of the command.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from shoal.agent.confine.rdma import INSIDE
from shoal.agent.faults import CannotStart
from shoal.agent.images.runtimes import Facts, Gpus, Runtime
from shoal.agent.shares import PIPES
from shoal.model.commands import Launch
from shoal.model.job import Fault
from shoal.model.node import JOB_GPUS
from shoal.model.resources import WHOLE_GPU_MILLI

LABEL = "shoal.node"  # on every container of a node: which node
VARIABLES = "--env-file"  # this word is to be completed with the path of the file
GPUS_ENV = "CUDA_VISIBLE_DEVICES"
UNLIMITED = -1
# Docker's client has codes of its own (125 to 127) that the command may end with, too. What failed
# is asked before the container is removed; what ended well costs nothing more. `trap`: the shell
# goes on when its process group gets SIGTERM, and the client, whom that is for, passes it on.
DOCKER_RUN = 'trap : TERM; "$@"; code=$?; [ $code = 0 ] || {{ {ask}; }} >{state} 2>&1; exit $code'
DOCKER_STATE = "{{.State.StartedAt}} {{.State.OOMKilled}}"
NEVER = "0001-"  # a container that was made and never started has begun in this year
NOT_APART = "apptainer cannot keep tenants apart: install podman or docker on this node"
NO_CDI = (
    "containers cannot get this node's GPUs: install nvidia-container-toolkit and run "
    "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
)


class Mount(NamedTuple):
    """A folder of the node, at the same path in the container."""

    path: str
    writable: bool


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A container to be: its name, the node's mark, what it sees, and where its ids are written."""

    name: str
    node: str
    env: Mapping[str, str]
    workdir: str
    mounts: Sequence[Mount]
    folder: str
    image: str  # as the runtime knows it
    group: str = ""  # the cgroup to be in, if the agent has made one
    cards: Sequence[str] = ()  # files of InfiniBand and RoCE cards that it may open


class Rendered(NamedTuple):
    """One of the `words` may be VARIABLES; `env` comes on top of the agent's own."""

    words: list[str]
    env: dict[str, str]
    variables: str


def render(runtime: Runtime, facts: Facts, launch: Launch, box: Box) -> Rendered:
    if runtime.name == "apptainer":
        return _apptainer(runtime, facts, launch, box)
    gpus = _visible(launch, box.env) if facts.gpus is not Gpus.NONE else []
    env = {**box.env}
    if gpus:  # the container has no others, so they count from 0
        gpus, env[GPUS_ENV] = _with_peers(launch, gpus)
    apart = launch.uid > 0
    variables, lines = _variables(env, apart=apart)
    podman = runtime.name == "podman"
    words = [
        *([] if podman else _docker_shell(runtime, box)),
        *runtime.command,
        *(["--cgroup-manager=cgroupfs"] if box.group else []),
        "run",  # without --rm, which can come before anyone has read how it ended
        "--pull=never",
        f"--name={box.name}",
        f"--label={LABEL}={box.node}",
        "--network=host",
        "--no-healthcheck",
        "--security-opt=label=disable",
        *(["--interactive", "--tty"] if launch.interactive else []),
        *(_podman_only(launch, box) if podman else [f"--cidfile={box.folder}/id"]),
        f"--user={_user(podman, facts, launch)}",
        *(["--cap-drop=ALL", "--security-opt=no-new-privileges"] if apart else []),
        *_shared_memory(facts, launch),
        f"--ulimit=nofile={_range(facts.files)}",
        f"--ulimit=nproc={_range(facts.processes)}",
        *(["--ulimit=core=1:1"] if launch.secrets else []),
        *_cards(facts, box),
        *_limits(facts.limits or not podman, launch, box),
        *(_podman_gpus(facts, gpus) if podman else _docker_gpus(gpus)),
        *(f"--mount={_mount(mount)}" for mount in box.mounts),
        f"--workdir={box.workdir}",
        VARIABLES,
        *(f"--env={name}" for name in lines),
        "--entrypoint=",  # the command is run as it is written, as it is without an image
        box.image,
        *launch.argv,
    ]
    return Rendered(words, lines, variables)


def _podman_only(launch: Launch, box: Box) -> list[str]:
    """The container writes to the member's output itself, so nothing stands between them. That is
    not possible with a terminal: there the client does."""
    return [
        f"--log-driver={'none' if launch.interactive else 'passthrough'}",
        f"--pidfile={box.folder}/pid",
        f"--conmon-pidfile={box.folder}/conmon",
    ]


def _docker_shell(runtime: Runtime, box: Box) -> list[str]:
    ask = shlex.join([*runtime.command, "inspect", f"--format={DOCKER_STATE}", box.name])
    script = DOCKER_RUN.format(ask=ask, state=shlex.quote(f"{box.folder}/state"))
    return ["/bin/sh", "-c", script, "docker-run"]


def _user(podman: bool, facts: Facts, launch: Launch) -> str:
    """The user that it would be without an image. An ordinary user who runs podman is root in its
    containers, which is nobody but that user outside."""
    if facts.user == 0:
        return f"{launch.uid}:{launch.uid}"
    return "0:0" if podman else f"{facts.user}:{facts.group}"


def _shared_memory(facts: Facts, launch: Launch) -> list[str]:
    """Members of a gang exchange data through /dev/shm; a tenant that is kept apart has its own."""
    if facts.user and not facts.queues:
        return [f"--mount={_mount(Mount('/dev/shm', writable=True))}"]
    if not launch.uid or PIPES in launch.env:
        return ["--ipc=host"]
    return [f"--shm-size={launch.memory_mb or facts.memory_mb // 2}m"]


def _limits(possible: bool, launch: Launch, box: Box) -> list[str]:
    if box.group:  # it has the limits
        return [f"--cgroup-parent={box.group}", f"--pids-limit={UNLIMITED}"]
    if not possible:
        return []
    found = [f"--pids-limit={launch.limits.processes or UNLIMITED}"]
    if launch.memory_mb:
        found += [f"--memory={launch.memory_mb}m", f"--memory-swap={launch.memory_mb}m"]
    if launch.cpu_milli and launch.limits.cpu_hard:
        found.append(f"--cpus={launch.cpu_milli / 1000:g}")
    elif launch.cpu_milli:
        found.append(f"--cpu-shares={max(2, launch.cpu_milli * 1024 // 1000)}")
    return found


def _visible(launch: Launch, env: Mapping[str, str]) -> list[str]:
    """The GPUs that it may see; those of other members of its gang on this node can be among them.
    Names and numbers come from the controller, never from the user."""
    if launch.gpu_milli < WHOLE_GPU_MILLI:
        return [str(gpu) for gpu in launch.gpus]  # its limit may have given it another number
    named = [word for word in env.get(GPUS_ENV, "").split(",") if word.isdecimal()]
    return named if launch.gpus else []


def _with_peers(launch: Launch, visible: Sequence[str]) -> tuple[list[str], str]:
    """The GPUs of its gang on this node, too, and the numbers that its own have among them."""
    words = launch.env.get(JOB_GPUS, "").split(",") if launch.gpu_milli == WHOLE_GPU_MILLI else []
    more = [word for word in words if word.isdecimal() and word not in visible]
    gpus = sorted([*visible, *more], key=int) if more else list(visible)
    return gpus, ",".join(str(gpus.index(gpu)) for gpu in visible)


def _podman_gpus(facts: Facts, gpus: Sequence[str]) -> list[str]:
    if gpus and facts.gpus is not Gpus.NAMED:
        raise CannotStart(NO_CDI, Fault.MISSING)
    return [f"--device=nvidia.com/gpu={gpu}" for gpu in gpus]


def _docker_gpus(gpus: Sequence[str]) -> list[str]:
    return [f'--gpus="device={",".join(gpus)}"'] if gpus else []


def _cards(facts: Facts, box: Box) -> list[str]:
    """A runtime's own limit on locked memory is far below what a card needs."""
    if not box.cards:
        return []
    named = [f"--device={path}:{INSIDE}/{os.path.basename(path)}" for path in box.cards]
    return [*named, f"--ulimit=memlock={facts.locked}:{facts.locked}"]


def _mount(mount: Mount) -> str:
    """Comma-separated values, in which a field can be quoted."""
    fields = ["type=bind", f"source={mount.path}", f"target={mount.path}"]
    fields += [] if mount.writable else ["readonly"]
    return ",".join(
        '"' + field.replace('"', '""') + '"' if set(field) & set(',"\n') else field
        for field in fields
    )


def _variables(env: Mapping[str, str], *, apart: bool) -> tuple[str, dict[str, str]]:
    """The file's text, and variables of several lines, which no such file can hold. Those go
    through the command's own environment, where a stranger's variables could change what the
    command does, so a tenant that is kept apart cannot have them."""
    several = {name: value for name, value in env.items() if "\n" in value}
    if several and (apart or any(map(_steers, several))):
        names = ", ".join(sorted(several))
        raise CannotStart(f"env: {names} has several lines, which a container cannot be given")
    plain = [f"{name}={value}\n" for name, value in env.items() if name not in several]
    return "".join(plain), several


def _steers(name: str) -> bool:
    """Would the runtime itself obey this variable?"""
    prefixes = ("LD_", "XDG_", "CONTAINER", "DOCKER", "REGISTRY_", "STORAGE_", "GO", "_", "PODMAN")
    return name in ("PATH", "HOME", "TMPDIR") or name.startswith(prefixes)


def _apptainer(runtime: Runtime, facts: Facts, launch: Launch, box: Box) -> Rendered:
    """Its containers are ordinary processes of the user who starts them. All devices are visible,
    so the GPUs keep their numbers."""
    if launch.uid and facts.user == 0:
        raise CannotStart(NOT_APART, Fault.MISSING)
    words = [*runtime.command, "exec", "--cleanenv", "--no-home"]
    if facts.gpus is not Gpus.NONE and launch.gpus:
        words.append("--nv")
    for mount in box.mounts:
        if set(mount.path) & set(":,"):
            raise CannotStart(f"apptainer cannot mount a path with : or , in it: {mount.path}")
        words.append(f"--bind={mount.path}:{mount.path}:{'rw' if mount.writable else 'ro'}")
    words += [f"--pwd={box.workdir}", box.image, *launch.argv]
    return Rendered(words, {f"APPTAINERENV_{name}": text for name, text in box.env.items()}, "")


def _range(limits: tuple[int, int]) -> str:
    return ":".join(str(limit) for limit in limits)


# Which folders of the node a container gets. The agent may be root, and a tenant is not.
#
# Root mounts whatever it is asked to. So a folder that a tenant names is followed from the top, as
# the kernel would for that tenant: each folder on the way must let it pass. What is mounted is the
# first folder in which the tenant may write, so that nothing can be exchanged after this check.


def named_by_user(field: str, path: str, uid: int) -> Mount | None:
    """The mount that makes this folder visible to `uid` (0: the agent's own user). None if the
    image's own folder is meant."""
    if not os.path.isdir(path):
        raise CannotStart(f"{field} {path} is not a directory on this node", Fault.MISSING)
    if os.path.realpath(path) == "/":
        return None  # the whole machine has no place in an image
    if not uid:
        return Mount(path, writable=True)
    real = os.path.realpath(path)
    at, sticky = "", False
    for part in real.split("/")[1:]:
        at = f"{at}/{part}"
        seen = os.lstat(at)
        if not stat.S_ISDIR(seen.st_mode) or not _may(seen, uid, stat.S_IXOTH):
            raise CannotStart(f"{field} {path}: this tenant may not enter {at} on this node")
        if sticky and seen.st_uid == uid:
            problem = "is in a folder that everyone can write to; use a package or another folder"
            raise CannotStart(f"{field} {path} {problem}")
        writable = _may(seen, uid, stat.S_IWOTH)
        sticky = writable and bool(seen.st_mode & stat.S_ISVTX)
        if writable and not sticky:
            break
    return Mount(at, writable=True)


def _may(seen: os.stat_result, uid: int, bit: int) -> bool:
    """As the kernel decides it for a user who is alone in a group with the same number."""
    if seen.st_uid == uid:
        bit <<= 6
    elif seen.st_gid == uid:
        bit <<= 3
    return bool(seen.st_mode & bit)
