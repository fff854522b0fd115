"""Finds what the proxy would fail on before it is asked: ports, certificates, replica addresses."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Collection
from ipaddress import ip_address
from pathlib import Path

import msgspec

from shoal.gateway.binary import GatewayError
from shoal.gateway.sites import others
from shoal.machine.files import write_private
from shoal.machine.listening import hold, holder_text
from shoal.model.service import (
    GatewayEntry,
    Served,
    Wanted,
    problem_with_services,
    problems_with_services,
)

SOCKET_PATH_MAX = 80  # the kernel's 108, less what HAProxy appends while it binds


def check_wishes(wanted: Wanted) -> None:
    """Raises on the first service that contradicts itself or another."""
    problem = problem_with_services(wanted)
    if problem:
        raise GatewayError(problem)
    for served in wanted.services:
        _check_addresses(served)


def check_machine(wanted: Wanted, directory: Path, take: Take) -> None:
    """Raises on the first service that this machine cannot offer. `take` gets where the proxy is
    to listen, and raises if somebody else does."""
    if len(str(directory)) > SOCKET_PATH_MAX:
        raise GatewayError(
            f"{directory} is too long a path for a socket: {SOCKET_PATH_MAX} characters at most"
        )
    entry = wanted.entry
    _check_certificate("gateway", entry.certificate)
    take(GATEWAY, (entry.address, entry.port))
    for served in wanted.services:
        _check_service(served, entry, directory, take)


def _check_service(served: Served, entry: GatewayEntry, directory: Path, take: Take) -> None:
    route = served.route
    if served.certificate:
        _check_secret(directory, served)
    if route.port:
        take(f"service {route.service}", (entry.address, route.port))
    if others(entry, served):
        take(f"service {route.service}", (entry.address, entry.door))


def listening(wanted: Wanted) -> set[Where]:
    """Where the proxy listens."""
    ports = {one.route.port for one in wanted.services if one.route.port}
    door = {wanted.entry.door for one in wanted.services if others(wanted.entry, one)}
    return {(wanted.entry.address, port) for port in {wanted.entry.port, *ports, *door}}


def sound_part(wanted: Wanted, directory: Path, take: Take) -> tuple[Wanted, dict[str, str]]:
    """The services that can be offered, and the problem of each of the others. Of two that
    contradict each other, the later is left out. Raises if the gateway itself cannot run."""
    sound: list[Served] = []
    problems: dict[str, str] = {}
    check_machine(Wanted(entry=wanted.entry), directory, take)
    wrong = problems_with_services(wanted)
    for place, served in enumerate(wanted.services):
        try:
            if place in wrong:
                raise GatewayError(wrong[place])
            _check_addresses(served)
            _check_service(served, wanted.entry, directory, take)
        except GatewayError as error:
            problems[served.route.service] = str(error)
        else:
            sound.append(served)
    return msgspec.structs.replace(wanted, services=tuple(sound)), problems


def _check_addresses(served: Served) -> None:
    for replica in served.replicas:
        try:
            ip_address(replica.address)
        except ValueError:
            who = f"service {served.route.service}: replica {replica.id}"
            text = f"{who}: address {replica.address!r} is not an IP address"
            raise GatewayError(text) from None


def _check_secret(directory: Path, served: Served) -> None:
    """OpenSSL takes files only."""
    file = directory / "candidate.pem"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(file, served.certificate.encode())
    try:
        shown = f"in the secret {served.route.certificate}"
        _check_certificate(f"service {served.route.service}", str(file), shown)
    finally:
        file.unlink()


def _check_certificate(who: str, file: str, shown: str = "") -> None:
    if not file:
        return
    shown = shown or file
    key = f"{file}.key" if Path(f"{file}.key").exists() else None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file, key, password="")
    except FileNotFoundError:
        raise GatewayError(f"{who}: certificate {shown} does not exist") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = "does not match its key"
        else:
            text = "is not a PEM file with a certificate and its key"
        raise GatewayError(f"{who}: certificate {shown} {text}") from None
    except OSError as error:
        raise GatewayError(f"{who}: certificate {shown}: {error.strerror or error}") from None


# The ports at which the proxy listens: kept from every other user, even while it is down.


Where = tuple[str, int]  # an address, and a port of it
Take = Callable[[str, Where], None]
GATEWAY = "gateway"


class Holds:
    """`given`: places that the supervisor holds for us."""

    def __init__(self, given: Callable[[Where], bool]) -> None:
        self._given = given
        self._held: dict[Where, socket.socket] = {}

    def __del__(self) -> None:
        """A gateway may be dropped at any moment."""
        for held in self._held.values():
            held.close()

    def take(self, who: str, place: Where, own: Collection[Where]) -> None:
        """GatewayError if somebody else has it. `own`: where our proxy listens already."""
        if place in self._held or self._given(place):
            return
        address, port = place
        try:
            self._held[place] = hold(address, port, shared=place in own)
        except OSError as error:
            other = holder_text(port)
            why = f"{other} has it" if other else error.strerror or str(error)
            advice = "choose another port" if who != GATEWAY else "when it ends, services go on"
            raise GatewayError(
                f"{who}: cannot listen on {address} port {port}: {why}; {advice}"
            ) from None

    def keep(self, places: Collection[Where]) -> None:
        """Those at which our proxy listens now, and no others."""
        for place in self._held.keys() - places:
            self._held.pop(place).close()
        for place in places:
            with contextlib.suppress(GatewayError):
                self.take("", place, places)
