"""Rules for notices at the API: added, listed, tried and removed. URLs are shown up to the host."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from typing import Annotated

from msgspec import Meta

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Request, State
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.api.secrets import refuse_unknown_receivers
from shoal.calls.people import NoticeCalls
from shoal.control.notices.outbox import receiver_key
from shoal.control.notices.posting import Posting
from shoal.control.secretstore import tenant_since_ms
from shoal.model.identity import EVERY_TENANT, OPERATOR
from shoal.model.job import DEFAULT_TENANT
from shoal.model.notice import (
    NewRule,
    Notice,
    NoticeSettings,
    NoticeTest,
    ReceiverView,
    Rule,
    RulesView,
    RuleView,
    SigningKey,
    What,
    masked,
    wanted_of,
)
from shoal.model.report import RemoveRule, SetRule
from shoal.model.views import Done

POSTING = "posting"  # in the application's state
EVERYWHERE = (What.NODE_LOST,)

RuleId = Annotated[str, Meta(max_length=32)]


class Rules:
    """A rule is its owner's; admins see and remove those of others."""

    @handles(NoticeCalls.rules)
    async def listing(self, reach: Reach, state: State) -> RulesView:
        posting, who = _posting(state), reach.who
        rules = [rule for rule in reach.loop.state.rules.values() if _own(reach, rule)]
        tenant = "" if who.admin else who.tenant
        known = await asyncio.to_thread(posting.outbox.views, tenant)
        used = {receiver_key(_home(rule.tenant), wanted_of(rule.wish).to): rule for rule in rules}
        others = [view for key, view in known.items() if key not in used]
        return RulesView(rules=[_view(rule, known) for rule in rules], others=others)

    @handles(NoticeCalls.add_rule)
    async def add(self, request: Request, reach: Reach, data: NewRule) -> Done:
        who = reach.who
        tenant = who.tenant
        if tenant == EVERY_TENANT and not who.token and not data.everyone:
            tenant = DEFAULT_TENANT
        for what in wanted_of(data.wish).on:
            if what in EVERYWHERE and not who.sees_all:
                raise Refusal(403, f"{what} is about the whole cluster; ask an admin", "wish")
        refuse_unknown_receivers(reach.loop, _home(tenant), (data.wish,))
        rule = Rule(
            id="", owner=_owner(reach), tenant=tenant, wish=data.wish, everyone=data.everyone
        )
        answer = accepted(await reach.loop.request(SetRule(rule, reach.name)))
        note(request.scope, on=answer.id)
        return Done(id=answer.id, note=answer.note)

    @handles(NoticeCalls.remove_rule)
    async def remove(self, reach: Reach, rule_id: RuleId) -> Done:
        owner = "" if reach.who.admin else _owner(reach)
        answer = accepted(await reach.loop.request(RemoveRule(rule_id, owner, reach.name)))
        return Done(id=answer.id, note=answer.note)

    @handles(NoticeCalls.test_rule)
    async def test(self, reach: Reach, state: State, data: NoticeTest) -> Done:
        rule = reach.loop.state.rules.get(data.to)
        if rule is not None and _own(reach, rule):
            tenant, to = _home(rule.tenant), wanted_of(rule.wish).to
        else:
            try:
                tenant, to = _home(reach.who.tenant), wanted_of(data.to).to
            except ValueError:
                message = "is neither one of your rules nor a receiver; see: shoal notify"
                raise Refusal(422, message, "to") from None
            refuse_unknown_receivers(reach.loop, tenant, (data.to,))
        notice = Notice(
            id=f"n_test_{secrets.token_hex(8)}",
            what=What.ENDED,
            at_ms=reach.loop.clock.now_ms(),
            text=f"a test by {reach.name}: notices arrive here",
            to=to,
            tenant=tenant,
            trusted=not reach.who.token,
        )
        problem = await _posting(state).test(notice)
        return Done(id=masked(data.to) if rule is None else rule.id, note=problem)

    @handles(NoticeCalls.notice_key)
    def key(self, reach: Reach, state: State) -> SigningKey:
        tenant = _home(reach.who.tenant)
        since_ms = tenant_since_ms(reach.loop.state.identity, tenant)
        return SigningKey(key=_posting(state).key(tenant, since_ms))

    @handles(NoticeCalls.notice_settings)
    def settings(self, state: State) -> NoticeSettings:
        return _posting(state).settings

    @handles(NoticeCalls.set_notice_settings)
    async def set_settings(
        self, reach: Reach, state: State, data: NoticeSettings
    ) -> NoticeSettings:
        for text in data.allow:
            try:
                ipaddress.ip_network(text)
            except ValueError:
                raise Refusal(422, "holds networks such as 127.0.0.1/32", "allow") from None
        if data.smtp is not None and data.smtp.password:
            refuse_unknown_receivers(reach.loop, DEFAULT_TENANT, (f"@{data.smtp.password}",))
        await asyncio.to_thread(_posting(state).set_settings, data)
        return data


def _owner(reach: Reach) -> str:
    return reach.who.user if reach.who.token else OPERATOR


def _own(reach: Reach, rule: Rule) -> bool:
    return reach.who.admin or (
        rule.owner == _owner(reach) and rule.tenant in (reach.who.tenant, EVERY_TENANT)
    )


def _home(tenant: str) -> str:
    """The tenant whose secrets name the receivers."""
    return DEFAULT_TENANT if tenant == EVERY_TENANT else tenant


def _view(rule: Rule, known: dict[str, ReceiverView]) -> RuleView:
    to = wanted_of(rule.wish).to
    shown = ReceiverView(to=masked(to))
    return RuleView(
        id=rule.id,
        owner=rule.owner,
        tenant=rule.tenant,
        wish=masked(rule.wish),
        everyone=rule.everyone,
        since_ms=rule.since_ms,
        receiver=known.get(receiver_key(_home(rule.tenant), to), shown),
    )


def _posting(state: State) -> Posting:
    posting: Posting | None = state.get(POSTING)
    if posting is None:
        raise Refusal(404, "this controller sends no notices")
    return posting
