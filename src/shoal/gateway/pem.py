"""Certificates of services: private files in the gateway's folder, named by what is in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from shoal.files import write_private

PREFIX = "certificate-"


def file_name(pem: str) -> str:
    return f"{PREFIX}{hashlib.sha256(pem.encode()).hexdigest()[:32]}.pem"


def keep(directory: Path, pem: str) -> Path:
    """The proxy reads it when it starts and with each new configuration."""
    path = directory / file_name(pem)
    if not path.exists():
        write_private(path, pem.encode())
    return path


def forget_others(directory: Path, pems: Iterable[str]) -> None:
    wanted = {file_name(pem) for pem in pems}
    for path in directory.glob(f"{PREFIX}*.pem"):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
