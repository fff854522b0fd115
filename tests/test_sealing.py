"""Secrets on their way: the agent that asked can open them, and nobody else."""

from __future__ import annotations

import msgspec

from shoal.link.sealing import Opener, seal
from shoal.model.job import MemberRef
from shoal.model.secret import SecretsOf, SecretValue

REF = MemberRef("j1", 1, 0)
SECRETS = SecretsOf(REF, (SecretValue("token", b"canary-5511", "VAR"),), b"me:canary-5511")


def test_only_the_one_that_asked_can_open_them() -> None:
    asked, other = Opener(), Opener()
    sealed = seal(SECRETS, asked.public)
    assert sealed is not None
    assert b"canary" not in msgspec.msgpack.encode(sealed)
    assert asked.open(sealed) == SECRETS
    assert other.open(sealed) is None


def test_what_was_changed_on_the_way_is_not_opened() -> None:
    asked = Opener()
    sealed = seal(SECRETS, asked.public)
    assert sealed is not None
    flipped = bytes([sealed.box[0] ^ 1]) + sealed.box[1:]
    replace = msgspec.structs.replace
    for wrong in (
        replace(sealed, box=flipped),
        replace(sealed, box=b""),
        replace(sealed, public=b"short"),
        replace(sealed, public=bytes(32)),
        replace(sealed, ref=MemberRef("j1", 2, 0)),
    ):
        assert asked.open(wrong) is None


def test_nothing_is_sealed_for_what_is_not_a_key() -> None:
    for public in (b"", b"short", bytes(32), bytes(33)):
        assert seal(SECRETS, public) is None


def test_values_are_not_in_what_python_prints_of_them() -> None:
    assert "canary" not in repr(SECRETS) + str(SECRETS) + repr(SECRETS.values[0])
