"""What a member finds for launchers: the hosts of its gang, and a way to start processes there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.model.commands import Launch

HOSTS, HOSTFILE = "SHOAL_HOSTS", "SHOAL_HOSTFILE"
FOLDER = "launch"  # in a member's folder; the member may read it
PROGRAM = "program"  # a folder that Python runs, and that needs no other part of Shoal
MODULES = ("members.py", "ways.py")
MAIN = "import sys\n\nfrom shoal.agent.launch.members import main\n\nsys.exit(main(sys.argv[1:]))\n"
PYTHON = "SHOAL_PYTHON"


def write_files(launch: Launch, directory: str) -> str:
    """The folder with the files; empty if this member needs none."""
    hosts = launch.env.get(HOSTS, "")
    if not hosts and not launch.launcher:
        return ""
    folder = Path(os.path.realpath(directory)) / FOLDER
    folder.mkdir(mode=0o755, exist_ok=True)
    pairs = [word.rpartition(":") for word in hosts.split(",") if word]
    _write(folder / "hosts", "".join(f"{host} slots={slots}\n" for host, _, slots in pairs))
    if launch.launcher:
        _write(folder / "hosts.hydra", "".join(f"{host}:{slots}\n" for host, _, slots in pairs))
        _write_program(folder / PROGRAM)
    return str(folder)


def hostfile(folder: str) -> str:
    return f"{folder}/hosts"


def through(launch: Launch, folder: str) -> tuple[str, ...]:
    """The words that run the member's command, or wait for what it starts here. An image has to
    have a python3; nothing but its standard library is used."""
    return (*_python(launch), f"{folder}/{PROGRAM}", *launch.argv)


def _python(launch: Launch) -> Sequence[str]:
    return ("python3" if launch.image else launch.env[PYTHON], "-I", "-S")


def _write_program(folder: Path) -> None:
    here = Path(__file__).parent
    package = folder / "shoal" / "agent" / "launch"
    package.mkdir(mode=0o755, parents=True, exist_ok=True)
    _write(folder / "__main__.py", MAIN)
    for part in (package, package.parent, package.parent.parent):
        _write(part / "__init__.py", "")
    for name in MODULES:
        _write(package / name, (here / name).read_text())


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)
