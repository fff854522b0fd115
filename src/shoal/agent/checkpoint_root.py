"""Which checkpoint directory a node sees, by a name that is written in the directory itself."""

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
    """Nodes that read the same name share the directory. An address (s3://...) is its own name. The
    first node that looks writes the name, atomically. Empty: unknown."""
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
        log.warning("cannot find out whether %s is shared between nodes: %s", root, error)
        return ""
