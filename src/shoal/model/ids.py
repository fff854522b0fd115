"""Ids of jobs: `j7` is a job or an array, `j7.3` is element 3 of the array j7."""

from __future__ import annotations

from functools import lru_cache

JOB_ID_PATTERN = r"j[0-9]{1,15}(\.[0-9]{1,9})?"
_NO_NUMBER = (0, -1)
_KEPT_MAX = 1024  # an id is asked for several times while its job comes, starts and goes


@lru_cache(maxsize=_KEPT_MAX)
def in_order(job_id: str) -> tuple[int, int]:
    """A key that sorts ids by their numbers: j7, j7.3, j7.12, j8. Other text comes first."""
    number, dot, index = job_id[1:].partition(".")
    if job_id[:1] != "j" or not _digits(number) or (dot and not _digits(index)):
        return _NO_NUMBER
    return int(number), int(index) if dot else -1


def number_of(job_id: str) -> int:
    """The number in the id of a job, of an array, or of an element's array; 0: it is no job id."""
    number = job_id[1:]
    if _digits(number) and job_id[0] == "j":  # most are not elements
        return int(number)
    return in_order(job_id)[0]


def array_of(job_id: str) -> str:
    """The array that an element's id names; empty if it is not an element's id."""
    array, dot, _ = job_id.partition(".")
    return array if dot else ""


def _digits(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15
