"""Which place for checkpoints a node sees: a name that stands in the place itself."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from pathlib import Path

log = logging.getLogger("shoal.agent")

NAME_FILE = ".shoal-root"
NAME_CHARACTERS_MAX = 64


def root_name(root: str) -> str:
    """Nodes that read the same name share the place. An address (s3://...) is its own name; empty:
    it cannot be told. The first who looks writes it, whole or not at all."""
    if "://" in root:
        return root
    path = Path(root) / NAME_FILE
    fresh = path.with_name(f"{NAME_FILE}.{uuid.uuid4().hex}")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if not path.exists():
            fresh.write_text(uuid.uuid4().hex)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                fresh.unlink()
        return path.read_text()[:NAME_CHARACTERS_MAX].strip()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("nobody can tell whether %s is shared: %s", root, error)
        return ""
