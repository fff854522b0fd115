"""All refusals of the API have one form: a sentence, and the field at fault."""

from __future__ import annotations

import logging
import re
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, ValidationException

from shoal.control.loop import Busy, Unreadable
from shoal.model.report import Answer, Refused
from shoal.model.views import Problem
from shoal.ports import StoreError

log = logging.getLogger("shoal.api")

AnyRequest = Request[Any, Any, Any]


class Refusal(Exception):
    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(message=message, field=field)


def accepted(answer: Answer) -> Any:
    """The answer if the request was accepted; raises a Refusal if not."""
    if isinstance(answer, Refused):
        raise Refusal(404 if answer.missing else 422, answer.message, answer.field)
    return answer


def on_refusal(_: AnyRequest, error: Refusal) -> Response[Problem]:
    return _respond(error.status, error.problem)


def on_busy(_: AnyRequest, error: Busy | Unreadable) -> Response[Problem]:
    return _respond(503, Problem(message=str(error)))


def on_store_error(_: AnyRequest, error: StoreError) -> Response[Problem]:
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


def _respond(status: int, problem: Problem) -> Response[Problem]:
    return Response(problem, status_code=status, media_type=MediaType.JSON)
