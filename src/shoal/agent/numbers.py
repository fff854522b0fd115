"""Which of the machine's GPUs are this node's. The controller counts a node's GPUs from 0; an
engine such as Slurm or Ray may have given it the machine's GPUs 2 and 5."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from shoal.agent.confine.limits import VISIBLE
from shoal.agent.shares import PIPES
from shoal.model.commands import Launch
from shoal.model.node import JOB_GPUS, NodeSpec

TREE_FILE = "SHOAL_TREE"  # a file that says the node's tree, where the machine does not


def own_gpus(spec: NodeSpec, environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """The machine's numbers of this node's GPUs. Only an engine says so by this variable; on a
    machine that joined by itself it may be somebody's habit."""
    words = [word.strip() for word in environ.get(VISIBLE, "").split(",")]
    if spec.order and len(words) == spec.gpus and all(word.isdecimal() for word in words):
        return tuple(int(word) for word in words)
    return tuple(range(spec.gpus))


def renamed(launch: Launch, own: Sequence[int]) -> Launch:
    """The same with the machine's numbers. A share's daemon shows its one GPU as 0."""
    if list(own) == list(range(len(own))):
        return launch
    env = dict(launch.env)
    for name in (VISIBLE, JOB_GPUS) if PIPES not in env else ():
        if name in env:
            env[name] = ",".join(_named(word, own) for word in env[name].split(","))
    gpus = tuple(own[gpu] for gpu in launch.gpus if gpu < len(own))
    return msgspec.structs.replace(launch, gpus=gpus, env=env)


def _named(word: str, own: Sequence[int]) -> str:
    return str(own[int(word)]) if word.isdecimal() and int(word) < len(own) else word
