"""Secrets: what a tenant's jobs need and nobody may read. Names and dates are public, values not.

A value is in no event, state or view. It exists encrypted in the controller's home, and in memory
on the nodes that run a member that was given it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.identity import Name
from shoal.model.job import MemberRef

SECRET_BYTES_MAX = 64 * 1024
SECRETS_OF_TENANT_MAX = 1_000
SECRET_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{0,62}(?!\n)$"
REGISTRY_PREFIX = "registry-"  # and a host: what the node needs to pull images from there
NAME_CHARACTERS_MAX = 63
DEFAULT_REGISTRY = "docker.io"
ENCRYPTION = "encryption-key"  # the tenant's, for the kept files of its jobs
ENCRYPTION_BYTES_MIN = 32
FILES_KEY = ".files"  # a job's own, for its node alone; no secret of a tenant has such a name

SecretName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,62}(?!\n)$")]


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """`version` grows each time it is set. `jobs`: how many live jobs get it. `problem`: why its
    value cannot be read."""

    name: SecretName
    tenant: Name
    version: int
    set_ms: int
    by: str
    jobs: int = 0
    problem: str = ""


class SecretValue(msgspec.Struct, frozen=True):
    """A value on its way to a member: in `variable`, or in a file if that is empty."""

    name: str
    value: bytes
    variable: str = ""

    def __repr__(self) -> str:  # in a traceback, for example
        return f"SecretValue({self.name!r})"


class SecretsOf(msgspec.Struct, frozen=True):
    """What one member gets, or the `problem` because of which it cannot start. `registry` is for
    the node alone: `USER:PASSWORD` for the registry of the member's image, if there is one."""

    ref: MemberRef
    values: tuple[SecretValue, ...] = ()
    registry: bytes = b""
    problem: str = ""

    def __repr__(self) -> str:
        return f"SecretsOf({self.ref}, {[one.name for one in self.values]})"


class SecretsWanted(msgspec.Struct, frozen=True):
    """An agent, in this life, is to start the member; its secrets are encrypted for this key."""

    ref: MemberRef
    incarnation: int
    public: bytes


class SealedSecrets(msgspec.Struct, frozen=True):
    """`SecretsOf`, encrypted for the agent that asked (shoal/link/sealing.py)."""

    ref: MemberRef
    public: bytes
    box: bytes


def split(wanted: str) -> tuple[str, str]:
    """The name, and the variable of NAME=VARIABLE."""
    name, _, target = wanted.partition("=")
    return name, "" if target.startswith("/") else target


def file_of(wanted: str) -> str:
    """The name of its file, of NAME or NAME=/FILE."""
    name, _, target = wanted.partition("=")
    return target.removeprefix("/") or name


def registry_secret(image: str) -> str:
    """The name of the secret with the credentials for this image's registry, as
    `registry-ghcr.io`; a port is joined with a dash. Empty if such a name is not possible."""
    first, slash, _ = image.removeprefix("docker://").partition("/")
    has_host = slash and ("." in first or ":" in first or first == "localhost")
    name = REGISTRY_PREFIX + (first if has_host else DEFAULT_REGISTRY).replace(":", "-")
    plain = name.replace(".", "").replace("-", "").replace("_", "")
    return name if len(name) <= NAME_CHARACTERS_MAX and plain.isalnum() and name.isascii() else ""
