"""The neighbors that this cluster knows, with their tokens: a private file of the home, or a
setting in the heads' database."""

from __future__ import annotations

import re

import msgspec

from shoal.control.stores import NEIGHBORS
from shoal.database.formats import VERSION
from shoal.database.settings import Settings
from shoal.ports import StoreDamaged


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """An empty certificate: the system decides whom to trust. `cluster`, `tenant`: its id, and what
    we are there, as it said when it was added."""

    url: str
    token: str
    certificate: str = ""
    cluster: str = ""
    tenant: str = ""

    def __repr__(self) -> str:  # a traceback must not show the token
        return f"Known({self.url})"


def read_known(settings: Settings) -> dict[str, Known]:
    body = settings.get(NEIGHBORS)
    try:
        return msgspec.json.decode(body, type=dict[str, Known]) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"{NEIGHBORS} is damaged ({error})"
        raise StoreDamaged(f"{text}; remove it, and add the neighbors again") from None


def write_known(settings: Settings, known: dict[str, Known]) -> None:
    if known:
        settings.set(NEIGHBORS, msgspec.json.format(msgspec.json.encode(known)) + b"\n")
    else:
        settings.remove(NEIGHBORS)


_RELEASE = re.compile(r"(\d+)\.(\d+)")


def problem_with_version(theirs: str, ours: str = VERSION) -> str:
    """Empty if two clusters of these versions understand each other: one release apart."""
    found, own = _RELEASE.match(theirs), _RELEASE.match(ours)
    if found and own and found[1] == own[1] and abs(int(found[2]) - int(own[2])) <= 1:
        return ""
    text = f"it runs Shoal {theirs[:20]!r}, and this cluster {ours}"
    return f"{text}: they may be one release apart; upgrade the older one"
