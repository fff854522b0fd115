"""What happens to rules for notices."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.notice import Rule, masked
from shoal.model.phrases import by


class RuleEvent(EventBase, frozen=True, kw_only=True):
    """Shown to admins, and to the tenant that the rule belongs to."""

    tenant: str
    who: str = ""

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.tenant, self.at_ms)


class RuleSet(RuleEvent, frozen=True, kw_only=True):
    rule: Rule

    def apply(self, state: State) -> None:
        state.rules[self.rule.id] = self.rule
        state.next_rule += 1
        state.agenda.waits = None  # jobs that wait already are looked at again

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

    def apply(self, state: State) -> None:
        del state.rules[self.rule]

    @property
    def subject(self) -> str:
        return f"rule {self.rule}"

    def phrase(self) -> str:
        return f"for notices was removed{by(self.who)}"
