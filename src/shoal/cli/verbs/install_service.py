"""`shoal install-service`: start this machine's head and nodes at boot, with systemd."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, flag, verb

if TYPE_CHECKING:
    from shoal.cli.boot.systemd import Systemd
    from shoal.cli.boot.units import Unit

LINGER = "loginctl enable-linger"


@verb(
    flag("--head", help="Only the head of the cluster."),
    flag("--node", help="Only the nodes with which this machine joined a cluster."),
    flag("--user", help="Units of your own, although you are root."),
    flag("--print", help="Print the units, and change nothing."),
    Option(
        "--enable/--no-enable",
        default=True,
        help="Also start them, now and at every boot. [yes]",
    ),
    flag("--remove", help="Remove the units; what runs continues."),
    on_head=True,
)
def install_service(
    head: bool,
    node: bool,
    user: bool,
    print: bool,  # noqa: A002
    enable: bool,
    remove: bool,
    json: bool,
    home: Path,
) -> None:
    """Start this machine's part of a cluster at boot.

    Writes a unit of systemd for the head if `shoal up` has started a cluster
    here, and one for each node with which this machine has joined a cluster
    (`shoal join`). Root gets units of the system. Other users get units of their
    own, which start at boot after `loginctl enable-linger`.

    The units use the Python that runs this command, this home, and the PATH and
    the settings of this shell that jobs may see. Run it again after a change.

    Jobs outlive the head's unit: `systemctl restart shoal-head` replaces the
    controller, and nothing else. Stopping a node's unit ends the node, and its
    jobs continue elsewhere.

    Without systemd, the units are written all the same, and the commands that
    enable them are printed.

    Examples:
      shoal install-service
      shoal install-service --print
      shoal install-service --node --no-enable
      shoal install-service --home /srv/shoal
      shoal install-service --remove
    """
    from shoal.cli.boot.machine import units
    from shoal.cli.boot.systemd import Systemd
    from shoal.control.home import Home
    from shoal.forms.failure import USAGE, Failure

    if remove and print:
        raise Failure("--print: cannot be combined with --remove; give one of them", USAGE)
    systemd = Systemd(own=user or os.geteuid() != 0)
    if remove:
        names = systemd.installed(Home(home).path)
        only = [kind for kind, asked in (("head", head), ("node", node)) if asked]
        wanted = tuple(f"shoal-{kind}" for kind in only or ("head", "node"))
        _remove(systemd, [name for name in names if name.startswith(wanted)], home, json)
        return
    try:
        found = units(Home(home), systemd, head=head, node=node)
        if print:
            _print(systemd, found, json)
            return
        paths = [systemd.write(unit) for unit in found]
    except ValueError as error:
        raise Failure(str(error)) from None
    _install(systemd, found, paths, enable=enable, json=json)


def _print(systemd: Systemd, units: list[Unit], json: bool) -> None:
    import sys

    from shoal.cli.boot.units import render
    from shoal.cli.screen import show

    texts = {str(systemd.folder / unit.name): render(unit) for unit in units}
    if json:
        show.as_json({"units": [{"path": path, "text": texts[path]} for path in texts]})
    else:
        shown = [f"# {path}\n{text}" for path, text in texts.items()]
        sys.stdout.write("\n".join(shown))


def _install(
    systemd: Systemd, units: list[Unit], paths: list[Path], *, enable: bool, json: bool
) -> None:
    from shoal.cli.screen import show

    names = [unit.name for unit in units]
    started = enable and systemd.runs
    if started:
        with show.Spinner(quiet=json) as progress:
            progress("reading the units")
            systemd.order("daemon-reload")
            for name in names:
                progress(f"starting {name}")
                systemd.order("enable", "--now", name)
    left = [] if started else systemd.commands("daemon-reload", f"enable --now {' '.join(names)}")
    left += [] if systemd.lingers() else [LINGER]
    if json:
        show.as_json({"units": list(map(str, paths)), "started": started, "next": left})
        return
    for path in paths:
        show.line(f"{path} {'starts at boot, and runs' if started else 'is written'}", "green")
    if enable and not started:
        show.note("systemd does not run here, or does not answer")
    if left:
        show.line("next: " + "; ".join(left))


def _remove(systemd: Systemd, names: list[str], home: Path, json: bool) -> None:
    from shoal.cli.screen import show

    runs = bool(names) and systemd.runs
    for name in names:
        if runs:
            systemd.order("disable", name)
        systemd.remove(name)
    if runs:
        systemd.order("daemon-reload")
    if json:
        show.as_json({"removed": names})
    elif names:
        show.line(f"{', '.join(names)} removed; what runs continues until: shoal down, shoal leave")
    else:
        show.line(f"no unit in {systemd.folder} is for {home}; nothing to do")
