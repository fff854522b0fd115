"""A policy for people: its fields with what they mean, a draft of another one, and earlier ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shoal.model.policy import Policy

TEXT_MAX = 4_000_000
CHANGES_MAX = 1_000  # fields that differ; the rest is counted
RECORDS_MAX = 50


class PolicyField(msgspec.Struct, frozen=True, kw_only=True):
    """`value` and `usual` (of a policy that says nothing) are as a file would write them."""

    name: str
    about: str
    kind: Literal["time", "count", "flag", "choice", "text"]
    value: str = ""
    usual: str = ""
    choices: list[str] = []  # for a text: what is known beside users' own
    common: bool = False


class PolicyForm(msgspec.Struct, frozen=True, kw_only=True):
    """`version` names exactly this policy; empty for those who see only a part of it."""

    version: str
    policy: Policy
    text: str
    fields: list[PolicyField]
    tenant_fields: list[PolicyField]
    seq: int = 0  # of the event that set it; 0: not asked for by its event
    at_ms: int = 0
    who: str = ""


class PolicyDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole policy as a file would write it, or changes to the one in force by field. Among
    these, `tenants` holds changes by tenant; null removes one."""

    text: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] | None = None
    ending: Literal["yaml", "toml", "json"] = "yaml"
    changes: dict[str, Any] = {}


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """As a file would write the values; empty: it is not there."""

    field: str
    before: str
    after: str
    about: str = ""


class PolicyDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that could be set, beside the policy in force; `expected` is the version of that."""

    policy: Policy
    version: str
    expected: str
    text: str
    changes: list[PolicyChange]
    left_out: int = 0


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`changes`: from the policy before it, as far as the log is kept."""

    seq: int
    at_ms: int
    who: str
    name: str
    changes: list[PolicyChange] | None
    left_out: int = 0
