"""Which job, element or member a user means by `j7`, `j7.3` and `j7.3.1`.

`j7.3` is element 3 if j7 is an array, and member 3 of j7 if it is not. `j7.3.1` is always member 1
of element 3. The API takes a job's id and a member apart, so this is decided here, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from shoal.forms import units
from shoal.forms.failure import USAGE, Failure
from shoal.model.views import JobView

_NAME = re.compile(r"(j[0-9]{1,15})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,5}))?")
LISTING = "list them with: shoal ps -a"


class Named(NamedTuple):
    """`job` is an id for the API: j7, or j7.3 for an element. `member` None: none was named."""

    job: str
    member: int | None = None

    def __str__(self) -> str:
        return self.job if self.member is None else f"{self.job}.{self.member}"


def named(text: str, look: Callable[[str], JobView]) -> Named:
    """`look` fetches a job; it is called only where the text alone does not decide, for example
    with `lambda job: cluster.on_job(client, job, lambda c: c.job(job))`."""
    cleaned = text.strip()
    found = _NAME.fullmatch(cleaned)
    if found is None:
        kind = "a job, element or member like j7, j7.3 or j7.3.1"
        raise Failure(f"JOB: {units.quoted(cleaned)} is not {kind}; {LISTING}", USAGE)
    job, second, third = found.groups()
    if second is None:
        return Named(job)
    element = f"{job}.{int(second)}"
    if third is not None:
        return Named(element, int(third))
    if look(job).array is not None:
        return Named(element)
    return Named(job, int(second))
