"""The volumes of a member: folders of this node that it names. Checked before it starts."""

from __future__ import annotations

import functools
import os
import subprocess

from shoal.agent.confine.launcher import PRIVATE, within
from shoal.agent.confine.read_only import PREFIX
from shoal.agent.confine.ways import barrier
from shoal.agent.faults import CannotStart
from shoal.agent.images.render import Mount, named_by_user
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault
from shoal.model.volume import Volume, parse

WORDS_MAX = 8  # of a command that may name what it runs


def volumes(launch: Launch, *, apart: bool) -> dict[str, str]:
    """The variables that name them. CannotStart names the volume that this node does not have;
    another node may have it."""
    found = {}
    for volume in map(parse, launch.volumes):
        if volume.url:  # it was fetched: `env` has its path
            continue
        if not launch.image:  # the mounts of an image check this themselves
            _check(volume, launch, apart=apart)
        contained = launch.image and launch.uid  # mounted at its real path, as a workdir is
        found[volume.variable] = os.path.realpath(volume.source) if contained else volume.source
    return found


def paths_of(order: Launch | Prepare, root: str = "") -> list[str]:
    """What the agent itself looks at before a member can start."""
    own = order.env.get("PATH", ""), os.environ.get("PATH", "")
    folders = [folder for path in own for folder in path.split(":")]
    volumes = (parse(text).source for text in order.volumes)
    saved = order.env.get("SHOAL_CHECKPOINT_DIR") or root
    workdir = "" if order.package else order.workdir
    return [saved, workdir, *volumes, *order.argv[:WORDS_MAX], *folders]


def _check(volume: Volume, launch: Launch, *, apart: bool) -> None:
    what = f"volume {volume.name}: {volume.source}"
    real = os.path.realpath(volume.source)
    if apart and (wall := barrier(f"{real}/.", launch.uid)):
        raise CannotStart(f"{what}: tenant {launch.tenant} may not enter {wall} on this node")
    if apart and any(within(real, os.path.realpath(place)) for place in PRIVATE):
        raise CannotStart(f"{what} is not there, as tenants have their own /tmp")
    if not os.path.isdir(volume.source):
        raise CannotStart(f"{what} is not a folder on this node", Fault.MISSING)
    if volume.read_only and not apart and (problem := _cannot_hold()):
        fix = "name an image, or leave out :ro"
        raise CannotStart(f"volume {volume.name}: {problem}; {fix}", Fault.MISSING)


def read_only(launch: Launch) -> tuple[str, ...]:
    """Folders that the mounts of its process keep from being written to; an image has its own."""
    if not launch.volumes or launch.image:
        return ()
    found = (volume for volume in map(parse, launch.volumes) if volume.read_only)
    return tuple(os.path.realpath(volume.source) for volume in found if not volume.url)


@functools.cache
def _cannot_hold() -> str:
    """Why this agent cannot keep a folder read-only for a process; empty if it can. It is tried
    with the first volume that asks for it."""
    words = [*PREFIX, "/usr", "--", "/bin/true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr.strip() if done.returncode else ""


def mounts_of(launch: Launch) -> list[Mount | None]:
    """For its container, at the same paths."""
    found: list[Mount | None] = []
    for volume in map(parse, launch.volumes):
        if volume.url:
            found.append(Mount(launch.env[volume.variable], writable=False))
            continue
        mount = named_by_user(f"volume {volume.name}:", volume.source, launch.uid)
        if mount is not None and volume.read_only:
            mount = Mount(mount.path, writable=False)
        found.append(mount)
    return found
