"""The certificates of services, from their tenants' secrets. It runs in the gateway's thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from shoal.control.secretstore import Sealed, SecretError, SecretStore, tenant_since_ms
from shoal.core.state.state import State
from shoal.model.service import Served, Wanted
from shoal.ports import StoreError

FRESH_S = 10.0  # a standby reads the secrets again after this long: the leader may have others


class SecretKey(NamedTuple):
    tenant: str
    since_ms: int
    name: str


def keys_of(state: State) -> dict[str, SecretKey]:
    """By service. Most clusters have none, and then nothing is read."""
    found = {}
    for name, service in state.services.items():
        if service.spec.way.certificate:
            tenant = service.spec.replica.tenant
            since_ms = tenant_since_ms(state.identity, tenant)
            found[name] = SecretKey(tenant, since_ms, service.spec.way.certificate)
    return found


class ServiceCertificates:
    """`store`: the leader's own, which knows each change."""

    def __init__(self, store: Callable[[], SecretStore | None]) -> None:
        self._store = store
        self._values: dict[SecretKey, tuple[Sealed, str]] = {}

    def fill(self, wanted: Wanted, keys: Mapping[str, SecretKey]) -> Wanted:
        if not keys:
            return wanted
        store = self._store()
        self._values = {key: one for key, one in self._values.items() if key in keys.values()}
        services = tuple(
            self._with_certificate(store, served, keys[served.route.service])
            if served.route.service in keys
            else served
            for served in wanted.services
        )
        return msgspec.structs.replace(wanted, services=services)

    def _with_certificate(
        self, store: SecretStore | None, served: Served, key: SecretKey
    ) -> Served:
        try:
            value = self._value(store, key)
        except (SecretError, UnicodeDecodeError) as error:
            text = str(error) if isinstance(error, SecretError) else f"{key.name} is not PEM"
            return msgspec.structs.replace(served, problem=f"certificate: {text}")
        return msgspec.structs.replace(served, certificate=value)

    def _value(self, store: SecretStore | None, key: SecretKey) -> str:
        if store is None:
            raise SecretError("this controller keeps no secrets")
        sealed, known = store.find(*key), self._values.get(key)
        if sealed is not None and known is not None and known[0] == sealed:
            return known[1]
        value = store.value(*key).decode("ascii")
        if sealed is not None:
            self._values[key] = sealed, value
        return value


class FollowedSecrets:
    """A standby's view of the secrets: as the database had them a moment ago."""

    def __init__(
        self, open_: Callable[[], SecretStore], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._open, self._now_s = open_, now_s
        self._store: SecretStore | None = None
        self._due_s = 0.0

    def __call__(self) -> SecretStore | None:
        if self._now_s() >= self._due_s:
            self._due_s = self._now_s() + FRESH_S
            with contextlib.suppress(StoreError):  # without the database, what was known stays
                self._store = self._open()
        return self._store
