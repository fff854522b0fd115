"""Names in a job's environment that are Shoal's to give: what they say must be true."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.model.hidden import TASKS
from shoal.model.job import JobSpec
from shoal.model.report import Refused
from shoal.model.secret import file_of, split

PREFIX = "SHOAL_"
# Of those that begin so, a job may set these: where it saves, how often its nodes fail, which
# cluster its own calls of `shoal` mean, and how its tasks are told from another's.
OPEN = frozenset(("SHOAL_CHECKPOINT_DIR", "SHOAL_MTBF_S", "SHOAL_HOME", "SHOAL_DEBUG"))
# How the members of a gang find each other, in torchrun's names.
RENDEZVOUS = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
        "PET_NNODES",
        "PET_NODE_RANK",
    )
)
GPUS = "CUDA_VISIBLE_DEVICES"  # the GPUs that a member was given, and no others
# Defaults of torchrun's flags, which a job may set otherwise.
FLAGS = frozenset(("PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"))


def reserved(env: Mapping[str, str], *, replica: bool) -> Refused | None:
    """`replica`: it answers requests, on a port that Shoal chooses."""
    for name in env:
        if name.startswith(PREFIX) and name not in OPEN | TASKS:
            may = ", ".join(sorted(OPEN))
            return Refused(
                "env", f"{name} is set by Shoal itself; leave it out (a job may set {may})"
            )
        if name in RENDEZVOUS or name == GPUS or (replica and name == "PORT"):
            return Refused(
                "env",
                f"{name} is set by Shoal for each member; leave it out, or set it for one program "
                f"alone with the command: env {name}=... PROGRAM",
            )
    return None


def reserved_secrets(spec: JobSpec, env: Mapping[str, str], *, replica: bool) -> Refused | None:
    """A secret may not be in a variable that is Shoal's to set, or that something else sets. No two
    are in one file."""
    seen, files = dict(env) if spec.secrets else {}, set[str]()
    for wanted in spec.secrets:
        name, variable = split(wanted)
        if not variable:
            file = file_of(wanted)
            if file in files:
                return Refused("secrets", f"two of them are to be in the file {file}")
            files.add(file)
            continue
        if variable in seen:
            return Refused("secrets", f"{name} is to be in {variable}, which is already set")
        seen[variable] = ""
        if reserved({variable: ""}, replica=replica) is not None:
            return Refused("secrets", f"{name} cannot be in {variable}: Shoal sets it itself")
    return None
