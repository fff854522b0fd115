"""The text of a unit of systemd. Pure: see docs/boot.md for why each line is there.

Everything that a unit starts inherits what the unit sets, also the jobs. So there are no options
that take rights away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

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
