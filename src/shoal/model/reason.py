"""Reasons: sentences in which the parts that name somebody are marked, and what a reader sees.

A reason is built with f-strings where something is decided, from words and from parts made here.
It travels and is stored as a string, so no part gets lost on the way. Whoever shows it renders it
for the reader who asks; text without parts is shown as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NewType

from shoal.model.ids import number_of

EVERYBODY = "*"  # the tenant of a reader who sees all of them
ANOTHER, SEVERAL = "another tenant's job", "other tenants' jobs"
SOME_TENANT = "another tenant"
WITHHELD = "the reason is not shown, because it may name jobs of other tenants"

# BEGIN kind BREAK owner BREAK id BREAK text END. These characters are in no name, and words that
# others wrote lose them.
BEGIN, BREAK, END = "\x02", "\x1f", "\x03"
MARKS = str.maketrans("", "", BEGIN + BREAK + END)
JOB, TENANT, PRIVATE, QUOTE = "j", "t", "p", "q"

Shown = NewType("Shown", str)
"""A reason as its reader may read it: only `render` makes one."""


def _no_job(_: str) -> bool:
    return False


class Reader(NamedTuple):
    """Who reads a reason. `above`: the tenants above its own, which it may know. `first_job`: jobs
    with lower numbers were of an earlier tenant of this name. `tenants`: whether it may know which
    tenant a job of others is of. `knows`: whether it may see the job with this id, for reasons
    that earlier versions stored without parts."""

    tenant: str = EVERYBODY
    first_job: int = 0
    above: tuple[str, ...] = ()
    tenants: bool = False
    knows: Callable[[str], bool] = _no_job

    @property
    def sees_all(self) -> bool:
        return self.tenant == EVERYBODY

    def sees(self, tenant: str, job: str) -> bool:
        own = self.sees_all or tenant == self.tenant
        return own and (not self.first_job or number_of(job) >= self.first_job)


OPERATOR = Reader()


def job_part(tenant: str, job: str, text: str = "") -> str:
    """A job, by its id or this text; to other tenants it is just another tenant's job."""
    return _part(JOB, tenant, job, _bare(text or job))


def tenant_part(tenant: str) -> str:
    return _part(TENANT, tenant, "", _bare(tenant))


def private(reason: str) -> str:
    """A part that only those who see all tenants may read; it may have parts of its own."""
    return _part(PRIVATE, "", "", reason) if reason else ""


def quoted(words: str) -> str:
    """Words of a user or of a program, which say what they want: whoever may read the reason may
    read them."""
    words = _bare(words)
    return _part(QUOTE, "", "", words) if job_words(words) else words


def render(reason: str, reader: Reader = OPERATOR) -> Shown:
    if not marked(reason):
        known = reader.sees_all or all(map(reader.knows, job_words(reason)))
        return Shown(reason if known else WITHHELD)
    open_parts = [_Part()]
    for at, piece in enumerate(reason.replace(END, BEGIN + END).split(BEGIN)):
        if piece.startswith(END):
            _close(open_parts, reader)
            open_parts[-1].add(piece[1:])
        elif at:
            kind, owner, job, text = (piece.split(BREAK) + [""] * 3)[:4]
            open_parts.append(_Part(kind, owner, job))
            open_parts[-1].add(text)
        else:
            open_parts[-1].add(piece)
    while len(open_parts) > 1:  # the text was cut
        _close(open_parts, reader)
    return Shown("".join(open_parts[0].pieces))


def marked(reason: str) -> bool:
    return BEGIN in reason or END in reason


def job_words(text: str) -> list[str]:
    """The words of a text that look like jobs."""
    if "j" not in text:
        return []
    words = "".join(letter if letter.isalnum() else " " for letter in text).split()
    return [word for word in words if word[0] == "j" and word[1:].isdecimal()]


def _part(kind: str, owner: str, job: str, text: str) -> str:
    return f"{BEGIN}{kind}{BREAK}{_bare(owner)}{BREAK}{_bare(job)}{BREAK}{text}{END}"


def _bare(text: str) -> str:
    return text.translate(MARKS)


class _Part:
    def __init__(self, kind: str = QUOTE, owner: str = "", job: str = "") -> None:
        self.kind, self.owner, self.job = kind, owner, job
        self.pieces: list[str] = []

    def add(self, text: str) -> None:
        """Several hidden jobs of a list become one phrase."""
        if text == ANOTHER and self.pieces[-2:] in ([ANOTHER, ", "], [SEVERAL, ", "]):
            self.pieces[-2:] = [SEVERAL]
        elif text:
            self.pieces.append(text)


def _close(open_parts: list[_Part], reader: Reader) -> None:
    if len(open_parts) == 1:
        return  # an end without a beginning
    part = open_parts.pop()
    open_parts[-1].add(_seen(part, reader))


def _seen(part: _Part, reader: Reader) -> str:
    text = "".join(part.pieces)
    if part.kind == QUOTE or reader.sees_all:
        return text
    if part.kind == JOB:
        if reader.sees(part.owner, part.job):
            return text
        return f"a job of tenant {part.owner}" if reader.tenants and part.owner else ANOTHER
    if part.kind == TENANT:
        known = part.owner == reader.tenant or part.owner in reader.above
        return text if known or reader.tenants else SOME_TENANT
    return ""  # private, or a kind of a later version
