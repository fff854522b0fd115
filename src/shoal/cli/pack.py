"""The working directory goes along with the job, where the nodes would not find it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.forms.failure import REFUSED, Failure
from shoal.model.job import JobSpec

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.packing import Package

LEFT_SHOWN = 5


def packed(client: Client, spec: JobSpec, wanted: bool | None, *, quiet: bool) -> JobSpec:
    """The job as it can run anywhere; as it is, if it shall run in place. Not said: packed
    unless all nodes are of this machine, where the directory is there already. What a user may
    expect to find there and will not is said."""
    if not quiet and (hidden := hidden_environment(spec)):
        from shoal.cli.screen import show

        show.note(hidden)
    if wanted is None:
        wanted = client.status().engine != "local"
    if not wanted:
        return spec
    from shoal.cli.screen import show
    from shoal.packing import PackError, pack

    try:
        package = pack(Path(spec.workdir))
    except PackError as error:
        raise Failure(f"workdir: {error}", REFUSED) from None
    with package.file as file:
        if package.left_behind and not quiet:
            names = ", ".join(package.left_behind[:LEFT_SHOWN])
            more = len(package.left_behind) - LEFT_SHOWN
            rest = f" and {more} more" if more > 0 else ""
            show.note(f"left behind, for they lead out of it or are no files: {names}{rest}")
        if package.ignored is not None and not quiet:
            show.note(package.ignored.text)
        client.send_package(package.sha256, package.size, file)
    return msgspec.structs.replace(
        spec, package=package.sha256, workdir=package.folder, env=_moved(spec, package)
    )


def hidden_environment(spec: JobSpec) -> str:
    """With a list of requirements an environment is built from it, beside the node's own Python:
    the one that is active here is not looked at."""
    active = spec.env.get("VIRTUAL_ENV") or spec.env.get("CONDA_PREFIX")
    if not spec.requirements or not active:
        return ""
    return (
        f"--requirements: the job finds what the list names, not the other packages of {active}; "
        "list all that it needs (pip freeze), or leave --requirements out where nodes have that "
        "folder"
    )


def _moved(spec: JobSpec, package: Package) -> dict[str, str]:
    """PYTHONPATH names places of this machine: those in the package are named from where the job
    will run."""
    env = dict(spec.env)
    parts = env.get("PYTHONPATH", "").split(":")
    here = package.root / package.folder
    for number, part in enumerate(parts):
        if part.startswith("/") and Path(part).resolve().is_relative_to(package.root):
            parts[number] = os.path.relpath(Path(part).resolve(), here)
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = ":".join(parts)
    return env
