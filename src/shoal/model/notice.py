"""Notices: messages about jobs, budgets and nodes, and the rules that say who gets which.

A *wish* is text, as people write it: `failed,waiting:1h=https://chat.example.com/hook`. Before the
`=` is what to report, behind it is the *receiver*: a URL (a webhook), `slack:URL`, `mail:ADDRESS`,
or `@NAME` and `slack:@NAME`, where the URL is a secret of the tenant.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from shoal.model.durations import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

WAITING_MS = HOUR_MS  # a wait is reported after this long, unless the wish says otherwise
WAITING_MS_MAX = 366 * DAY_MS
WISH_CHARACTERS_MAX = 1_000
WISHES_MAX = 16  # of one job
RULES_MAX = 2_000
RULES_PER_USER_MAX = 50

_TIME = r"(?:[0-9]{1,9}(?:ms|s|m|h|d))+"
_WHAT = rf"(?:started|ended|failed|budget|node-lost|missed-run|waiting(?::{_TIME})?)"
_URL = r"https?://[!-~]+"
_NAME = r"@[A-Za-z][A-Za-z0-9._-]{0,62}"
_WHERE = rf"(?:(?:slack:)?(?:{_URL}|{_NAME})|mail:[A-Za-z0-9._%+'-]{{1,64}}@[A-Za-z0-9.-]{{1,253}})"
WISH_PATTERN = rf"^(?:{_WHAT}(?:,{_WHAT})*=)?{_WHERE}(?!\n)$"
_WISH = re.compile(rf"(?:(?P<on>{_WHAT}(?:,{_WHAT})*)=)?(?P<to>{_WHERE})")
_UNIT_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}

Wish = Annotated[str, msgspec.Meta(pattern=WISH_PATTERN, max_length=WISH_CHARACTERS_MAX)]


class What(enum.StrEnum):
    """What a notice is about."""

    STARTED = "started"
    ENDED = "ended"
    FAILED = "failed"
    WAITING = "waiting"
    BUDGET = "budget"
    NODE_LOST = "node-lost"
    MISSED_RUN = "missed-run"


OF_JOBS = (What.STARTED, What.ENDED, What.FAILED, What.WAITING)


class Wanted(NamedTuple):
    """A wish, taken apart. `waiting_ms` is 0 if waits are not to be reported."""

    on: tuple[What, ...]
    waiting_ms: int
    to: str


@lru_cache(maxsize=4096)
def wanted_of(wish: str) -> Wanted:
    """ValueError if the text is not a wish."""
    found = _WISH.fullmatch(wish)
    if found is None:
        raise ValueError("is not WHAT=WHERE")
    on: dict[What, None] = {}
    waiting_ms = 0
    for word in (found["on"] or What.ENDED.value).split(","):
        kind, _, time = word.partition(":")
        on[What(kind)] = None
        if kind == What.WAITING:
            waiting_ms = _milliseconds(time) if time else WAITING_MS
    return Wanted(tuple(on), waiting_ms, found["to"])


def _milliseconds(text: str) -> int:
    parts = re.findall(r"([0-9]+)(ms|s|m|h|d)", text)
    return max(1, min(WAITING_MS_MAX, sum(int(count) * _UNIT_MS[unit] for count, unit in parts)))


def masked(wish: str) -> str:
    """The wish without what could be secret in it: a URL is cut after the host."""
    try:
        to = wanted_of(wish).to
    except ValueError:
        return "https://..."
    return f"{wish[: len(wish) - len(to)]}{masked_receiver(to)}"


def masked_receiver(to: str) -> str:
    kind, url = ("slack:", to[6:]) if to.startswith("slack:") else ("", to)
    if not url.startswith("http"):
        return to
    found = re.fullmatch(r"(https?://)(?:[^/?#]*@)?([A-Za-z0-9.:\[\]-]*)(.*)", url)
    if found is None:
        return f"{kind}https://..."
    return f"{kind}{found[1]}{found[2]}{'/...' if found[3].strip('/') else ''}"


def secret_of(to: str) -> str:
    """The name of the secret that holds the URL; empty if the receiver names it itself."""
    place = to.removeprefix("slack:")
    return place[1:] if place.startswith("@") else ""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Sends notices to one receiver of a user: about the user's own jobs in this tenant, or with
    `everyone` about those of all its users. The rule of an admin for "*" is about every tenant."""

    id: str
    owner: str  # a user's name, or that of the operator
    tenant: str
    wish: Wish
    everyone: bool = False
    since_ms: int = 0


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message for one receiver. `id` stays the same however often it is sent."""

    id: str
    what: What
    at_ms: int
    text: str
    to: str
    tenant: str  # whose secrets name the receiver
    trusted: bool = False  # an operator asked for it: it may go to the head's own addresses
    job: str = ""
    name: str = ""
    user: str = ""
    of_tenant: str = ""
    state: str = ""
    code: int | None = None
    why: str = ""
    node: str = ""
    labels: dict[str, str] = {}


def secrets_named(wishes: Iterable[str]) -> list[str]:
    """The names of the secrets that hold receivers' URLs."""
    return [name for wish in wishes if (name := secret_of(wanted_of(wish).to))]


class Encryption(enum.StrEnum):
    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"


class Smtp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server that takes mail. `password` is the name of a secret of the tenant default."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    sender: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}@[A-Za-z0-9.-]{1,253}(?!\n)$")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 587
    encryption: Encryption = Encryption.STARTTLS
    user: Annotated[str, msgspec.Meta(max_length=256)] = ""
    password: Annotated[str, msgspec.Meta(max_length=63)] = ""


class NoticeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an admin decides. `allow`: networks at the head itself that tenants' webhooks may reach,
    such as 127.0.0.1/32; without it they reach neither the head nor link-local addresses."""

    smtp: Smtp | None = None
    allow: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)
    ] = ()


class ReceiverView(msgspec.Struct, frozen=True, kw_only=True):
    """How a receiver is doing. `error`: why the last attempt failed; empty if it did not."""

    to: str
    waiting: int = 0
    delivered: int = 0
    failed: int = 0  # attempts
    dropped: int = 0  # notices that were given up
    delivered_ms: int = 0  # when the last one was delivered; 0: none was
    error: str = ""
    again_ms: int = 0  # it is not tried before this time


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    tenant: str
    wish: str  # a URL is cut after the host
    everyone: bool
    since_ms: int
    receiver: ReceiverView


class RulesView(msgspec.Struct, frozen=True, kw_only=True):
    """`others`: receivers that jobs named themselves."""

    rules: list[RuleView]
    others: list[ReceiverView] = []


class NewRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wish: Wish
    everyone: bool = False


class NoticeTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule's id, or a wish or receiver."""

    to: Annotated[str, msgspec.Meta(max_length=WISH_CHARACTERS_MAX)]


class SigningKey(msgspec.Struct, frozen=True, kw_only=True):
    """With it, receivers of webhooks verify who sent a notice."""

    key: str
