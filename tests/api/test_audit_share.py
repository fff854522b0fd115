"""How much of the audit log one tenant may take, whatever its requests do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from shoal.api.audit import HANDLER, HOUR_MS, MINUTE_MS, SAME_MAX, TENANT_MAX, Auditor
from shoal.api.principal import SCOPE, Principal
from shoal.control.audit import AuditQueue
from shoal.model.identity import Role
from shoal.model.people import AuditEntry


class Kept:
    """A log in memory."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []
        self.now_ms = 1_000_000_000

    async def write(self, entry: AuditEntry) -> None:
        self.entries.append(entry)

    def of(self, who: str) -> list[AuditEntry]:
        return [entry for entry in self.entries if entry.who == who]


def made() -> tuple[Kept, Auditor]:
    kept = Kept()
    return kept, Auditor(cast(AuditQueue, kept), lambda: kept.now_ms)


def ask(
    auditor: Auditor, user: str, verb: str, status: int = 200, role: Role = Role.MEMBER
) -> None:
    tenant = "*" if role is Role.ADMIN else "red" if user.startswith("mallory") else "blue"
    who = Principal(user=user, tenant=tenant, role=role, token=f"t{user}")
    scope: Any = {HANDLER: SimpleNamespace(verb=verb), SCOPE: who, "method": "POST"}
    asyncio.run(auditor.answered(scope, status))


def test_requests_that_change_nothing_leave_the_log_to_others() -> None:
    kept, auditor = made()
    ask(auditor, "ann", "jobs.cancel")
    for number in range(3 * SAME_MAX):
        kept.now_ms += 10
        ask(auditor, "mallory", "jobs.label", status=(200, 400, 409, 422)[number % 4])
        if not number % 300:
            ask(auditor, "ann", "jobs.cancel")
    assert len(kept.of("mallory")) <= SAME_MAX + 600
    assert len(kept.of("ann")) == 7, "each of hers has its line"


def test_no_number_of_verbs_or_users_takes_more_than_the_share_of_a_tenant() -> None:
    kept, auditor = made()
    for number in range(2 * TENANT_MAX):
        ask(auditor, f"mallory{number % 100}", f"verb{number % 7}")
    kinds = 100 * 7
    assert len(kept.entries) <= TENANT_MAX + kinds


def test_every_user_and_verb_stays_visible_with_the_number_of_requests() -> None:
    kept, auditor = made()
    for _ in range(SAME_MAX + 50):
        ask(auditor, "mallory", "jobs.submit")
    ask(auditor, "mallory", "secrets.set")
    kept.now_ms += MINUTE_MS
    ask(auditor, "mallory", "jobs.submit")
    last = kept.of("mallory")[-2:]
    assert [(one.verb, one.skipped) for one in last] == [("secrets.set", 0), ("jobs.submit", 50)]
    kept.now_ms += HOUR_MS
    for _ in range(10):
        ask(auditor, "mallory", "jobs.submit")
    assert [one.skipped for one in kept.of("mallory")[-10:]] == [0] * 10


def test_what_admins_do_always_has_a_line() -> None:
    kept, auditor = made()
    for _ in range(SAME_MAX + 50):
        ask(auditor, "root", "users.set", role=Role.ADMIN)
    assert len(kept.of("root")) == SAME_MAX + 50
