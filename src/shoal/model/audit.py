"""The audit log: who did or tried what, when, from where, and how it ended."""

from __future__ import annotations

import msgspec


class AuditEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`verb` is what was asked (as `jobs.cancel`) and `on` is what of (as `j7`). `status` is the
    answer's. `source` is the sender's address, or `socket` for the socket file of the home.
    `skipped` counts the requests before this line that were too many to write: refused ones, and
    those of the same user with the same verb. `prev` is the hash of the line before, in the first
    line of a file only. In a cluster with a database, `id` names the line, and `via` the head that
    was asked."""

    seq: int
    at_ms: int
    who: str = ""
    tenant: str = ""
    token: str = ""
    verb: str = ""
    on: str = ""
    status: int = 0
    source: str = ""
    skipped: int = 0
    id: str = ""
    via: str = ""
    prev: str = ""
    hash: str = ""

    @property
    def outcome(self) -> str:
        if self.status < 400:
            return "done"
        return "refused" if self.status < 500 else "failed"


class AuditView(msgspec.Struct, kw_only=True):
    """The newest entries first. `head` is the hash of the newest line of all."""

    entries: list[AuditEntry]
    head: str


class Mark(msgspec.Struct, frozen=True):
    """The newest line that is known to be on the disk, kept beside the log."""

    seq: int
    hash: str
