"""The storage of nodes: what they are asked to measure, and what they measured."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from shoal.model.fabric import CheckNetwork

TARGET_MAX = 1_000
# They can be written, and a wrong one cannot reach the node's own files.
SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci")
# The figures of a storage check; MB are 1,000,000 bytes.
WRITE_MBS, READ_MBS, SMALL_PER_S = "storage_write_mbs", "storage_read_mbs", "storage_small_per_s"
LATE_MS = "storage_late_ms"  # it began this much after the others
PHASE_MS, PHASE_MS_MIN, PHASE_MS_MAX = 2_000, 100, 20_000
# A phase that is together with others' begins this much after the one before must have ended.
PAUSE_MS = 1_500
PHASES = 3  # writing, reading, small files

_SCHEME = re.compile(r"([a-z0-9]+)://[^/]")
PhaseMs = Annotated[int, msgspec.Meta(ge=PHASE_MS_MIN, le=PHASE_MS_MAX)]


class Storage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Write, read and remove files in a new folder at the target."""

    target: str  # an absolute path, or a URL
    nodes: int = 1  # as many may use the same disk at the same time
    at_ms: int = 0  # when all of them begin, by the wall clock; 0: at once
    phase_ms: PhaseMs = PHASE_MS
    limit_ms: int = 60_000


class CheckStorage(msgspec.Struct, frozen=True):
    """Measure the storage at a path or URL from these nodes, or from all that are ready: some of
    them alone, then all of them together."""

    target: str
    nodes: tuple[str, ...] = ()
    phase_ms: int = PHASE_MS
    who: str = "a user"


Measurement = CheckNetwork | CheckStorage  # requests that several nodes answer together


class StorageRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    target: str
    nodes: list[str] = []
    phase_ms: PhaseMs = PHASE_MS


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one node measured; `problem` says why there are no figures."""

    node: str
    write_mbs: int = 0
    read_mbs: int = 0
    small_per_s: int = 0
    busy: bool = False  # jobs ran there meanwhile
    notes: tuple[str, ...] = ()
    problem: str = ""


class StorageView(msgspec.Struct, kw_only=True):
    """A storage check, under way while `ended_ms` is None."""

    id: str
    target: str = ""
    nodes: list[str] = []
    begun_ms: int = 0
    until_ms: int = 0
    ended_ms: int | None = None
    alone: list[Rates] = []  # one node after the other
    together: list[Rates] = []  # all nodes at the same time
    doing: str = ""
    notes: list[str] = []


def target_problem(target: str) -> str:
    """'' if it is an absolute path, or a URL that can be written."""
    if not target or len(target) > TARGET_MAX or not target.isprintable():
        return f"must be a path or URL of at most {TARGET_MAX} printable characters"
    if "://" in target or "::" in target:
        scheme = _SCHEME.match(target)
        if scheme is None or scheme[1] not in SCHEMES or "::" in target:
            return f"must be an absolute path, or a URL with {', '.join(SCHEMES)}"
        if "@" in target.partition("://")[2].partition("/")[0]:
            return "contains a password that everyone can read; set it in the agents' environment"
        return ""
    if not target.startswith("/"):
        return f"must be an absolute path, because every node opens it: not {target[:80]!r}"
    if ".." in target.split("/"):
        return "must not contain '..'"
    return ""
