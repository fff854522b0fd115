"""Bytecode of our own, where the code came without: compiling takes longer than a whole start."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

BYTECODE = "bytecode"  # in a cluster's home, or in a node's folder


def keep_bytecode(folder: Path) -> None:
    """If there is no bytecode beside the code and none will be written there, because of
    PYTHONDONTWRITEBYTECODE or because the folder is another user's (after `pip install
    --no-compile`), this process keeps its own below `folder`. So do its forks; what it executes,
    such as a job, does not."""
    if sys.pycache_prefix or os.path.exists(cache_from_source(__file__)):
        return
    if sys.dont_write_bytecode or not os.access(os.path.dirname(__file__), os.W_OK):
        sys.pycache_prefix = str(folder / BYTECODE)
        sys.dont_write_bytecode = False
