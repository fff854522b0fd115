"""The user's keys for ssh into jobs, and the entry of ssh's configuration that uses them.

Both pairs are the user's own: one signs in, the other is what the server on the node shows, which
gets it with the request. The head has let the user in by a token, and tells nobody else about it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shoal.client import contexts
from shoal.machine.files import write_private

FOLDER = "ssh"
IDENTITY, HOST, KNOWN = "id_ed25519", "host_ed25519", "known_hosts"
ALIAS = "shoal"  # all jobs are one host to ssh, as they show one key


class SshKeys(NamedTuple):
    folder: Path
    public: str
    host: str  # private


def folder() -> Path:
    return contexts.folder() / FOLDER


def keys() -> SshKeys:
    """Made if there are none yet."""
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (IDENTITY, HOST):
        if not (place / name).exists():
            private, public = _new_pair()
            write_private(place / f"{name}.pub", public)
            write_private(place / name, private)
    shown = (place / f"{HOST}.pub").read_text().strip()
    known = f"{ALIAS} {shown}\n".encode()
    if not (place / KNOWN).exists() or (place / KNOWN).read_bytes() != known:
        write_private(place / KNOWN, known)
    return SshKeys(place, (place / f"{IDENTITY}.pub").read_text(), (place / HOST).read_text())


def _new_pair() -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + b"\n"


def entry(proxy: str) -> str:
    """For `Host shoal-*`. `proxy` is the command that connects, without the name of the job."""
    place = str(folder()).replace("%", "%%")
    return f"""\
# Written by `shoal ssh-config`.
Host shoal-*
    ProxyCommand {proxy.replace("%", "%%")} %n
    HostKeyAlias {ALIAS}
    UserKnownHostsFile "{place}/{KNOWN}"
    StrictHostKeyChecking yes
    IdentityFile "{place}/{IDENTITY}"
    IdentitiesOnly yes
    CheckHostIP no
    ForwardAgent no
"""


def include(config: Path, path: Path) -> bool:
    """Has ssh read the file, from the first line of its own configuration. False: it does
    already."""
    line = f'Include "{path}"\n'
    before = config.read_text() if config.exists() else ""
    if line in before:
        return False
    config.parent.mkdir(mode=0o700, exist_ok=True)
    mode = config.stat().st_mode & 0o777 if config.exists() else 0o600
    write_private(config, (line + before).encode())
    os.chmod(config, mode)
    return True
