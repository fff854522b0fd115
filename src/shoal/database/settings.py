"""Small things that change while a cluster runs (prices, the join token, encrypted secrets): bytes
by name, in files of the home or in a table that all heads share."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.database.base import Database, Row, StoreAway, Values
from shoal.machine.files import read_own, sync_folder, write_private
from shoal.ports import StoreDamaged, StoreError

PART, VERSION = "settings", 1
NONCE_BYTES = 12


class Settings(Protocol):
    """A name is a path, e.g. `prices.json` or `secrets/TENANT/NAME`. Every call may raise
    `StoreError`. Any thread may call it."""

    def get(self, name: str) -> bytes | None: ...

    def set(self, name: str, value: bytes) -> None:
        """When this returns, the value survives a loss of power."""

    def remove(self, name: str) -> None:
        """Of one value, or of all whose names begin with it and a slash."""

    def items(self, folder: str) -> list[tuple[str, bytes]]:
        """All values below a folder, by name; empty: one that cannot be read."""


class FileSettings:
    """Private files below a folder of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str) -> bytes | None:
        try:
            return read_own(self.root / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {name}: {error.strerror}") from None

    def set(self, name: str, value: bytes) -> None:
        place = self.root / name
        try:
            folders = place.relative_to(self.root).parents
            for folder in reversed(folders):
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            write_private(place, value)
            for folder in folders:
                sync_folder(self.root / folder)
        except OSError as error:
            raise StoreError(f"cannot write {name}: {error.strerror}") from None

    def remove(self, name: str) -> None:
        place = self.root / name
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(place) if place.is_dir() else place.unlink()
                sync_folder(place.parent)
        except OSError as error:
            raise StoreError(f"cannot remove {name}: {error.strerror}") from None

    def items(self, folder: str) -> list[tuple[str, bytes]]:
        found = sorted((self.root / folder).rglob("*"))
        plain = [path for path in found if not path.name.startswith(".") and not path.is_dir()]
        return [(str(path.relative_to(self.root)), self._readable(path)) for path in plain]

    def _readable(self, path: Path) -> bytes:
        try:
            return read_own(path)
        except OSError:
            return b""


class TableSettings:
    """Rows of the database. They are not encrypted here."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @staticmethod
    def prepare(database: Database) -> None:
        schema = (
            "CREATE TABLE IF NOT EXISTS settings "
            f"(name TEXT PRIMARY KEY, value {database.words.blob} NOT NULL)"
        )
        database.prepare(PART, VERSION, schema)

    def get(self, name: str) -> bytes | None:
        rows = self._read("SELECT value FROM settings WHERE name = ?", (name,))
        return bytes(rows[0][0]) if rows else None

    def set(self, name: str, value: bytes) -> None:
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO settings (name, value) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, value),
            )

    def remove(self, name: str) -> None:
        with self._database.transaction() as cursor:
            cursor.execute(
                f"DELETE FROM settings WHERE name = ? OR {_BELOW}", (name, *_below(name))
            )

    def items(self, folder: str) -> list[tuple[str, bytes]]:
        rows = self._read(
            f"SELECT name, value FROM settings WHERE {_BELOW} ORDER BY name", _below(folder)
        )
        return [(name, bytes(value)) for name, value in rows]

    def _read(self, query: str, values: Values) -> list[Row]:
        try:
            return self._database.read(query, values)
        except StoreDamaged:
            try:
                self.prepare(self._database)
            except StoreAway:  # no head has led so far, so nothing was set
                return []
            raise


_BELOW = "(name > ? AND name < ?)"


def _below(folder: str) -> tuple[str, str]:
    """Text is compared by its bytes, and a zero comes right after a slash."""
    return f"{folder}/", f"{folder}0"


class SealedSettings:
    """The same, encrypted with a key that is not in the database: whoever reads the database or a
    backup of it learns no token and no password of a provider. The name is authenticated, too."""

    def __init__(self, inner: Settings, key: Callable[[], bytes]) -> None:
        self._inner = inner
        self._key = key

    def get(self, name: str) -> bytes | None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        box = self._inner.get(name)
        if box is None:
            return None
        try:
            return AESGCM(self._key()).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError):
            text = f"the setting {name} in the database cannot be decrypted with this head's key"
            raise StoreDamaged(f"{text}; set it again, or bring the right secrets.key") from None

    def set(self, name: str, value: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(NONCE_BYTES)
        self._inner.set(name, nonce + AESGCM(self._key()).encrypt(nonce, value, name.encode()))

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def items(self, folder: str) -> list[tuple[str, bytes]]:
        names = [name for name, _ in self._inner.items(folder)]
        return [(name, self.get(name) or b"") for name in names]


def digest(data: bytes) -> str:
    """Shows whether two heads have the same key, and nothing of the key."""
    return hashlib.sha256(b"shoal same " + data).hexdigest()[:16]
