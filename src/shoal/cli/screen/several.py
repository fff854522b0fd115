"""One act on each of several things: all are tried, each is answered for."""

from __future__ import annotations

from collections.abc import Callable

import typer

from shoal.cli.guard import complain
from shoal.cli.screen import show
from shoal.client import ShoalError, Unreachable
from shoal.forms.failure import REFUSED, Failure
from shoal.model.views import Done


def each(ids: list[str], act: Callable[[str], Done], past: str, json: bool) -> None:
    """Print what became of each; one refusal does not spare the others, but fails the whole."""
    done, refused = [], 0
    for one in ids:
        try:
            done.append(act(one))
        except Unreachable:
            raise
        except (ShoalError, Failure) as error:
            complain(str(error))
            refused += 1
            continue
        if not json:
            answer = done[-1]
            show.line(f"{answer.id}: {answer.note}" if answer.note else f"{answer.id} {past}")
    if json:
        show.as_json(done)
    if refused:
        raise typer.Exit(REFUSED)
