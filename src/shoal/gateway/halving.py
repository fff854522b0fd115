"""Finds the services that HAProxy refuses, by halves, so that all others are served."""

from __future__ import annotations

from collections.abc import Callable

from shoal.gateway.quote import Refused
from shoal.model.service import Served, Wanted

Refusal = Callable[[Wanted], str]  # empty: it is accepted


def left_out(wanted: Wanted, refusal: Refusal) -> dict[str, str]:
    """The services without which it is accepted, with the problem of each. Of those that are
    refused only beside each other, the first stays. Raises if nothing would be accepted."""
    sound: list[Served] = []
    problems: dict[str, str] = {}

    def refused(*more: Served) -> str:
        return refusal(Wanted(entry=wanted.entry, services=(*sound, *more)))

    def take(part: tuple[Served, ...]) -> None:
        why = refused(*part)
        if not why:
            sound.extend(part)
        elif len(part) == 1:
            problems[part[0].route.service] = f"service {part[0].route.service}: {why}"
        else:
            take(part[: len(part) // 2])
            take(part[len(part) // 2 :])

    if wanted.services:
        take(wanted.services)
    if problems and not sound and (why := refused()):
        raise Refused(why)
    return problems
