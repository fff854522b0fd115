"""All refusals of the API have one form: a sentence, and the field at fault."""

from __future__ import annotations

import logging
import re
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, ValidationException

from shoal.control.loop import Busy, Unreadable
from shoal.database.base import Deposed, StoreAway
from shoal.model.report import Answer, Full, Refused
from shoal.model.views import Problem
from shoal.ports import StoreError

log = logging.getLogger("shoal.api")

AnyRequest = Request[Any, Any, Any]

# Answers are for their sender alone, and data: a browser must neither keep nor run nor frame them.
SAFE_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
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


def on_refusal(_: AnyRequest, error: Refusal) -> Response[Problem]:
    return _respond(error.status, error.problem, error.retry_s)


def on_busy(_: AnyRequest, error: Busy | Unreadable) -> Response[Problem]:
    retry_s = BUSY_RETRY_S if isinstance(error, Busy) else 0  # nobody knows when
    return _respond(503, Problem(message=str(error)), retry_s)


def on_store_error(_: AnyRequest, error: StoreError) -> Response[Problem]:
    if isinstance(error, StoreAway | Deposed):  # the next try may find the database, or a leader
        return _respond(503, Problem(message=str(error)), BUSY_RETRY_S)
    return _respond(507, Problem(message=str(error)))


def on_http_error(_: AnyRequest, error: HTTPException) -> Response[Problem]:
    if isinstance(error, ValidationException):
        return _respond(400, _validation_problem(error))
    return _respond(error.status_code, Problem(message=error.detail))


def on_recursion(request: AnyRequest, error: RecursionError) -> Response[Problem]:
    if "deserializing" in str(error):  # caused by the client's data; any other is our own
        return _respond(400, Problem(message="the JSON is nested too deeply"))
    return on_unexpected(request, error)


def on_unexpected(request: AnyRequest, error: Exception) -> Response[Problem]:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "the controller failed; its log (controller.log) has the details"
    return _respond(500, Problem(message=message))


def _validation_problem(error: ValidationException) -> Problem:
    extra = error.extra if isinstance(error.extra, list) else []
    for entry in extra:
        if isinstance(entry, dict):
            field = str(entry.get("key", ""))
            return Problem(message=str(entry.get("message", error.detail)), field=field)
    field_at = re.search(r" - at `\$\.?([^`]*)`", error.detail)
    return Problem(message=error.detail, field=field_at.group(1) if field_at else "")


def _respond(status: int, problem: Problem, retry_s: int = 0) -> Response[Problem]:
    headers = {**SAFE_HEADERS, **({"retry-after": str(retry_s)} if retry_s else {})}
    return Response(problem, status_code=status, media_type=MediaType.JSON, headers=headers)
