"""What another machine needs to become a head of this cluster: its keys, and where its data is.

The keys are in no database, so they travel in a file that the operator carries.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec

from shoal.control.home import ClusterConfig, Home
from shoal.machine.files import read_own, require_own, write_private

KEY_BYTES = 32
NAME_BYTES_MAX = 63
MARK = "cluster-id"  # in the shared folder: whose files are there


class InvitationError(Exception):
    """One line that names the field or the file, and the fix."""


class KnownHead(msgspec.Struct, frozen=True):
    name: str
    url: str


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whoever has it can do everything in the cluster."""

    cluster: str
    token: str
    ca: str
    ca_key: str
    secrets_key: str
    notices_key: str
    database: str
    shared: str
    engine: str = "local"
    domain: str = "localhost"
    heads: tuple[KnownHead, ...] = ()


def invite(home: Home, config: ClusterConfig, heads: tuple[KnownHead, ...]) -> Invitation:
    """Keys that nothing has needed yet are made now: all heads must have the same."""
    from shoal.control.certificates import own
    from shoal.control.reach import names_of

    if not (home.tls / "ca.pem").exists():
        own(home.tls, names_of(config.host))
    return Invitation(
        cluster=home.cluster_id(),
        token=home.read_token(),
        ca=read_own(home.tls / "ca.pem").decode(),
        ca_key=read_own(home.tls / "ca.key").decode(),
        secrets_key=_key(home.path / "secrets.key"),
        notices_key=_key(home.path / "notices.key"),
        database=config.database,
        shared=config.shared,
        engine=config.engine,
        domain=config.domain,
        heads=heads,
    )


def read(file: Path) -> Invitation:
    try:
        return msgspec.json.decode(file.expanduser().read_bytes(), type=Invitation)
    except OSError as error:
        raise InvitationError(f"--head: {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"--head: {file} is not an invitation ({error})"
        raise InvitationError(f"{text}; write one on another head: shoal heads invite") from None


def accept(home: Home, invitation: Invitation) -> None:
    """Make this home one of that cluster. A home of another cluster is left as it is."""
    require_own(home.path)
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = home.id.read_text().strip() if home.id.exists() else ""
    if known not in ("", invitation.cluster) or (not known and home.token.exists()):
        text = f"--head: {home.path} belongs to another cluster"
        raise InvitationError(f"{text}; use another one: --home DIR")
    home.tls.mkdir(mode=0o700, exist_ok=True)
    for path, text in (
        (home.tls / "ca.key", invitation.ca_key),
        (home.tls / "ca.pem", invitation.ca),
        (home.path / "secrets.key", f"{invitation.secrets_key}\n"),
        (home.path / "notices.key", f"{invitation.notices_key}\n"),
        (home.token, f"{invitation.token}\n"),
        (home.id, f"{invitation.cluster}\n"),
    ):
        write_private(path, text.encode())


def free_name(taken: tuple[str, ...]) -> str:
    """The host's name, with a number if another head has it."""
    base = socket.gethostname().partition(".")[0].lower()[:NAME_BYTES_MAX] or "head"
    number, name = 1, base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name


def mark_shared(folder: Path, cluster: str, *, first: bool) -> None:
    """The shared folder is this cluster's. `first`: it may be new."""
    mark = folder / MARK
    try:
        if first and not mark.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(mark, f"{cluster}\n".encode())
        found = mark.read_text().strip()
    except FileNotFoundError:
        text = f"--shared: {folder} has no files of this cluster"
        raise InvitationError(f"{text}; is it mounted on this machine?") from None
    except OSError as error:
        raise InvitationError(f"--shared: {folder}: {error.strerror}") from None
    if found != cluster:
        text = f"--shared: {folder} holds the files of another cluster ({found[:16]})"
        raise InvitationError(f"{text}; choose another folder")


def _key(path: Path) -> str:
    if not path.exists():
        write_private(path, secrets.token_bytes(KEY_BYTES).hex().encode() + b"\n")
    return read_own(path).decode().strip()
