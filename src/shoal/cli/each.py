"""One action on each of several jobs or nodes: all are tried, and each result is printed."""

from __future__ import annotations

from collections.abc import Callable

from shoal.cli.errors import print_error
from shoal.cli.screen import show
from shoal.client import ShoalError, Unreachable
from shoal.forms.failure import REFUSED, Failure
from shoal.model.views import Done


def each(ids: list[str], act: Callable[[str], Done], done_text: str, json: bool) -> int:
    """The exit code: one refusal does not stop the others, but the command fails."""
    done, refused = [], 0
    for one in ids:
        try:
            done.append(act(one))
        except Unreachable:
            raise
        except (ShoalError, Failure) as error:
            print_error(str(error))
            refused = REFUSED
            continue
        if not json:
            answer = done[-1]
            show.line(f"{answer.id}: {answer.note}" if answer.note else f"{answer.id} {done_text}")
    if json:
        show.as_json(done)
    return refused
