"""One process of a member, and how it ended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from shoal.agent.confine.tenant import Task
from shoal.agent.terminals import Console
from shoal.agent.warm.rules import Recipe
from shoal.cgroups.groups import Group
from shoal.cgroups.values import Ceiling, Used
from shoal.model.job import MemberRef

# By then most scripts have imported what they need; slower ones are looked at again, ever later.
FIRST_LOOK_S = 3.0


class Ended(NamedTuple):
    """A member that has ended: its exit code as a shell reports it, and what it was refused."""

    ref: MemberRef
    code: int
    ceiling: Ceiling
    used: Used
    started: bool = True  # False: its container did not run its command


class Place(NamedTuple):
    """What a process beside the member's own needs to be in the same surroundings."""

    env: dict[str, str]
    workdir: str
    task: Task | None = None  # of a tenant that is kept apart
    contained: bool = False
    words: tuple[str, ...] = ()  # what comes before the command: for volumes, or apptainer's


class Process:
    """A member as a process; `recipe`: how to start it warm the next time."""

    __slots__ = (
        "ceiling",
        "console",
        "group",
        "look_at",
        "look_s",
        "modules",
        "pid",
        "place",
        "popen",
        "recipe",
        "ref",
        "seen",
        "uid",
    )

    def __init__(
        self,
        ref: MemberRef,
        pid: int,
        found: Recipe | None,
        popen: subprocess.Popen[bytes] | None,
        ceiling: Ceiling,
        group: Group | None,
        uid: int = 0,
        place: Place | None = None,
    ) -> None:
        self.ref = ref
        self.pid = pid
        self.recipe = found
        self.popen = popen
        self.ceiling = ceiling
        self.group = group
        self.place = place
        self.console: Console | None = None  # of an interactive member
        self.uid = uid  # of a tenant that is kept apart
        self.modules: tuple[str, ...] = ()  # what to preload for it, once known
        self.seen: tuple[str, ...] = ()
        self.look_s = FIRST_LOOK_S
        self.look_at = time.monotonic() + FIRST_LOOK_S


def started(
    words: list[str], workdir: str, env: dict[str, str], output: int, more: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        cwd=workdir,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=more,
        start_new_session=True,
    )
