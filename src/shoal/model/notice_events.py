"""What can happen to rules for notices, and to labels, notes and waits of jobs."""

from __future__ import annotations

from shoal.model.eventbase import EventBase, JobEvent
from shoal.model.notice import Rule


class JobLabelled(JobEvent, frozen=True, kw_only=True):
    """These are all labels that the job has now. The job may have ended long ago."""

    labels: dict[str, str]
    why: str = ""


class JobNoted(JobEvent, frozen=True, kw_only=True):
    """Somebody wrote a note about the job; an empty one removes all notes."""

    text: str
    who: str = ""


class JobWaited(JobEvent, frozen=True, kw_only=True):
    """The job has been waiting for this long, and somebody wants to know."""

    since_ms: int
    waited_ms: int


class RuleEvent(EventBase, frozen=True, kw_only=True):
    """Shown to admins, and to the tenant that the rule belongs to."""

    tenant: str
    who: str = ""


class RuleSet(RuleEvent, frozen=True, kw_only=True):
    rule: Rule


class RuleRemoved(RuleEvent, frozen=True, kw_only=True):
    rule: str
