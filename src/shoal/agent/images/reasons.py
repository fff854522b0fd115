"""What a runtime prints when something is wrong, and what that means for the job and the node."""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.model.job import Fault

LINE_LETTERS_MAX = 500


class Problem(NamedTuple):
    """What a runtime prints (in lower case) when something is wrong, and what that means."""

    signs: tuple[str, ...]
    why: str
    fault: Fault = Fault.NONE
    again: bool = False


# The first that matches counts.
PROBLEMS = (
    Problem(("no space left", "disk quota"), "the disk of this node is full", Fault.START),
    Problem(
        ("newuidmap", "newgidmap", "subuid", "subgid", "insufficient uids or gids"),
        "podman cannot map users on this node: install newuidmap (the package uidmap), and give "
        "the agent's user a range in /etc/subuid and /etc/subgid",
        Fault.MISSING,
    ),
    Problem(
        ("unauthorized", "authentication required", "denied", "forbidden", "invalid username"),
        "its registry does not allow it: is the name right, and is there a secret {secret}?",
    ),
    Problem(
        ("manifest unknown", "not found", "name unknown", "not known", "repository does not exist"),
        "there is no such image",
    ),
    Problem(
        (
            *("dial tcp", "timeout", "connection re", "no such host", "tls handshake", "eof"),
            *("i/o error", "network is unreachable", "too many requests", "longer than"),
            *("server misbehaving", "502", "503", "504"),
        ),
        "its registry cannot be reached from this node",
        Fault.MISSING,
        again=True,
    ),
)
OTHERWISE = Problem((), "it could not be pulled", Fault.MISSING)


def problem_in(text: str) -> Problem:
    lowered = last_line(text).lower()
    for problem in PROBLEMS:
        if any(sign in lowered for sign in problem.signs):
            return problem
    return OTHERWISE


def last_line(text: str) -> str:
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    said = lines[-1][:LINE_LETTERS_MAX] if lines else "it printed nothing"
    return "".join(letter for letter in said if letter.isprintable())


def not_started(said: str, program: str) -> tuple[str, Fault]:
    """Why a container did not run its command. Another node has the same image, but perhaps a
    runtime that works."""
    lowered = said.lower()
    if "uidmap" in lowered or "gidmap" in lowered:
        return problem_in(said).why, problem_in(said).fault
    if "exec:" in lowered and ("not found" in lowered or "no such file" in lowered):
        return f"no program {program!r} in the image", Fault.NONE
    if "exec:" in lowered and "permission denied" in lowered:
        return f"{program} cannot be executed in the image", Fault.NONE
    return f"its container could not start: {said}", problem_in(said).fault or Fault.MISSING
