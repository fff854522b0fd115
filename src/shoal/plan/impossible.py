"""The one error of planning: a sentence that says what cannot be, and what would work."""

from __future__ import annotations


class Impossible(ValueError):
    """The question has no answer: a layout, a model or a number that cannot be."""


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # also catches NaN
        raise Impossible(f"{name} is {value:g}: it must be at least {least:g}")


def at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise Impossible(f"{name} is {value:g}: the most that a plan accepts is {most:g}")
