"""What of this machine starts at boot, its head and its nodes, as units of systemd."""

from __future__ import annotations

import getpass
import grp
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from shoal.agent.inherited import MACHINE, MACHINE_PREFIXES, SECRET
from shoal.control.home import ClusterConfig, Home
from shoal.forms.failure import Failure
from shoal.machine.files import LINK_FILE, SPEC

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


# The systemd of this machine, or of this user: where its units are, and what systemctl says.


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


# The text of a unit of systemd. Pure: see docs/boot.md for why each line is there.
#
# Everything that a unit starts inherits what the unit sets, also the jobs. So there are no options
# that take rights away.


STOP_S = 100  # longer than a node gives its members, and needs for its report
START_S = 180  # the controller and its nodes may take a minute each
SUBGROUP_SINCE = 254  # the version of systemd that knows DelegateSubgroup=
MARK = "# Written by shoal install-service for "
UNSAFE = re.compile(r"[\x00-\x1f\x7f]")


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What all units of a home share. `user`: who runs a unit of the system; empty in a unit of
    the user's own."""

    home: str
    env: Mapping[str, str]
    user: str = ""
    group: str = ""
    systemd: int = 0  # its version; 0: unknown


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    what: str
    command: tuple[str, ...]
    around: Around
    notify: bool = False  # the process says when it is ready
    needs: str = ""  # without this file there is nothing to start
    after: tuple[str, ...] = ()  # units that start first, if they start at all
    folders: tuple[str, ...] = ()  # that have to be mounted
    at_power_off: tuple[str, ...] = ()  # run after the stop if the machine goes down


def render(unit: Unit) -> str:
    _specifiers(unit.around.home)  # no control characters
    sections = {"Unit": _unit(unit), "Service": _service(unit), "Install": _install(unit)}
    texts = ["\n".join([f"[{name}]", *lines]) for name, lines in sections.items()]
    return f"{MARK}{unit.around.home}\n" + "\n\n".join(texts) + "\n"


def home_of(text: str) -> str:
    """The home that a unit of ours is for; empty if somebody else wrote it."""
    first = text.partition("\n")[0]
    return first.removeprefix(MARK) if first.startswith(MARK) else ""


def _unit(unit: Unit) -> list[str]:
    first = ["network-online.target", *unit.after] if unit.around.user else list(unit.after)
    wants = [one for one in first if not one.startswith("shoal-")]
    lines = [f"Description={_specifiers(unit.what)}"]
    lines += [f"Wants={' '.join(wants)}"] if wants else []
    lines += [f"After={' '.join(first)}"] if first else []
    if unit.around.user:
        lines.append(f"RequiresMountsFor={' '.join(_word(one) for one in unit.folders)}")
    if unit.needs:
        lines.append(f"ConditionPathExists={_specifiers(unit.needs)}")
    return [*lines, "StartLimitIntervalSec=0"]


def _service(unit: Unit) -> list[str]:
    lines = [f"Type={'notify' if unit.notify else 'exec'}"]
    lines += (
        [f"User={_specifiers(unit.around.user)}", f"Group={_specifiers(unit.around.group)}"]
        if unit.around.user
        else []
    )
    env = {"SHOAL_HOME": unit.around.home, **unit.around.env}
    lines += [f"Environment={_word(f'{name}={value}')}" for name, value in env.items()]
    lines.append(f"ExecStart={command_line(unit.command)}")
    if unit.at_power_off:
        manager = "systemctl" if unit.around.user else "systemctl --user"
        # Otherwise the jobs would be killed late in the shutdown, without time to save.
        test = f'if [ "$({manager} is-system-running)" = stopping ]; then exec "$@"; fi'
        shell = ("/bin/sh", "-c", test, "sh", *unit.at_power_off)
        lines.append(f"ExecStopPost=-{command_line(shell)}")
    lines += [
        "KillMode=process",  # jobs outlive the process that the unit started
        f"TimeoutStartSec={START_S}",
        f"TimeoutStopSec={STOP_S}",
        "Restart=on-failure",
        "RestartSec=2",
        "RestartPreventExitStatus=2",  # wrong usage
        "Delegate=yes",  # jobs get groups of their own
    ]
    lines += ["DelegateSubgroup=main"] if unit.around.systemd >= SUBGROUP_SINCE else []
    return [*lines, "OOMPolicy=continue", "TasksMax=infinity", "LimitMEMLOCK=infinity"]


def _install(unit: Unit) -> list[str]:
    return [f"WantedBy={'multi-user.target' if unit.around.user else 'default.target'}"]


def command_line(words: Sequence[str]) -> str:
    """The first word is a program, in which systemd replaces no variables."""
    program, *rest = words
    return " ".join([_word(program), *[_word(word.replace("$", "$$")) for word in rest]])


def _word(text: str) -> str:
    text = _specifiers(text)
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _specifiers(text: str) -> str:
    if UNSAFE.search(text):
        raise ValueError(f"{text!r} contains a control character, which a unit cannot hold")
    return text.replace("%", "%%")
