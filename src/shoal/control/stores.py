"""What a head remembers beside the log of events: in files of its home, or in a database that all
heads of the cluster share. The keys are files in both cases."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.audit import AUDIT_NAME, AuditLog, AuditQueue
from shoal.control.home import ClusterConfig, Home
from shoal.control.secretstore import KeyFile, SecretError, SecretStore
from shoal.database.base import Database, StoreAway
from shoal.database.settings import (
    FileSettings,
    SealedSettings,
    Settings,
    TableSettings,
    digest,
)
from shoal.database.sqlite import Place
from shoal.machine.files import read_own, write_private
from shoal.ports import StoreError

if TYPE_CHECKING:
    from shoal.database.lease import Lease

NEIGHBORS = "neighbors.json"  # a setting: other clusters, and our tokens there
KEYS = "keys"  # a setting: what the heads' keys have in common
SPOOL = "audit.waiting"  # lines of the audit log that the database has not got yet


def stores_of(home: Home, config: ClusterConfig, lease: Lease | None) -> Stores:
    """Of a head of a cluster with a database, as far as this lease lets it write; without a lease,
    the files of the home."""
    if lease is None:
        return Stores(home)
    from shoal.database.postgres import PostgresDatabase

    return Stores(home, PostgresDatabase(config.database, lease), lease, config.head)


class Stores:
    """One for each stage of a controller. A head that leads makes the tables, and may write. A
    standby reads, and hands its lines of the audit log in by the lease's connection.

    Give it a connection of its own: what it writes should not wait for the log of events, nor
    the log for it. Whoever opened the database closes it."""

    def __init__(
        self,
        home: Home,
        database: Database | None = None,
        lease: Lease | None = None,
        head: str = "",
    ) -> None:
        self._home = home
        self._database = database
        self._lease = lease
        self._head = head
        self.leads = database is None or (lease is not None and lease.term > 0)
        self.ledger: Place = database or home.ledger
        self.history: Place = database or home.history
        self.bars: Place = database or home.bars
        self.notices: Place = database or home.path / "notices.db"
        self._plain: Settings = FileSettings(home.path)
        self.settings: Settings = self._plain
        if database is not None:
            self._plain = TableSettings(database)
            self.settings = SealedSettings(self._plain, self._key)
            self._agree()

    def secrets(self, alarms: Alarms) -> SecretStore:
        return SecretStore(self._home.secrets, alarms, self._plain)

    def audit(self, alarms: Alarms) -> AuditQueue:
        if self._database is None or self._lease is None:
            return AuditLog(self._home.path / AUDIT_NAME, alarms)
        from shoal.control.audit_table import AuditTable

        return AuditTable(
            self._database,
            alarms,
            self._home.path / SPOOL,
            self._lease.hand_in,
            leads=self.leads,
            head=self._head,
        )

    def notices_key(self) -> bytes:
        """Signs webhooks."""
        path = self._home.path / "notices.key"
        if not path.exists():
            write_private(path, secrets.token_hex(32).encode() + b"\n")
        return bytes.fromhex(read_own(path).decode().strip())

    # -- the keys of a cluster with a database ---------------------------------------------

    def _key(self) -> bytes:
        try:
            key = KeyFile(self._home.secrets).read()
        except SecretError as error:
            raise StoreError(str(error)) from None
        if key is None:
            raise StoreError(KeyFile(self._home.secrets).missing)
        return key

    def _agree(self) -> None:
        """All heads need the same keys. The first one to lead makes them; others get them with
        their invitation."""
        assert self._database is not None
        if self.leads:
            TableSettings.prepare(self._database)
        try:
            known = self._plain.get(KEYS)
        except StoreError as error:
            if self.leads and not isinstance(error, StoreAway):
                raise
            return  # a standby looks again when it leads
        if known is None and not self.leads:
            return
        if known is None and KeyFile(self._home.secrets).read() is None:
            KeyFile(self._home.secrets).make()
        ours = {"secrets.key": digest(self._key()), "notices.key": digest(self.notices_key())}
        if known is None:
            self._plain.set(KEYS, msgspec.json.encode(ours))
            return
        theirs = msgspec.json.decode(known, type=dict[str, str])
        for name, shown in ours.items():
            if theirs.get(name, shown) != shown:
                text = f"{self._home.path / name} is not the key of the other heads"
                raise StoreError(f"{text}; copy it from one of them")
