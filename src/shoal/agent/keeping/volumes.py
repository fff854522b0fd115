"""The volumes of a member: folders of this node that it names. Checked before it starts."""

from __future__ import annotations

import os

from shoal.agent.confine.plan import PRIVATE, within
from shoal.agent.confine.tenant import barrier
from shoal.agent.faults import CannotStart
from shoal.agent.images.mounts import named_by_user
from shoal.agent.images.render import Mount
from shoal.model.commands import Launch
from shoal.model.job import Fault
from shoal.model.volume import Volume, parse


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


def _check(volume: Volume, launch: Launch, *, apart: bool) -> None:
    what = f"volume {volume.name}: {volume.source}"
    real = os.path.realpath(volume.source)
    if apart and (wall := barrier(f"{real}/.", launch.uid)):
        raise CannotStart(f"{what}: tenant {launch.tenant} may not enter {wall} on this node")
    if apart and any(within(real, os.path.realpath(place)) for place in PRIVATE):
        raise CannotStart(f"{what} is not there, as tenants have their own /tmp")
    if not os.path.isdir(volume.source):
        raise CannotStart(f"{what} is not a folder on this node", Fault.MISSING)


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
