"""Labels, notes, waits and rules for notices, as sentences."""

from __future__ import annotations

from typing import assert_never

from shoal.forms.units import duration_text
from shoal.model.events import JobLabelled, JobNoted, JobWaited, RuleRemoved, RuleSet
from shoal.model.notice import masked


def about_annotation(event: JobLabelled | JobNoted | JobWaited) -> str:
    match event:
        case JobLabelled():
            return f"was labelled {event.why}"
        case JobNoted():
            by = f" by {event.who}" if event.who else ""
            return f"has a note{by}: {event.text}" if event.text else f"lost its notes{by}"
        case JobWaited():
            return f"has been waiting for {duration_text(event.waited_ms)}"
        case _:
            assert_never(event)


def about_rule(event: RuleSet | RuleRemoved) -> str:
    by = f" by {event.who}" if event.who else ""
    if isinstance(event, RuleRemoved):
        return f"rule {event.rule} for notices was removed{by}"
    return f"rule {event.rule.id} for notices was added{by}: {masked(event.rule.wish)}"
