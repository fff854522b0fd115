"""Conditions on other jobs: which job must have ended, and how, before a job may start."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

AFTER_CHARACTERS_MAX = 40
AFTER_MAX = 256  # conditions of one job
DEPENDENTS_MAX = 10_000  # jobs that wait for one job: its end releases all of them in one step
JOB_ID = r"j[1-9][0-9]{0,17}(?:\.[0-9]{1,9})?"
AFTER_PATTERN = rf"^{JOB_ID}(?::(?:ok|any|fail))?(?!\n)$"
YEAR_10000_MS = 253_402_300_800_000


class When(enum.StrEnum):
    """How the other job must have ended. Exactly one of OK and FAIL comes true."""

    OK = "ok"  # it succeeded
    ANY = "any"
    FAIL = "fail"  # it failed, ran out of time or was cancelled


class Condition(NamedTuple):
    job: str
    when: When

    def holds(self, *, succeeded: bool) -> bool:
        return self.when is When.ANY or succeeded == (self.when is When.OK)


WORDS = {When.OK: "succeed", When.ANY: "end", When.FAIL: "fail"}


def conditions(after: Iterable[str]) -> list[Condition]:
    """'j7' means 'j7:ok'."""
    parts = [text.partition(":") for text in after]
    return [Condition(job, When(when or When.OK)) for job, _, when in parts]
