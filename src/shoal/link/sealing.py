"""Secrets on their way: only the agent that asked can open them.

Between machines, messages pass through processes of Ray, which may write large ones to a disk. The
agent makes a key for each request; the controller encrypts for it. That keeps what is on the way
from readers. It does not prove who asked: the link does that, and the controller's own state.
"""

from __future__ import annotations

import msgspec

from shoal.model.secret import SealedSecrets, SecretsOf

NONCE = bytes(12)  # each key is used once
KEY_BYTES = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SecretsOf).decode


class Opener:
    """The agent's side of one request."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: SealedSecrets) -> SecretsOf | None:
        """None if it was not sealed for this request."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(sealed.public))
            key = _key(shared, self.public, sealed.public)
            found = _decode(AESGCM(key).decrypt(NONCE, sealed.box, None))
        except (InvalidTag, ValueError, msgspec.DecodeError):
            return None
        return found if found.ref == sealed.ref else None


def seal(secrets: SecretsOf, public: bytes) -> SealedSecrets | None:
    """For the agent that has made this public key; None if it is not a key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    private = X25519PrivateKey.generate()
    ours = private.public_key().public_bytes_raw()
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return None
    box = AESGCM(_key(shared, public, ours)).encrypt(NONCE, _encode(secrets), None)
    return SealedSecrets(secrets.ref, ours, box)


def _key(shared: bytes, asked: bytes, answered: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    kdf = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"shoal secrets 1" + asked + answered)
    return kdf.derive(shared)
