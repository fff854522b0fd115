"""Which jobs somebody looks for: by user, tenant, name, state, labels, age and node."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from shoal.model.job import Job, Outcome, Phase
from shoal.model.labels import CONDITION_PATTERN, CONDITIONS_MAX, meets, words_of

LIVE = tuple(phase.value for phase in Phase if phase is not Phase.FINISHED)
ENDED = tuple(outcome.value for outcome in Outcome)
STATES = (*LIVE, *ENDED, "live", "finished")
NAME_CHARACTERS_MAX = 128

Word = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A job must meet everything that is given. `name` is a pattern, as shells have it. `states`:
    any of them; `labels`: conditions such as run=a, run=a|b, run!=a, run and !run. `since_ms`:
    submitted, started or ended since then. `node`: its newest attempt is or was there."""

    user: Word = ""
    tenant: Word = ""
    name: Word = ""
    states: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    since_ms: int = 0
    node: Word = ""
    array: Word = ""  # in a list: the elements of this array; empty: no elements

    @property
    def given(self) -> bool:
        return self != EVERY_JOB

    @property
    def only_live(self) -> bool:
        return bool(self.states) and not {*self.states} & {*ENDED, "finished"}

    @property
    def only_ended(self) -> bool:
        return bool(self.states) and not {*self.states} & {*LIVE, "live"}

    def problem(self) -> tuple[str, str] | None:
        """The field that is wrong, and how it should be."""
        for state in self.states:
            if state not in STATES:
                return "state", f"is one of {', '.join(STATES)}"
        if len(self.labels) > CONDITIONS_MAX:
            return "label", f"at most {CONDITIONS_MAX} conditions can be given"
        for condition in self.labels:
            if not re.fullmatch(CONDITION_PATTERN, condition):
                return "label", "write key=value, key=a|b, key!=value, key or !key"
        return None

    def matches(self, job: Job) -> bool:
        spec = job.spec
        return (
            self.user in ("", spec.user)
            and self.tenant in ("", spec.tenant)
            and (not self.name or fnmatchcase(spec.name or "", self.name))
            and (not self.states or self._in_state(job))
            and self.since_ms <= max(job.submitted_ms, job.running_ms or 0, job.finished_ms or 0)
            and (not self.node or any(self.node == one.slice.node for one in job.members))
            and (not self.labels or self._labelled(spec.labels))
        )

    def _in_state(self, job: Job) -> bool:
        ended = job.outcome is not None
        state = job.outcome.value if job.outcome is not None else job.phase.value
        return state in self.states or ("finished" if ended else "live") in self.states

    def _labelled(self, labels: dict[str, str]) -> bool:
        words = words_of(labels)
        return all(meets(condition, words) for condition in self.labels)


EVERY_JOB = JobFilter()
