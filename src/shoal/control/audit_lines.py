"""The lines of the audit log. Each has a hash of itself and the line before it, so that a change of
the past shows."""

from __future__ import annotations

import hashlib
import re

import msgspec

from shoal.model.audit import AuditEntry

FIRST_HASH = "0" * 64  # before the first line ever
_HASH_FIELD = b',"hash":"'
_SECRET = re.compile(r"(shoal_[A-Za-z0-9]{1,16}_)[^/\s]+")


def sealed(entry: AuditEntry, prev: str) -> tuple[bytes, str]:
    """The entry as a line without its end, and the line's hash."""
    body = msgspec.json.encode(msgspec.structs.replace(entry, hash=""))
    hash_ = _hash(prev, body)
    return body[:-1] + _HASH_FIELD + hash_.encode() + b'"}', hash_


def opened(line: bytes, prev: str) -> AuditEntry | None:
    """The entry of a line, if it is unchanged and follows the line with the hash `prev`."""
    head, mark, tail = line.rpartition(_HASH_FIELD)
    if not mark or tail[-2:] != b'"}' or _hash(prev, head + b"}").encode() != tail[:-2]:
        return None
    try:
        return msgspec.json.decode(line, type=AuditEntry)
    except msgspec.DecodeError:
        return None


def without_secret(text: str) -> str:
    """Somebody may put a whole token where its id belongs."""
    return _SECRET.sub(r"\1...", text)


def _hash(prev: str, body: bytes) -> str:
    return hashlib.sha256(prev.encode() + body).hexdigest()
