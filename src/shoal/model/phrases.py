"""Parts of sentences about jobs and nodes: one printable line, whatever the names contain."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shoal.model.durations import duration_text
from shoal.model.resources import Slice, plural

if TYPE_CHECKING:
    from shoal.model.job import JobSpec
    from shoal.model.sweep import Sweep

NODES_NAMED_MAX = 6
COMMAND_CHARACTERS_MAX = 60

_SHELL_SPECIAL = re.compile(r"[^\w@%+=:,./-]", re.ASCII)


def printable(text: str) -> str:
    """Control characters and line ends become visible escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def because(why: str) -> str:
    return f": {why}" if why else ""


def by(who: str) -> str:
    return f" by {who}" if who else ""


def attempt_text(attempt: int) -> str:
    """Empty for the first."""
    return f" (attempt {attempt})" if attempt > 1 else ""


BEGAN_BY = {
    "gpu": "its GPUs were first used",
    "steps": "it reported its first step",
    "output": "it wrote its first line",
}


def began_text(startup_ms: int, by: str) -> str:
    """How long a job started up, and how that was learned."""
    how = BEGAN_BY.get(by, "its node said so")
    return f"began to work after {duration_text(startup_ms)}, when {how}"


def exit_text(code: int) -> str:
    """Shells use codes above 128 for signals."""
    if 128 < code <= 128 + 64:
        return f"exit code {code} (signal {code - 128})"
    return f"exit code {code}"


def command_text(command: tuple[str, ...]) -> str:
    """As a shell reads it, on one line."""
    return shortened(
        printable(" ".join(_shell_word(word) for word in command)), COMMAND_CHARACTERS_MAX
    )


def _shell_word(word: str) -> str:
    """In single quotes if the shell would read it as anything else than itself."""
    if word and not _SHELL_SPECIAL.search(word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def shape_text(spec: JobSpec) -> str:
    """The size of a gang: '2 members with 8 GPUs, 1 CPU each'."""
    each = " each" if spec.members > 1 or spec.elastic else ""
    members = plural(spec.members, "member")
    if spec.elastic:
        members = f"{members_text(spec)} members"
    return f"{members} with {spec.demand}{each}"


def members_text(spec: JobSpec) -> str:
    """As in a job file: '4', or '2..8' for an elastic gang."""
    return f"{spec.members}..{spec.members_max}" if spec.elastic else str(spec.members)


def sweep_text(sweep: Sweep) -> str:
    """'100 elements, at most 8 at a time'."""
    text = plural(sweep.count, "element")
    if sweep.variables:
        text += f" over {', '.join(sweep.variables)}"
    return f"{text}, at most {sweep.at_most} at a time" if sweep.at_most else text


def numbers_text(numbers: tuple[int, ...]) -> str:
    """'member 3', or 'members 0, 1 and 4 more'."""
    if len(numbers) == 1:
        return f"member {numbers[0]}"
    return f"members {names_text(tuple(str(number) for number in numbers))}"


def names_text(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NODES_NAMED_MAX} more" if len(names) > NODES_NAMED_MAX else ""
    return ", ".join(names[:NODES_NAMED_MAX]) + more


def nodes_text(slices: tuple[Slice, ...]) -> str:
    return names_text(tuple(dict.fromkeys(slice_.node for slice_ in slices)))


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    teen = 10 < number % 100 < 14
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
