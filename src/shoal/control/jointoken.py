"""The cluster's standing join token: HOME/join-token, as text that other machines are given."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path

from shoal.control.loop import ControlLoop
from shoal.files import read_own, write_private
from shoal.model.identity import NodeKey
from shoal.model.report import SetKey

NAME = "join-token"
NOTE = "the cluster's own"


def standing(home: Path) -> str:
    """The whole text; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return read_own(home / NAME).decode("ascii", "replace").strip()
    return ""


def standing_id(home: Path) -> str:
    return parts(standing(home))[0]


def parts(text: str) -> tuple[str, str, str]:
    """The id, the secret, and the fingerprint of the certificate; empty if there is none."""
    secret, _, fingerprint = text.strip().partition(".")
    prefix, _, rest = secret.partition("_")
    key_id, _, hidden = rest.partition("_")
    return (key_id, hidden, fingerprint) if prefix == "shoal" and hidden else ("", "", "")


def write_standing(home: Path, secret: str, fingerprint: str) -> str:
    text = f"{secret}.{fingerprint.removeprefix('sha256:')}"
    if text != standing(home):
        write_private(home / NAME, text.encode() + b"\n")
    return text


async def keep_standing(loop: ControlLoop, home: Path, fingerprint: str) -> None:
    """The token of the file lets machines join; without a file there is a new one."""
    key_id, secret, _ = parts(standing(home))
    if not key_id:
        key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    write_standing(home, f"shoal_{key_id}_{secret}", fingerprint)
    hash_ = hashlib.sha256(secret.encode()).hexdigest()
    await loop.settled()
    known = loop.state.identity.keys.get(key_id)
    if known is None or known.hash != hash_:
        key = NodeKey(id=key_id, hash=hash_, note=NOTE)
        await loop.request(SetKey(key, who="the controller"))
