"""What a member finds when it starts: its folders and the variables that name them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from shoal.agent.confine.tenant import Apart, own
from shoal.agent.faults import CannotStart
from shoal.agent.inherited import inherited_env
from shoal.agent.keeping.keeping import Keeping
from shoal.agent.keeping.url_volumes import urls
from shoal.agent.keeping.volumes import paths_of, volumes
from shoal.agent.launch.files import HOSTFILE, hostfile, write_files
from shoal.agent.supplies import PACKAGE, Supplies
from shoal.link.wire import CHECKPOINT_ROOT
from shoal.machine.paths import Hangs, ask
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.kept import OUTPUT

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"
SCRATCH = "SHOAL_SCRATCH"  # a directory that goes with the member: packages are read-only


class Found(NamedTuple):
    """`base`: where a member's environment begins. `extra`: what the agent adds; the member's own
    variables come on top. `private`: variables that nothing but the member itself gets. `folders`:
    what a tenant's member may see inside the cluster's home, and whether it may write there."""

    base: dict[str, str]
    extra: dict[str, str]
    private: dict[str, str]
    folder: str  # its working directory, if it asked for none
    folders: dict[str, bool]
    launch: str = ""  # the folder with what launchers need


class Surroundings:
    def __init__(self, directory: Path, supplies: Supplies, keeping: Keeping, apart: Apart) -> None:
        self._root = os.environ.get(CHECKPOINT_ROOT) or str(directory / "checkpoints")
        self._supplies = supplies
        self._keeping = keeping
        self._apart = apart
        self._inherited = inherited_env(), inherited_env(apart=True)

    def of(self, launch: Launch, directory: str, extra: dict[str, str]) -> Found:
        """`directory` is the member's own, with its output. A tenant's member gets folders inside
        it, because it must not write where the agent does."""
        apart = self._apart.holds(launch)
        scratch = self._apart.folders(launch, directory) if apart else directory
        env = {
            **extra,
            **self._checkpoint_dir(launch, apart=apart),
            **self._keeping.output(launch, apart=apart),
            **(ask(paths_of(launch), volumes, launch, apart=apart) if launch.volumes else {}),
        }
        if launch.package or apart or launch.launcher:
            env[SCRATCH] = scratch
        files = write_files(launch, directory)
        if files:
            env[HOSTFILE] = hostfile(files)
        folders = self._folders(launch, scratch, env) if apart else {}
        if apart and files:
            folders[files] = False
        if apart:
            base = self._apart.environment(launch, folders)
        else:  # an agent that is not root still keeps the operator's account from tenants
            base = dict(self._inherited[launch.uid > 0])
            if launch.uid:
                base["HOME"] = scratch
        private = self._supplies.secrets.variables(launch.ref)
        return Found(base, env, private, scratch, folders, files)

    def _folders(self, launch: Launch, scratch: str, env: dict[str, str]) -> dict[str, bool]:
        """Only paths that we chose: a job must not name a folder to be shown."""
        found = {scratch: True}
        for saved in (env.get(CHECKPOINT_DIR, ""), env.get(OUTPUT, "")):
            if saved and "://" not in saved:
                found[saved] = True
        if launch.package:
            found[launch.env[PACKAGE]] = False
        if launch.requirements:
            found[launch.env["VIRTUAL_ENV"]] = False
        for volume in urls(launch):
            found[launch.env[volume.variable]] = False
        secrets = self._supplies.secrets.folder(launch.ref)
        if secrets:
            found[secrets] = False
        return found

    def _checkpoint_dir(self, launch: Launch, *, apart: bool) -> dict[str, str]:
        """A directory of the job's own that outlives its attempts. It may also be an address
        (s3://...), where nothing has to be made."""
        if launch.env.get(CHECKPOINT_DIR):
            return {}
        path = self.checkpoint_path(launch.ref)
        if "://" not in path:
            try:
                ask((path,), self._make, path, launch.uid if apart else 0)
            except Hangs:
                raise
            except OSError as error:
                raise CannotStart(
                    f"cannot make the checkpoint directory {path}: {error.strerror}; "
                    f"set {CHECKPOINT_DIR} in the job's env to a directory it may write to"
                ) from None
        self._keeping.checkpoints(launch, path, apart=apart)
        return {CHECKPOINT_DIR: path}

    def _make(self, path: str, uid: int) -> None:
        self._keeping.spares.make(path, uid)
        if uid:
            own(path, uid)

    def remove_empty_checkpoints(self, launch: Launch | None, *, alone: bool) -> None:
        """Most jobs save nothing. An empty directory goes, unless another member may be about to
        write to it."""
        if launch is not None and launch.env.get("SHOAL_MEMBERS") == "1":
            path = self.checkpoint_path(launch.ref)
            with contextlib.suppress(OSError):
                user = launch.uid if self._apart.holds(launch) else 0
                ask((path,), self._remove, path, user, alone=alone)

    def _remove(self, path: str, user: int, *, alone: bool) -> None:
        if not alone or not self._keeping.spares.take(path, user):
            os.rmdir(path)

    def checkpoint_path(self, ref: MemberRef) -> str:
        return f"{self._root.rstrip('/')}/{ref.job}"
