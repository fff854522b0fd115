"""Sites of one service on this machine: a real gateway for each, with lines between their doors."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.distance import Line, line
from harness.ports import free_port
from shoal.gateway.binary import holders
from shoal.gateway.gateway import HaproxyBalancer
from shoal.model.access import Caller
from shoal.model.far import Far
from shoal.model.service import GatewayEntry, Replica, Route, Served, ServiceLoad, Wanted


def door_certificate(name: str) -> tuple[str, str]:
    """A self-signed certificate, and it with its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    shown = made.public_bytes(serialization.Encoding.PEM).decode()
    kept = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return shown, shown + kept.decode()


class Site:
    """One cluster's gateway."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.port, self.door = free_ports(2)
        self.certificate, self.pem = door_certificate(name)
        self.balancer = HaproxyBalancer(self.folder)
        self.replicas: tuple[Replica, ...] = ()
        self.far: tuple[Far, ...] = ()
        self.wanted = Wanted()

    def serve(
        self,
        *routes: Route,
        tenant: str = "",
        callers: tuple[Caller, ...] = (),
        far: Mapping[str, tuple[Far, ...]] | None = None,
    ) -> dict[str, ServiceLoad]:
        """`far`: by service; all sites, if it is not given."""
        served = (
            Served(
                route=route,
                tenant=tenant,
                replicas=self.replicas,
                far=self.far if far is None else far[route.service],
            )
            for route in routes
        )
        entry = GatewayEntry(port=self.port, door=self.door, door_pem=self.pem, threads=1)
        self.wanted = Wanted(entry=entry, services=tuple(served), callers=callers)
        return self.look()

    def look(self) -> dict[str, ServiceLoad]:
        return self.balancer.look(self.wanted)

    def kill(self) -> None:
        """The proxy, at once and with all that it has."""
        for pid in holders(self.folder / "haproxy.lock"):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self.kill()
        self.balancer.look(Wanted())


class Sites:
    """All of them, each of which knows the doors of the others behind lines of their own."""

    def __init__(
        self, names: Sequence[str], trips_s: Mapping[frozenset[str], float], folder: Path
    ) -> None:
        self.all = {name: Site(name, folder) for name in names}
        self.lines: dict[tuple[str, str], Line] = {}
        self._stack = ExitStack()
        for here in self.all.values():
            for there in self.all.values():
                if here is there:
                    continue
                delay_s = trips_s.get(frozenset((here.name, there.name)), 0.0) / 2
                made = self._stack.enter_context(line(("127.0.0.1", there.door), delay_s))
                self.lines[here.name, there.name] = made
                host, port = made.address
                far = Far(site=there.name, address=host, port=port, certificate=there.certificate)
                here.far = (*here.far, far)
            self._stack.callback(here.stop)

    def price(self, here: str, there: str, price: int) -> None:
        site = self.all[here]
        site.far = tuple(
            msgspec.structs.replace(far, price=price) if far.site == there else far
            for far in site.far
        )

    def close(self) -> None:
        self._stack.close()


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]
