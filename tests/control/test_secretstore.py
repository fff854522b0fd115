"""Secrets at rest: unreadable without the key, and one that is damaged harms no other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from shoal.control import secretstore
from shoal.control.alarms import Alarms
from shoal.control.secretstore import SecretError, SecretStore
from shoal.core.state.events.identity import TenantRemoved
from shoal.model.report import Report
from shoal.model.secret import registry_secret
from tests.needs import need_root

VALUE = b"hunter2-canary\0\xff"


def put(
    store: SecretStore, name: str, value: bytes = VALUE, tenant: str = "a", since: int = 0
) -> int:
    return store.put(tenant, since, name, value, by="ada", now_ms=7).version


def test_a_value_is_in_no_file_and_comes_back_in_the_next_life(tmp_path: Path) -> None:
    put(SecretStore(tmp_path / "secrets"), "token")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes()
            assert path.stat().st_mode & 0o077 == 0
    again = SecretStore(tmp_path / "secrets")
    assert again.value("a", 0, "token") == VALUE
    found = again.listing("a", 0)
    assert [(one.name, one.version, one.by, one.set_ms) for one in found] == [
        ("token", 1, "ada", 7)
    ]
    assert "hunter2" not in repr(found)


def test_setting_it_again_is_another_version_and_removing_it_leaves_nothing(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "secrets")
    assert [put(store, "token", text) for text in (b"one", b"two")] == [1, 2]
    assert store.value("a", 0, "token") == b"two"
    assert store.remove("a", 0, "token") and not store.remove("a", 0, "token")
    with pytest.raises(SecretError, match="a has no secret token"):
        store.value("a", 0, "token")
    assert not [path for path in (tmp_path / "secrets").rglob("*") if path.is_file()]


def test_a_file_cannot_take_the_place_of_another(tmp_path: Path) -> None:
    """Of another name, another tenant, or an earlier version."""
    root = tmp_path / "secrets"
    store = SecretStore(root)
    put(store, "mine", b"mine"), put(store, "theirs", b"theirs", "b"), put(store, "other", b"other")
    early = (root / "a" / "mine").read_bytes()
    put(store, "mine", b"mine again")
    for source in (root / "b" / "theirs", root / "a" / "other"):
        sealed = msgspec.json.decode(source.read_bytes(), type=secretstore.Sealed)
        forged = msgspec.structs.replace(sealed, tenant="a", name="mine")
        (root / "a" / "mine").write_bytes(msgspec.json.encode(forged))
        with pytest.raises(SecretError, match="the file of the secret mine is damaged"):
            SecretStore(root).value("a", 0, "mine")
    sealed = msgspec.json.decode(early, type=secretstore.Sealed)
    (root / "a" / "mine").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(sealed, version=2))
    )
    with pytest.raises(SecretError, match="damaged"):
        SecretStore(root).value("a", 0, "mine")


def test_damage_is_one_line_and_stops_nothing(tmp_path: Path) -> None:
    root = tmp_path / "secrets"
    store = SecretStore(root)
    put(store, "good"), put(store, "torn"), put(store, "flipped")
    (root / "a" / "torn").write_bytes(b'{"tenant"')
    sealed = msgspec.json.decode((root / "a" / "flipped").read_bytes(), type=secretstore.Sealed)
    box = bytes([sealed.box[0] ^ 1]) + sealed.box[1:]
    (root / "a" / "flipped").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(sealed, box=box))
    )
    alarms = Alarms()
    again = SecretStore(root, alarms)
    assert again.value("a", 0, "good") == VALUE
    (line,) = alarms.texts
    assert "a/torn" in line and "set these secrets again" in line
    problems = {one.name: again.problem(one) for one in again.listing("a", 0)}
    assert problems == {
        "good": "",
        "flipped": "the file of the secret flipped is damaged; set it again",
    }
    assert put(again, "torn") == 1


def test_without_the_right_key_each_value_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, key = tmp_path / "secrets", tmp_path / "secrets.key"
    put(SecretStore(root), "token")
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(SecretError, match="is missing; put it back from a backup"):
        SecretStore(root).value("a", 0, "token")
    with pytest.raises(SecretError, match="remove the secrets that need it"):
        put(SecretStore(root), "another")
    key.write_bytes(b"0" * 64)
    with pytest.raises(SecretError, match=r"another key than .*; set it again"):
        SecretStore(root).value("a", 0, "token")
    key.write_bytes(b"short")
    with pytest.raises(SecretError, match="must hold 64 hexadecimal digits"):
        SecretStore(root).value("a", 0, "token")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(kept)
    monkeypatch.setenv(secretstore.KEY_PATH, str(elsewhere))
    assert SecretStore(root).value("a", 0, "token") == VALUE
    monkeypatch.setenv(secretstore.KEY_PATH, "elsewhere")
    with pytest.raises(SecretError, match="must be an absolute path, not elsewhere"):
        put(SecretStore(root), "token")
    SecretStore(root).remove("a", 0, "token")
    monkeypatch.setenv(secretstore.KEY_PATH, str(tmp_path / "new"))
    assert put(SecretStore(root), "token") == 1, "nothing needs the old key any more"


def test_a_tenant_that_is_added_again_does_not_get_the_earlier_ones_secrets(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "secrets")
    put(store, "token", since=100)
    assert store.find("a", 200, "token") is None
    assert store.listing("a", 200) == []
    with pytest.raises(SecretError, match="has no secret"):
        store.value("a", 200, "token")
    store.stepped(Report(), [TenantRemoved(at_ms=1, tenant="a")], 1)
    assert SecretStore(tmp_path / "secrets").listing("a", 100) == []


def test_a_tenant_has_a_bounded_number_of_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secretstore, "SECRETS_OF_TENANT_MAX", 2)
    store = SecretStore(tmp_path / "secrets")
    put(store, "one"), put(store, "two"), put(store, "two"), put(store, "one", tenant="b")
    with pytest.raises(SecretError, match="may not have more; remove one first"):
        put(store, "three")


def test_it_can_be_set_and_read_at_the_same_time(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "secrets")
    put(store, "token", b"0" * 5000)
    seen: set[bytes] = set()

    def write(digit: int) -> None:
        for _ in range(5):
            put(store, "token", str(digit).encode() * 5000)

    threads = [threading.Thread(target=write, args=(digit,)) for digit in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.add(store.value("a", 0, "token"))
    assert {len(set(value)) for value in seen} == {1}, "whole, never a mixture"
    assert store.listing("a", 0)[0].version == 21
    assert not list((tmp_path / "secrets").rglob(".*"))


def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    need_root()
    root = tmp_path / "secrets"
    put(SecretStore(root), "token")
    os.chown(tmp_path / "secrets.key", 12345, 12345)
    with pytest.raises(SecretError, match="cannot read the key"):
        SecretStore(root).value("a", 0, "token")


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("ghcr.io/team/app:1", "registry-ghcr.io"),
        ("localhost:5000/app", "registry-localhost-5000"),
        ("docker://quay.io/a/b", "registry-quay.io"),
        ("pytorch/pytorch:2.4", "registry-docker.io"),
        ("ubuntu", "registry-docker.io"),
        ("[::1]:5000/app", ""),
        ("a" * 60 + ".io/app", ""),
    ],
)
def test_the_registry_of_an_image_names_its_secret(image: str, name: str) -> None:
    assert registry_secret(image) == name
