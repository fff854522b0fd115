"""The systemd of this machine, or of this user: where its units are, and what systemctl says."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from pathlib import Path

from shoal.cli.boot.units import Unit, home_of, render
from shoal.forms.failure import Failure

SYSTEM_UNITS = Path("/etc/systemd/system")
LINGER = Path("/var/lib/systemd/linger")  # a file for each user whose units start at boot
TIMEOUT_S = 240  # longer than a unit may take to start


class Systemd:
    """`own`: the user's own units, which need no root."""

    def __init__(self, *, own: bool) -> None:
        self.own = own
        self.folder = _own_units() if own else SYSTEM_UNITS
        self._systemctl = ["systemctl", *(["--user"] if own else [])]

    @property
    def version(self) -> int:
        """0: unknown."""
        found = re.match(r"systemd (\d+)", self._ask("--version").stdout)
        return int(found[1]) if found else 0

    @property
    def runs(self) -> bool:
        """Does it run here, and answer us?"""
        return self._ask("is-system-running").stdout.strip() not in ("", "offline", "unknown")

    def home_of(self, name: str) -> str:
        """The home of a unit of ours that is installed; empty if there is none."""
        try:
            return home_of((self.folder / name).read_text(errors="replace"))
        except OSError:
            return ""

    def installed(self, home: Path) -> list[str]:
        """The names of the units that are installed for this home."""
        names = sorted(path.name for path in self.folder.glob("shoal-*.service"))
        return [name for name in names if self.home_of(name) == str(home)]

    def write(self, unit: Unit) -> Path:
        path = self.folder / unit.name
        if path.exists() and not self.home_of(unit.name):
            raise Failure(f"{path} is not from install-service; rename or remove it first")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".new")
            beside.write_text(render(unit))
            beside.chmod(0o644)
            beside.replace(path)
        except OSError as error:
            raise Failure(f"cannot write {path}: {error.strerror or error}") from None
        return path

    def remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            path = self.folder / name
            raise Failure(f"cannot remove {path}: {error.strerror or error}") from None

    def commands(self, *orders: str) -> list[str]:
        """Orders such as `enable --now UNIT`, as a person would type them."""
        sudo = "" if self.own or os.geteuid() == 0 else "sudo "
        return [f"{sudo}{' '.join([*self._systemctl, order])}" for order in orders]

    def order(self, *words: str) -> None:
        """Failure if systemd refuses, with its own words."""
        done = self._ask(*words)
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise Failure(f"{' '.join([*self._systemctl, *words])}: {said}")

    def lingers(self) -> bool:
        """Do this user's units start at boot? System units always do."""
        return not self.own or (LINGER / getpass.getuser()).exists()

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*self._systemctl, "--no-pager", *words]
        if shutil.which(command[0]) is None:
            return subprocess.CompletedProcess(command, 127, "", "systemctl is not installed")
        try:
            return subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                check=False,
                timeout=TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))


def _own_units() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "systemd" / "user"
