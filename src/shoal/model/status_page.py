"""The public status page: whether there is one, and what it shows to everybody."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator tells visitors; `over` when it is resolved."""

    at_ms: Annotated[int, msgspec.Meta(ge=0, le=4_102_444_800_000)]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    over: bool = False


class StatusPage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Off unless somebody switches it on. A service is named only if it is listed here."""

    on: bool = False
    title: Annotated[str, msgspec.Meta(max_length=80)] = "Status"
    services: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=63)], ...], msgspec.Meta(max_length=50)
    ] = ()
    incidents: Annotated[tuple[Incident, ...], msgspec.Meta(max_length=20)] = ()
