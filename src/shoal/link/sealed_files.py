"""Kept files of jobs that ask for encryption: AES-GCM in chunks, bound to job, path and order.

    header   magic, name of the key, salt, size of the clear text
    chunks   each as large as a piece on the wire; the header takes a part of the first one

The key of a file is derived from the job's key, the header, and the file's place. The number of a
chunk and whether it is the last one are in its nonce. So a chunk that was changed, moved, left out
or taken from another file is noticed. An older copy of the same file is not.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator

import msgspec

from shoal.model.kept import PIECE_BYTES, Kind

MAGIC = b"SHOALGCM"
NAME_BYTES, SALT_BYTES, SIZE_BYTES, TAG_BYTES = 8, 24, 8, 16
HEADER_BYTES = len(MAGIC) + NAME_BYTES + SALT_BYTES + SIZE_BYTES
CHUNK_BYTES = PIECE_BYTES - TAG_BYTES  # of clear text
FIRST_BYTES = CHUNK_BYTES - HEADER_BYTES

_encode = msgspec.msgpack.Encoder().encode


class SealError(Exception):
    """Why a file cannot be decrypted, in words that follow its name."""


def sealed_size(size: int) -> int:
    chunks = 1 + -(-max(0, size - FIRST_BYTES) // CHUNK_BYTES)
    return HEADER_BYTES + size + chunks * TAG_BYTES


def clear_size(size: int) -> int:
    """Of a file with this many encrypted bytes; none if there cannot be one."""
    return max(0, size - HEADER_BYTES - -(-size // PIECE_BYTES) * TAG_BYTES)


def start(chunk: int) -> int:
    """Where the clear text of a chunk begins."""
    return FIRST_BYTES + (chunk - 1) * CHUNK_BYTES if chunk else 0


class SealedFile:
    """One file at one place. Without a header, it is a file that is about to be encrypted."""

    def __init__(
        self, key: bytes, job: str, kind: Kind, path: str, size: int, header: bytes = b""
    ) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        salt = secrets.token_bytes(SALT_BYTES)
        own = MAGIC + key_name(key) + salt + size.to_bytes(SIZE_BYTES, "big")
        self.header = header or own
        self.size = size
        self.last = (sealed_size(size) - 1) // PIECE_BYTES
        place = b"shoal file 1" + _encode((job, kind.value, path)) + self.header
        self._box = AESGCM(HKDF(SHA256(), 32, salt=None, info=place).derive(key))

    def seal(self, handle: int, chunk: int) -> bytes:
        """The piece with this number of the open file. EOFError if it has become shorter."""
        begin, end = start(chunk), min(self.size, start(chunk + 1))
        clear = os.pread(handle, end - begin, begin)
        if len(clear) < end - begin:
            raise EOFError
        box = self._box.encrypt(self._nonce(chunk), clear, None)
        return box if chunk else self.header + box

    def open(self, chunk: int, piece: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        box = piece if chunk else piece[HEADER_BYTES:]
        try:
            return self._box.decrypt(self._nonce(chunk), box, None)
        except (InvalidTag, ValueError):
            raise SealError("is damaged: it is not what was encrypted at this place") from None

    def open_all(self, chunk: int, data: bytes) -> Iterator[bytes]:
        """Clear text of the pieces from this one on."""
        for begin in range(0, len(data), PIECE_BYTES):
            yield self.open(chunk, data[begin : begin + PIECE_BYTES])
            chunk += 1

    def _nonce(self, chunk: int) -> bytes:
        return chunk.to_bytes(11, "big") + bytes([chunk == self.last])


def opened(key: bytes, job: str, kind: Kind, path: str, size: int, head: bytes) -> SealedFile:
    """To decrypt a file of `size` encrypted bytes that begins with `head`."""
    header = head[:HEADER_BYTES]
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise SealError("is not encrypted, although its job asked for it")
    if header[len(MAGIC) :][:NAME_BYTES] != key_name(key):
        raise SealError(
            "was encrypted with another key than the tenant's secret encryption-key has now; set "
            "the earlier value again to read it"
        )
    clear = int.from_bytes(header[-SIZE_BYTES:], "big")
    if sealed_size(clear) != size:
        raise SealError(f"is damaged: it has {size} bytes instead of {sealed_size(clear)}")
    return SealedFile(key, job, kind, path, clear, header)


def key_name(key: bytes) -> bytes:
    """It tells keys apart, and says nothing else about them."""
    return hashlib.sha256(b"shoal files " + key).digest()[:NAME_BYTES]
