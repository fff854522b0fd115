"""Certificates of services are secrets of their tenants; no path of the head is read for them."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import msgspec
from harness.ports import free_port
from harness.waiting import until

from shoal.control.secretstore import SecretStore
from shoal.control.service_certificates import FollowedSecrets, SecretKey, ServiceCertificates
from shoal.gateway.gateway import HaproxyBalancer
from shoal.model.service import GatewayEntry, Route, Served, Wanted
from shoal.ports import StoreError
from tests.gateway.test_routing import certificate
from tests.gateway.world import World, raw

ROUTE = Route(service="web", port=1, certificate="web-tls")
KEY = SecretKey("lab", 7, "web-tls")


def presented(port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with raw(port, "") as plain, context.wrap_socket(plain) as secure:
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"").strip()


def test_a_service_presents_its_tenants_certificate_and_a_bad_one_harms_it_alone(
    world: World, tmp_path: Path
) -> None:
    one, key = certificate(tmp_path, "one")
    two, other_key = certificate(tmp_path, "two")
    (replica,) = world.start("replica")
    port = free_port()
    balancer = HaproxyBalancer(world.directory)

    def look(pem: bytes, problem: str = "") -> dict[str, str]:
        web = Served(
            route=msgspec.structs.replace(ROUTE, port=port),
            replicas=(replica,),
            certificate=pem.decode(),
            problem=problem,
        )
        plain = Served(route=Route(service="plain"), replicas=(replica,))
        wanted = Wanted(entry=GatewayEntry(port=world.port), services=(plain, web))
        return {name: load.trouble for name, load in balancer.look(wanted).items()}

    assert look(one + other_key) == {
        "plain": "",
        "web": "service web: certificate in the secret web-tls does not match its key",
    }
    assert look(one + key) == {"plain": "", "web": ""}
    assert presented(port) == one.decode().strip()
    (file,) = world.directory.glob("certificate-*.pem")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert look(two + other_key) == {"plain": "", "web": ""}
    until(lambda: presented(port) == two.decode().strip(), "the new certificate")
    # What is not PEM, or gone, leaves the service as it was.
    assert "is not a PEM file" in look(b"root:x:0:0")["web"]
    assert look(b"", "certificate: lab has no secret web-tls")["web"].endswith("no secret web-tls")
    assert presented(port) == two.decode().strip()
    assert len(list(world.directory.glob("certificate-*.pem"))) == 1
    until(lambda: world.get("/plain/").status == 200, "the other service")


def test_a_path_that_an_earlier_version_has_stored_is_not_read(world: World) -> None:
    (replica,) = world.start("replica")
    balancer = HaproxyBalancer(world.directory)
    old = msgspec.structs.replace(ROUTE, port=free_port(), certificate="/etc/shadow")
    services = tuple(
        Served(route=route, replicas=(replica,)) for route in (Route(service="plain"), old)
    )
    loads = balancer.look(Wanted(entry=GatewayEntry(port=world.port), services=services))
    assert loads["web"].trouble == (
        "service web: certificate: '/etc/shadow' is not the name of a secret; set one with: "
        "shoal secret set web-tls < FILE, then certificate: web-tls"
    )
    assert loads["plain"].trouble == ""


def test_the_value_of_a_secret_is_its_tenants_own_and_as_new_as_the_store(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "secrets")
    wanted = Wanted(services=(Served(route=ROUTE), Served(route=Route(service="plain"))))
    found = ServiceCertificates(lambda: store)

    def value(key: SecretKey = KEY) -> tuple[str, str]:
        web, plain = found.fill(wanted, {"web": key}).services
        assert not plain.certificate and not plain.problem
        return web.certificate, web.problem

    assert value() == ("", "certificate: lab has no secret web-tls; set it with: shoal secret set")
    store.put("lab", 7, "web-tls", b"one", by="a", now_ms=1)
    assert value() == value() == ("one", "")
    store.put("lab", 7, "web-tls", b"two", by="a", now_ms=2)
    assert value() == ("two", "")
    for other in (SecretKey("shop", 7, "web-tls"), SecretKey("lab", 8, "web-tls")):
        assert "has no secret" in value(other)[1], "another tenant, or an earlier one of this name"
    store.put("lab", 7, "web-tls", b"\xff", by="a", now_ms=3)
    assert value() == ("", "certificate: web-tls is not PEM")
    assert found.fill(wanted, {}) is wanted


def test_a_standby_reads_the_secrets_again_and_keeps_them_without_a_database(
    tmp_path: Path,
) -> None:
    now, away = 100.0, False

    def opened() -> SecretStore:
        if away:
            raise StoreError("away")
        return SecretStore(tmp_path / "secrets")

    seen = FollowedSecrets(opened, lambda: now)
    first = seen()
    assert first is not None and seen() is first
    now, away = 200.0, True
    assert seen() is first
    now, away = 300.0, False
    assert seen() not in (None, first)
