"""All refusals of the API have one form: a sentence, and the field at fault."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import msgspec

from shoal.api.http import TOO_LARGE, Gone, Large
from shoal.control.loop import Busy, Unreadable
from shoal.database.base import Deposed, StoreAway
from shoal.machine.paths import Hangs
from shoal.model.report import Answer, Full, Refused
from shoal.model.views import Problem
from shoal.ports import StoreError

log = logging.getLogger("shoal.api")

FULL = {Full.TENANT: 429, Full.CLUSTER: 503}
FULL_RETRY_S = 30  # when it ends is not known: longer than a client waits by itself
BUSY_RETRY_S = 1


class Refusal(Exception):
    """`retry_s`: when it is worth another try; the answer has it as Retry-After."""

    def __init__(self, status: int, message: str, field: str = "", retry_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s
        self.problem = Problem(message=message, field=field)


def accepted(answer: Answer) -> Any:
    """The answer if the request was accepted; raises a Refusal if not."""
    if isinstance(answer, Refused):
        if answer.full is not None:
            raise Refusal(FULL[answer.full], answer.message, answer.field, FULL_RETRY_S)
        if answer.late:
            raise Refusal(409, answer.message, answer.field)
        raise Refusal(404 if answer.missing else 422, answer.message, answer.field)
    return answer


class Answered(NamedTuple):
    """How a request is refused."""

    status: int
    problem: Problem
    retry_s: int = 0


def answer_to(error: Exception, what: str) -> Answered:
    """`what` was asked, for the log."""
    match error:
        case Refusal():
            return Answered(error.status, error.problem, error.retry_s)
        case Busy():
            return Answered(503, Problem(message=str(error)), BUSY_RETRY_S)
        case Unreadable():  # nobody knows for how long
            return Answered(503, Problem(message=str(error)))
        case StoreAway() | Deposed():  # the next try may find the database, or a leader
            return Answered(503, Problem(message=str(error)), BUSY_RETRY_S)
        case Hangs():  # the heads' shared folder
            return Answered(503, Problem(message=str(error)), BUSY_RETRY_S)
        case StoreError():
            return Answered(507, Problem(message=str(error)))
        case Large():
            return Answered(413, Problem(message=TOO_LARGE))
        case Gone():
            return Answered(400, Problem(message="the request is not whole"))
        case RecursionError() if "deserializing" in str(error):  # any other is our own
            return Answered(400, Problem(message="the JSON is nested too deeply"))
    log.exception("%s failed", what, exc_info=error)
    message = "the controller failed; its log (controller.log) has the details"
    return Answered(500, Problem(message=message))


_AT = re.compile(r" - at `\$\.?([^`]*)`$")


def invalid(error: msgspec.ValidationError, whole: str = "") -> Refusal:
    """`whole`: the field if the error is about all of it."""
    text = str(error)
    at = _AT.search(text)
    return Refusal(400, text.partition(" - at ")[0], (at.group(1) if at else "") or whole)
