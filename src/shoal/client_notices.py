"""The part of the client that finds, labels and notes jobs, and changes rules for notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from shoal.model.finding import JobFilter
from shoal.model.notice import NoticeSettings, RulesView, SigningKey
from shoal.model.views import Done

Answer = TypeVar("Answer")


class Calls(Protocol):
    """What these calls need of the client."""

    def _call(
        self,
        method: str,
        kind: type[Answer],
        *parts: str,
        body: bytes | None = None,
        **query: Any,
    ) -> Answer: ...


def query_of(wanted: JobFilter) -> dict[str, Any]:
    given = {
        "user": wanted.user,
        "tenant": wanted.tenant,
        "name": wanted.name,
        "state": ",".join(wanted.states),
        "label": list(wanted.labels),
        "since_ms": wanted.since_ms,
        "on_node": wanted.node,
        "array": wanted.array,
        "q": wanted.text,
        "service": wanted.service,
        "until_ms": wanted.until_ms,
    }
    return {name: value for name, value in given.items() if value}


class NoticeCalls:
    def label_job(self: Calls, job_id: str, labels: Mapping[str, str | None]) -> Done:
        """Sets labels of a job, live or ended; None removes one."""
        body = msgspec.json.encode({"labels": dict(labels)})
        return self._call("POST", Done, "jobs", job_id, "labels", body=body)

    def note_job(self: Calls, job_id: str, text: str) -> Done:
        """Writes a note about a job, live or ended; an empty text removes all of its notes."""
        body = msgspec.json.encode({"text": text})
        return self._call("POST", Done, "jobs", job_id, "notes", body=body)

    def rules(self: Calls) -> RulesView:
        """Your rules for notices, and how their receivers are doing."""
        return self._call("GET", RulesView, "rules")

    def add_rule(self: Calls, wish: str, *, everyone: bool = False) -> Done:
        """`wish` is WHAT=WHERE, e.g. failed=https://chat.example.com/hook. With `everyone`, about
        the jobs of all users of your tenant."""
        body = msgspec.json.encode({"wish": wish, "everyone": everyone})
        return self._call("POST", Done, "rules", body=body)

    def remove_rule(self: Calls, rule: str) -> Done:
        return self._call("DELETE", Done, "rules", rule)

    def test_rule(self: Calls, to: str) -> Done:
        """Sends a notice to a rule's receiver, or to this one. `note` says what went wrong."""
        body = msgspec.json.encode({"to": to})
        return self._call("POST", Done, "rules", "test", body=body)

    def notice_key(self: Calls) -> SigningKey:
        """Webhooks of your tenant are signed with it."""
        return self._call("GET", SigningKey, "rules", "key")

    def notice_settings(self: Calls) -> NoticeSettings:
        return self._call("GET", NoticeSettings, "rules", "settings")

    def set_notice_settings(self: Calls, settings: NoticeSettings) -> NoticeSettings:
        body = msgspec.json.encode(settings)
        return self._call("PUT", NoticeSettings, "rules", "settings", body=body)
