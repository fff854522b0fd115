"""Plans what to do on a host, from what is wanted and what is found there. Pure."""

from __future__ import annotations

import enum

from shoal.hosts.spec import Facts, HostSpec, Receipt, Software

FREE_MB_MIN = 512  # an environment takes about a third of that
PYTHON_MIN = "3.11"


class Unfit(Exception):
    """This host cannot be a node; the message has the reason and the fix."""


class Act(enum.StrEnum):
    """In this order."""

    LEAVE = "leave"
    INSTALL = "install"
    JOIN = "join"


def plan(spec: HostSpec, wanted: Receipt, facts: Facts, *, in_cluster: bool) -> tuple[Act, ...]:
    """Only what differs. A node leaves before its software or its shape changes."""
    check(spec, wanted.software, facts)
    has = facts.receipt
    install = not spec.python and (has is None or not facts.shoal or _differs(has, wanted))
    join = install or not in_cluster or has is None or has.join != wanted.join
    acts = []
    if join and has is not None:
        acts.append(Act.LEAVE)
    if install:
        acts.append(Act.INSTALL)
    if join:
        acts.append(Act.JOIN)
    return tuple(acts)


def _differs(has: Receipt, wanted: Receipt) -> bool:
    return has.software != wanted.software


def check(spec: HostSpec, wanted: Software, facts: Facts) -> None:
    """Unfit, if Shoal cannot run there."""
    if not facts.python:
        raise Unfit(_no_python(spec, facts))
    if spec.python:
        _check_given(spec.python, wanted, facts)
    elif not facts.shoal and facts.free_mb < FREE_MB_MIN:
        raise Unfit(
            f"{facts.home}: {facts.free_mb} MB are free there, and {FREE_MB_MIN} MB are needed; "
            "make room, or set SHOAL_HOME there to a larger disk"
        )


def _no_python(spec: HostSpec, facts: Facts) -> str:
    if spec.python:
        return f"python: {spec.python} is not a working interpreter there"
    found = f"; it has {facts.found}" if facts.found else ""
    return (
        f"it has no Python {PYTHON_MIN} or newer{found}; install python3 and its venv module "
        "there, or name one with python: PATH"
    )


def _check_given(python: str, wanted: Software, facts: Facts) -> None:
    major, _, minor = facts.version.partition(".")
    if (int(major or 0), int(minor or 0)) < tuple(map(int, PYTHON_MIN.split("."))):
        raise Unfit(f"python: {python} is Python {facts.version} there; use {PYTHON_MIN} or newer")
    if not facts.shoal:
        raise Unfit(
            f"python: {python} has no Shoal there; install it with: "
            f"{python} -m pip install 'shoal=={wanted.shoal}', or leave out python:"
        )
