"""What of this machine should start at boot, as units: the head of a cluster, and nodes that have
joined one."""

from __future__ import annotations

import getpass
import grp
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from shoal.agent.inherited import MACHINE, MACHINE_PREFIXES, SECRET
from shoal.cli.boot.units import Around, Unit
from shoal.control.home import ClusterConfig, Home
from shoal.forms.failure import Failure
from shoal.machine.folder import LINK_FILE, SPEC

if TYPE_CHECKING:
    from shoal.cli.boot.systemd import Systemd

# Settings of ours that name no secret. What of the rest jobs may see is machine-wide, too.
SETTINGS = frozenset(
    (
        *("SHOAL_CHECKPOINT_ROOT", "SHOAL_SECRETS_KEY", "SHOAL_CONTAINERS"),
        *("SHOAL_GPU_DEVICES", "SHOAL_HAPROXY"),
    )
)
SHOAL = (sys.executable, "-m", "shoal.main")


def units(home: Home, systemd: Systemd, *, head: bool, node: bool) -> list[Unit]:
    """Those that this home needs; `head` or `node`: only these, and Failure if there are none."""
    config = None if node and not head else home.read_config()
    folders = [] if head and not node else joined(home)
    if head and config is None:
        raise Failure(f"--head: {home.config} is missing; start the cluster first with: shoal up")
    if node and not folders:
        raise Failure(f"--node: no node in {home.nodes} has joined a cluster; first: shoal join")
    if config is None and not folders:
        message = f"nothing in {home.path} could start at boot"
        raise Failure(f"{message}; first start a cluster (shoal up) or join one (shoal join)")
    found = [] if config is None else [_head(home, config, systemd)]
    first = tuple(unit.name for unit in found)
    return [*found, *(_node(home, folder, systemd, first) for folder in folders)]


def joined(home: Home) -> list[Path]:
    """The folders of nodes that dial a head."""
    folders = sorted(home.nodes.iterdir()) if home.nodes.is_dir() else []
    return [one for one in folders if (one / LINK_FILE).exists() and (one / SPEC).exists()]


def _head(home: Home, config: ClusterConfig, systemd: Systemd) -> Unit:
    folders = [str(home.path), *([config.shared] if config.shared else [])]
    return Unit(
        name=_name("shoal-head", home, systemd),
        what=f"The head of the Shoal cluster in {home.path}",
        command=(*SHOAL, "up", "--foreground"),
        notify=True,
        needs=str(home.config),
        after=("postgresql.service",) if _is_here(config.database) else (),
        folders=tuple(folders),
        at_power_off=(*SHOAL, "down"),
        around=_around(home, systemd),
    )


def _node(home: Home, folder: Path, systemd: Systemd, first: tuple[str, ...]) -> Unit:
    starter = (sys.executable, "-m", "shoal.agent.starter", str(folder))
    return Unit(
        name=_name(f"shoal-node-{folder.name}", home, systemd),
        what=f"The node {folder.name} of a Shoal cluster",
        command=(*starter, "--foreground", "--take-over"),
        needs=str(folder / LINK_FILE),
        after=first,
        folders=(str(folder),),
        around=_around(home, systemd),
    )


def _around(home: Home, systemd: Systemd) -> Around:
    own = systemd.own
    return Around(
        home=str(home.path),
        env=environment(os.environ),
        user="" if own else getpass.getuser(),
        group="" if own else grp.getgrgid(os.getgid()).gr_name,
        systemd=systemd.version,
    )


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What the shell knows of this machine, such as its PATH: at boot there is no shell."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name in MACHINE
        or name in SETTINGS
        or (name.startswith(MACHINE_PREFIXES) and not SECRET.search(name))
    }


def _name(wanted: str, home: Home, systemd: Systemd) -> str:
    """A second home on this machine gets a unit of its own."""
    if systemd.home_of(f"{wanted}.service") in ("", str(home.path)):
        return f"{wanted}.service"
    return f"{wanted}-{hashlib.sha256(str(home.path).encode()).hexdigest()[:6]}.service"


def _is_here(database: str) -> bool:
    """Does this machine run the PostgreSQL server? Only systemd's order depends on it."""
    if not database:
        return False
    try:
        parts = urlsplit(database)
        host = parse_qs(parts.query).get("host", [parts.hostname or ""])[0]
    except ValueError:
        return False
    return host in ("", "localhost", "127.0.0.1", "::1") or host.startswith("/")
