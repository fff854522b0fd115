"""The secrets of all tenants, encrypted: a file or a row each, and one key for all of them.

Tenant, name and version are authenticated with the value, so that none can take another's place.
What is damaged is one secret that has to be set again; nothing else depends on it. The key is a
file, also if the secrets are in a database.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.control.alarms import Alarms
from shoal.core.state.events.identity import TenantRemoved
from shoal.core.state.events.log import Event
from shoal.core.state.state import State
from shoal.database.settings import FileSettings, Settings
from shoal.link.sealing import seal
from shoal.machine.files import read_own, sync_folder, write_private
from shoal.model.identity import Identity
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.report import Report
from shoal.model.secret import (
    ENCRYPTION,
    ENCRYPTION_BYTES_MIN,
    FILES_KEY,
    SECRETS_OF_TENANT_MAX,
    SealedSecrets,
    SecretsOf,
    SecretsWanted,
    SecretValue,
    file_of,
    registry_secret,
    split,
)
from shoal.ports import StoreError

log = logging.getLogger("shoal.control")

KEY_PATH = "SHOAL_SECRETS_KEY"  # the operator may keep the key elsewhere than beside the secrets
KEY_BYTES = 32
NONCE_BYTES = 12
ALARM = "secrets"
_KEY = re.compile(rb"[0-9a-f]{64}\s*")


class SecretError(Exception):
    """Why a secret cannot be kept or read; never with its value."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A secret as it is stored. `since_ms` is the tenant's own: a tenant that is removed and
    added again does not get the secrets of the earlier one. `key` tells keys apart."""

    tenant: str
    since_ms: int
    name: str
    version: int
    set_ms: int
    by: str
    key: str
    box: bytes

    @property
    def bound(self) -> bytes:
        """What is authenticated with the value."""
        return msgspec.json.encode((self.tenant, self.since_ms, self.name, self.version))


class SecretStore:
    """Any thread may call it, and readers do not wait for the disk. `since_ms` is when the tenant
    was added; 0: it has no record. Without settings, the secrets are files in the folder `root`.
    The key is beside it."""

    def __init__(
        self, root: Path, alarms: Alarms | None = None, settings: Settings | None = None
    ) -> None:
        self._root = root
        self._settings = settings or FileSettings(root.parent)
        self._key = KeyFile(root)
        self._alarms = alarms or Alarms()
        self._lock = threading.Lock()
        self._sealed: dict[str, dict[str, Sealed]] = {}  # by tenant and name
        self._load()

    def listing(self, tenant: str, since_ms: int) -> list[Sealed]:
        found = list(self._sealed.get(tenant, {}).values())
        return sorted((one for one in found if one.since_ms == since_ms), key=lambda one: one.name)

    def find(self, tenant: str, since_ms: int, name: str) -> Sealed | None:
        one = self._sealed.get(tenant, {}).get(name)
        return one if one is not None and one.since_ms == since_ms else None

    def put(
        self, tenant: str, since_ms: int, name: str, value: bytes, *, by: str, now_ms: int
    ) -> Sealed:
        """When this returns, the value survives a loss of power."""
        with self._lock:
            old = self._sealed.get(tenant, {}).get(name)
            many = sum(one.since_ms == since_ms for one in self._sealed.get(tenant, {}).values())
            if old is None and many >= SECRETS_OF_TENANT_MAX:
                bound = f"{tenant} has {SECRETS_OF_TENANT_MAX} secrets, and may not have more"
                raise SecretError(f"{bound}; remove one first")
            key = self._key.read() or self._new_key()
            sealed = Sealed(
                tenant=tenant,
                since_ms=since_ms,
                name=name,
                version=old.version + 1 if old is not None and old.since_ms == since_ms else 1,
                set_ms=now_ms,
                by=by,
                key=_name_of(key),
                box=b"",
            )
            sealed = msgspec.structs.replace(sealed, box=_seal(key, value, sealed.bound))
            self._settings.set(self._named(tenant, name), msgspec.json.encode(sealed))
            self._sealed.setdefault(tenant, {})[name] = sealed
        return sealed

    def remove(self, tenant: str, since_ms: int, name: str) -> bool:
        with self._lock:
            if self.find(tenant, since_ms, name) is None:
                return False
            self._settings.remove(self._named(tenant, name))
            del self._sealed[tenant][name]
        return True

    def value(self, tenant: str, since_ms: int, name: str) -> bytes:
        sealed = self.find(tenant, since_ms, name)
        if sealed is None:
            raise SecretError(f"{tenant} has no secret {name}; set it with: shoal secret set")
        key = self._key.read()
        if key is None:
            raise SecretError(self._key.missing)
        if _name_of(key) != sealed.key:
            raise SecretError(
                f"{name} was encrypted with another key than {self._key.path}; set it again, or "
                f"start the cluster with the right {KEY_PATH}"
            )
        value = _open(key, sealed)
        if value is None:
            raise SecretError(f"the file of the secret {name} is damaged; set it again")
        return value

    def derived(self, what: str) -> bytes:
        """A secret that needs no file, because the same `what` gives the same one. In hex."""
        with self._lock:
            key = self._key.read() or self._new_key()
        return hmac.digest(key, b"shoal derived " + what.encode(), "sha256").hex().encode()

    def problem(self, sealed: Sealed) -> str:
        try:
            self.value(sealed.tenant, sealed.since_ms, sealed.name)
        except SecretError as error:
            return str(error)
        return ""

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        """A follower of the loop: a tenant's secrets go with the tenant. One that is being set at
        this moment may stay; it is of an earlier tenant, so nobody gets it."""
        for event in events:
            if not isinstance(event, TenantRemoved) or event.tenant not in self._sealed:
                continue
            del self._sealed[event.tenant]
            try:
                self._settings.remove(f"{self._root.name}/{event.tenant}")
            except StoreError as error:
                log.error("secrets of %s, which was removed: %s", event.tenant, error)

    def _named(self, tenant: str, name: str) -> str:
        return f"{self._root.name}/{tenant}/{name}"

    def _load(self) -> None:
        damaged = []
        for path, body in self._settings.items(self._root.name):
            try:
                sealed = msgspec.json.decode(body, type=Sealed)
                if self._named(sealed.tenant, sealed.name) != path:
                    raise ValueError("it belongs elsewhere")
            except (ValueError, msgspec.DecodeError):
                damaged.append(path.partition("/")[2])
                continue
            self._sealed.setdefault(sealed.tenant, {})[sealed.name] = sealed
        if damaged:
            text = f"unreadable files in {self._root}: {', '.join(damaged[:4])}"
            self._alarms.raise_(ALARM, f"{text}; remove them, and set these secrets again")

    def _new_key(self) -> bytes:
        """With the first secret. Later it would only hide that the key is lost."""
        if any(self._sealed.values()):
            raise SecretError(f"{self._key.missing}. Without it, remove the secrets that need it")
        return self._key.make()


class KeyFile:
    """The key that encrypts what is secret; beside the folder `root`, unless it is named."""

    def __init__(self, root: Path) -> None:
        named = os.environ.get(KEY_PATH)
        self.path = Path(named) if named else root.with_name(root.name + ".key")

    @property
    def missing(self) -> str:
        return (
            f"the key {self.path} is missing; put it back from a backup, or start the cluster "
            f"with the right {KEY_PATH}"
        )

    def read(self) -> bytes | None:
        if not self.path.is_absolute():
            raise SecretError(f"{KEY_PATH} must be an absolute path, not {self.path}")
        try:
            text = read_own(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SecretError(f"cannot read the key {self.path}: {error.strerror}") from None
        if not _KEY.fullmatch(text):
            raise SecretError(f"{self.path} is not a key: it must hold 64 hexadecimal digits")
        return bytes.fromhex(text.decode().strip())

    def make(self) -> bytes:
        key = secrets.token_bytes(KEY_BYTES)
        try:
            write_private(self.path, key.hex().encode() + b"\n")
            sync_folder(self.path.parent)
        except OSError as error:
            raise SecretError(f"cannot write the key {self.path}: {error.strerror}") from None
        return key


def _name_of(key: bytes) -> str:
    return hashlib.sha256(b"shoal secrets " + key).hexdigest()[:16]


def _seal(key: bytes, value: bytes, bound: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, value, bound)


def _open(key: bytes, sealed: Sealed) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    with contextlib.suppress(InvalidTag, ValueError):
        nonce, box = sealed.box[:NONCE_BYTES], sealed.box[NONCE_BYTES:]
        return AESGCM(key).decrypt(nonce, box, sealed.bound)
    return None


# Which secrets a node gets: those of the members that it is to start, and no others.


LAUNCH, KEY = "launch", "SHOAL_LAUNCH_KEY"  # by which the members of an attempt know each other
REFUSED = "the controller has not placed it there"


def tenant_since_ms(identity: Identity, tenant: str) -> int:
    """Secrets belong to a tenant as it was when they were set; 0: it has no record."""
    record = identity.tenants.get(tenant)
    return record.since_ms if record is not None else 0


def hand_over(
    store: SecretStore | None, state: State, node: str, wanted: SecretsWanted
) -> SealedSecrets | None:
    return seal(choose(store, state, node, wanted.incarnation, wanted.ref), wanted.public)


def choose(
    store: SecretStore | None, state: State, node: str, incarnation: int, ref: MemberRef
) -> SecretsOf:
    """An agent that asks for another's member, for one that has ended, or for an earlier life of
    its node gets nothing."""
    known, job = state.nodes.get(node), state.placed.get(node, {}).get(ref)
    stopping = job is not None and job.phase is Phase.STOPPING
    if known is None or known.incarnation != incarnation or job is None or stopping:
        return SecretsOf(ref, problem=REFUSED)
    if store is None:
        return SecretsOf(ref, problem="this controller keeps no secrets")
    return _of_member(store, state, job, ref)


def _of_member(store: SecretStore, state: State, job: Job, ref: MemberRef) -> SecretsOf:
    tenant, since_ms = job.spec.tenant, tenant_since_ms(state.identity, job.spec.tenant)
    values, registry = [], b""
    try:
        for wanted in job.spec.secrets:
            name, variable = split(wanted)
            shown = name if variable else file_of(wanted)
            values.append(SecretValue(shown, store.value(tenant, since_ms, name), variable))
        if job.spec.launcher:
            values.append(
                SecretValue(LAUNCH, store.derived(f"launch {ref.job} {ref.attempt}"), KEY)
            )
        if job.spec.encrypt:
            key = files_key(store, state.identity, job)
            values.append(SecretValue(FILES_KEY, key, FILES_KEY))
        name = registry_secret(job.spec.image) if job.spec.image else ""
        if name and store.find(tenant, since_ms, name) is not None:
            registry = store.value(tenant, since_ms, name)
    except SecretError as error:
        return SecretsOf(ref, problem=str(error))
    return SecretsOf(ref, tuple(values), registry)


def files_key(store: SecretStore, identity: Identity, job: Job) -> bytes:
    """For the kept files of this job alone: whoever has it cannot read those of others."""
    tenant = job.spec.tenant
    value = store.value(tenant, tenant_since_ms(identity, tenant), ENCRYPTION).strip()
    if len(value) < ENCRYPTION_BYTES_MIN:
        raise SecretError(
            f"the secret {ENCRYPTION} is too short to be a key: it needs {ENCRYPTION_BYTES_MIN} "
            f"bytes; set it with: openssl rand -hex 32 | shoal secret set {ENCRYPTION}"
        )
    return hmac.digest(value, b"shoal files of " + job.id.encode(), "sha256")
