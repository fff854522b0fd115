"""`shoal check --save FILE`: what was measured, as a hardware file for `shoal plan`."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.cli.screen import show
from shoal.forms.failure import Failure
from shoal.model.fabric import FabricView
from shoal.plan.library import hardware
from shoal.plan.measured import fabric_toml, toml
from shoal.probes.hardware import NotMeasurable, measure


def save_here(path: str) -> None:
    """The GPUs of this machine."""
    refuse_early(path)
    try:
        measured = measure()
    except NotMeasurable as why:
        raise Failure(f"--save: {why}") from None
    _write(path, toml(measured, hardware(), time.strftime("%Y-%m-%d")))


def save_network(view: FabricView, path: str) -> None:
    """The network between nodes, from the collectives of a tour."""
    text = fabric_toml(view.collectives, view.usual_latency_us, time.strftime("%Y-%m-%d"))
    if not text:
        raise Failure("--save: no all-reduce was measured; see the notes")
    _write(path, text)


def refuse_early(path: str) -> None:
    """Before a minute of measuring."""
    if not Path(path).absolute().parent.is_dir():
        raise Failure(f"--save: {path}: there is no folder {Path(path).absolute().parent}")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise Failure(f"--save: {path}: {error.strerror}") from None
    show.note(f"wrote {path}; use it with: shoal plan --hardware {path} ...")
