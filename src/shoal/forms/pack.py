"""Sends the working directory along with a job to nodes that would not find it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.model.job import DEFAULT_TENANT, JobSpec

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.link.packing import Package
    from shoal.model.service import ServiceSpec

LEFT_SHOWN = 5
SECRET_NAME_MAX = 63
PLACES = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX")

Note = Callable[[str], object]


def packed(client: Client, spec: JobSpec, wanted: bool | None, note: Note | None = None) -> JobSpec:
    """The job in a form that can run on any node, or as it is if it runs in place. If `wanted` is
    None it runs in place only where all nodes are on this machine, and it stays in this cluster.
    `note` gets one line about each thing that the user may expect on the node but will not find
    there."""
    note = note or str  # which does nothing with it
    if client.remote:
        spec = msgspec.structs.replace(spec, env=_without_places(spec.env))
    if hidden := hidden_environment(spec):
        note(hidden)
    if wanted is None:
        away = bool(spec.cluster)
        wanted = away or client.remote or client.status().engine != "local"
    if not wanted:
        return spec
    from shoal.client import ShoalError
    from shoal.link.packing import PackError, pack

    try:
        package = pack(Path(spec.workdir))
    except PackError as error:
        raise ShoalError(str(error), "workdir") from None
    with package.file as file:
        if package.left_behind:
            names = ", ".join(package.left_behind[:LEFT_SHOWN])
            more = len(package.left_behind) - LEFT_SHOWN
            rest = f" and {more} more" if more > 0 else ""
            note(
                f"left behind, because they are not files or lead out of the folder: {names}{rest}"
            )
        if package.ignored is not None:
            note(package.ignored.text)
        client.send_package(package.sha256, package.size, file)
    return msgspec.structs.replace(
        spec,
        package=package.sha256,
        workdir=package.folder,
        env=_moved(spec, package, client.remote),
    )


def packed_service(
    client: Client, spec: ServiceSpec, wanted: bool | None, note: Note | None = None
) -> ServiceSpec:
    """The service with its replicas in a form that can run on any node."""
    require_certificate(spec)
    away = wanted is None and any(name != "here" for name in spec.clusters)
    replica = packed(client, spec.replica, away or wanted, note)
    spec = msgspec.structs.replace(spec, replica=replica)
    return _with_secret_certificate(client, spec, note)


def require_certificate(spec: ServiceSpec) -> None:
    from shoal.client import ShoalError

    certificate = spec.way.certificate
    if "/" in certificate and not Path(certificate).is_file():
        raise ShoalError(f"{certificate}: there is no such file", "certificate")


def _with_secret_certificate(
    client: Client, spec: ServiceSpec, note: Note | None = None
) -> ServiceSpec:
    """A file of this machine becomes a secret of the tenant: the gateway reads no others."""
    from shoal.client import ShoalError

    file = spec.way.certificate
    if "/" not in file:
        return spec
    secret = f"tls.{spec.name}"[:SECRET_NAME_MAX]
    try:
        value = Path(file).read_bytes()
        key = Path(f"{file}.key")
        value += b"\n" + key.read_bytes() if key.exists() else b""
    except OSError as error:
        raise ShoalError(f"{file}: {error.strerror}", "certificate") from None
    if b"PRIVATE KEY" not in value:
        raise ShoalError(f"{file}: is not a PEM file with a certificate and its key", "certificate")
    tenant = spec.replica.tenant
    client.set_secret(secret, value, tenant="" if tenant == DEFAULT_TENANT else tenant)
    if note is not None:
        note(f"the certificate is now the secret {secret}; serve again when its file has changed")
    route = msgspec.structs.replace(spec.way, certificate=secret)
    return msgspec.structs.replace(spec, route=route)


def _without_places(env: dict[str, str]) -> dict[str, str]:
    """Without what only says where things are on this machine: a node has its own programs."""
    return {
        name: value
        for name, value in env.items()
        if os.environ.get(name) != value or name not in PLACES
    }


def hidden_environment(spec: JobSpec) -> str:
    """A job with requirements runs in an environment of its own, built on the node. It does not
    see the environment that is active here."""
    active = spec.env.get("VIRTUAL_ENV") or spec.env.get("CONDA_PREFIX")
    if not spec.requirements or not active:
        return ""
    return (
        f"--requirements: the job finds only the packages in the list, not the others of {active}; "
        "list all that it needs (pip freeze), or leave --requirements out where nodes have that "
        "folder"
    )


def _moved(spec: JobSpec, package: Package, remote: bool) -> dict[str, str]:
    """Paths of PYTHONPATH that are in the package become relative to the folder of the job. From
    another machine, no others are valid."""
    env = dict(spec.env)
    parts = env.get("PYTHONPATH", "").split(":")
    here = package.root / package.folder
    for number, part in enumerate(parts):
        if part.startswith("/") and Path(part).resolve().is_relative_to(package.root):
            parts[number] = os.path.relpath(Path(part).resolve(), here)
        elif part.startswith("/") and remote:
            parts[number] = ""
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = ":".join(filter(None, parts) if remote else parts)
    if remote and not env.get("PYTHONPATH"):
        env.pop("PYTHONPATH", None)
    return env
