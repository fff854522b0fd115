"""What can happen to rules for notices, and to labels, notes and waits of jobs."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.durations import duration_text
from shoal.model.eventbase import EventBase, JobEvent, Reader
from shoal.model.notice import Rule, masked
from shoal.model.phrases import by


class JobLabelled(JobEvent, frozen=True, kw_only=True):
    """These are all labels that the job has now. The job may have ended long ago."""

    labels: dict[str, str]
    why: str = ""

    def phrase(self) -> str:
        return f"was labelled {self.why}"


class JobNoted(JobEvent, frozen=True, kw_only=True):
    """Somebody wrote a note about the job; an empty one removes all notes."""

    text: str
    who: str = ""

    def phrase(self) -> str:
        author = by(self.who)
        return f"has a note{author}: {self.text}" if self.text else f"lost its notes{author}"


class JobWaited(JobEvent, frozen=True, kw_only=True):
    """The job has been waiting for this long, and somebody wants to know."""

    since_ms: int
    waited_ms: int

    def phrase(self) -> str:
        return f"has been waiting for {duration_text(self.waited_ms)}"


class RuleEvent(EventBase, frozen=True, kw_only=True):
    """Shown to admins, and to the tenant that the rule belongs to."""

    tenant: str
    who: str = ""

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.tenant, self.at_ms)


class RuleSet(RuleEvent, frozen=True, kw_only=True):
    rule: Rule

    @property
    def subject(self) -> str:
        return f"rule {self.rule.id}"

    def phrase(self) -> str:
        return f"for notices was added{by(self.who)}: {masked(self.rule.wish)}"

    def without_secrets(self) -> Self:
        rule = msgspec.structs.replace(self.rule, wish=masked(self.rule.wish))
        return msgspec.structs.replace(self, rule=rule)


class RuleRemoved(RuleEvent, frozen=True, kw_only=True):
    rule: str

    @property
    def subject(self) -> str:
        return f"rule {self.rule}"

    def phrase(self) -> str:
        return f"for notices was removed{by(self.who)}"
