"""The certificate that a cluster shows: made, renewed, brought; and what is wrong with one."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from harness.waiting import until_async

from shoal.client.transport import Endpoint, WrongCertificate, at, connection_to, fingerprint
from shoal.control import certificates, reach
from shoal.control.alarms import Alarms
from shoal.control.certificates import Encryption
from shoal.control.home import ClusterConfig, Home
from shoal.ports import EngineError

NAMES = ["head.example", "127.0.0.1", "::1"]
DAY = timedelta(days=1)


def write_certificate(
    folder: Path,
    *,
    names: tuple[str, ...] = ("127.0.0.1",),
    begins: timedelta = -DAY,
    ends: timedelta = DAY,
    passphrase: bytes = b"",
) -> tuple[Path, Path]:
    """One that an operator could bring, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "brought")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
    if names:
        general = [certificates._general(one) for one in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    made = builder.sign(key, hashes.SHA256())
    folder.mkdir(exist_ok=True)
    chain, key_path = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    locked = (
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption()
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_path.write_bytes(key.private_bytes(pem, form, locked))
    return chain, key_path


class Server:
    """Shakes hands with whoever connects, and has no page for anybody."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def at(self, certificate: str, host: str = "127.0.0.1") -> Endpoint:
        return at(f"https://{host}:{self._listener.getsockname()[1]}", "", certificate)

    def _listen(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(link,)))
            self._threads[-1].start()

    def _serve(self, link: socket.socket) -> None:
        link.settimeout(60)
        with contextlib.suppress(OSError), link, self._secure(link) as secure:
            while secure.recv(4096):
                secure.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    def _secure(self, link: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(link, server_side=True)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)


def ends(link: http.client.HTTPConnection) -> object:
    """When the certificate that the other side showed ends."""
    assert isinstance(link.sock, ssl.SSLSocket)
    return (link.sock.getpeercert() or {})["notAfter"]


def test_a_certificate_is_made_once_and_names_the_machine(tmp_path: Path) -> None:
    first = certificates.own(tmp_path / "tls", NAMES)
    assert certificates.own(tmp_path / "tls", NAMES[:2]) == first, "fewer names need no new one"
    assert set(NAMES) <= set(first.names)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}
    more = certificates.own(tmp_path / "tls", [*NAMES, "other.example"])
    assert "other.example" in more.names
    assert more.fingerprint == first.fingerprint, "clients keep the CA"


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_certificate_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    first = certificates.own(tmp_path / "tls", NAMES)
    text = first.chain.read_bytes()
    first.chain.write_bytes(text[:-40] if damage is None else damage)
    second = certificates.own(tmp_path / "tls", NAMES)
    certificates.context_of(second)
    assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_a_damaged_ca_is_never_replaced_silently(tmp_path: Path, name: str) -> None:
    certificates.own(tmp_path / "tls", NAMES)
    (tmp_path / "tls" / name).write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="everyone logs in again") as caught:
        certificates.own(tmp_path / "tls", NAMES)
    assert "\n" not in str(caught.value)


def test_a_clock_that_is_wrong_costs_nobody_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = certificates.own(tmp_path / "tls", NAMES)

    class Future(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=certificates.CA_DAYS + 1)

    monkeypatch.setattr(certificates, "datetime", Future)
    with pytest.raises(EngineError, match="set the clock"):
        certificates.own(tmp_path / "tls", NAMES)
    monkeypatch.undo()
    assert certificates.own(tmp_path / "tls", NAMES) == before


def test_a_certificate_is_renewed_before_it_ends_and_streams_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    monkeypatch.setattr(certificates, "SERVER_DAYS", certificates.RENEW_DAYS - 1)
    encryption = Encryption(home, ClusterConfig(nodes=(), host="0.0.0.0"))
    monkeypatch.undo()
    server = Server(encryption.context)
    where = server.at(encryption.served.anchor)
    try:
        before = connection_to(where, 60)
        before.connect()
        ended = ends(before)
        assert encryption.use(encryption.find()), "it was not renewed"
        assert not encryption.use(encryption.find()), "it was renewed twice"
        after = connection_to(where, 60)
        after.connect()
        assert ends(after) != ended
        before.request("GET", "/")
        assert before.getresponse().status == 404
        before.close()
        after.close()
    finally:
        server.close()


def test_an_expired_certificate_is_refused_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", -0.5)
    served = certificates.own(tmp_path / "tls", NAMES)
    server = Server(certificates.context_of(served))
    try:
        with pytest.raises(WrongCertificate, match="has expired"):
            connection_to(server.at(served.anchor), 60).connect()
    finally:
        server.close()


def test_another_ca_with_the_same_names_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    ours, theirs = (certificates.own(tmp_path / name, NAMES) for name in ("ours", "theirs"))
    server = Server(certificates.context_of(theirs))
    try:
        with pytest.raises(WrongCertificate) as caught:
            connection_to(server.at(ours.anchor), 1).connect()
    finally:
        server.close()
    text = str(caught.value)
    assert f"expected {ours.fingerprint}, found sha256:" in text
    assert "someone is in between" in text
    assert "\n" not in text


def test_a_certificate_that_the_operator_brings_is_pinned_itself(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path)
    config = ClusterConfig(nodes=(), certificate=str(chain), key=str(key))
    assert config.encrypted, "also on loopback, behind a tunnel"
    encryption = Encryption(Home(tmp_path / "home"), config)
    assert encryption.fingerprint == fingerprint(chain.read_text())
    server = Server(encryption.context)
    try:
        link = connection_to(server.at(chain.read_text()), 60)
        link.connect()
        link.close()
        with pytest.raises(WrongCertificate, match=r"is for 127\.0\.0\.1, not for localhost"):
            connection_to(server.at(chain.read_text(), "localhost"), 60).connect()
        write_certificate(tmp_path)
        assert encryption.use(encryption.find()), "a file that was replaced is read again"
        with pytest.raises(WrongCertificate, match="not the one you logged in with"):
            connection_to(server.at(server_pem(tmp_path)), 1).connect()
    finally:
        server.close()


def server_pem(folder: Path) -> str:
    return write_certificate(folder / "another")[0].read_text()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"ends": -DAY / 2}, "expired on "),
        ({"begins": DAY / 2}, "is not valid before "),
        ({"names": ()}, "names no host"),
        ({"passphrase": b"secret"}, "has a passphrase"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, fields: dict[str, object], complaint: str
) -> None:
    chain, key = write_certificate(tmp_path, **fields)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=complaint) as caught:
        certificates.brought(chain, key)
    assert "\n" not in str(caught.value)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    chain, _ = write_certificate(tmp_path / "one")
    _, key = write_certificate(tmp_path / "two")
    with pytest.raises(EngineError, match="is not the key of"):
        certificates.brought(chain, key)
    with pytest.raises(EngineError, match="not in PEM form"):
        certificates.brought(chain, chain)
    with pytest.raises(EngineError, match="holds no certificate"):
        certificates.brought(key, key)
    with pytest.raises(EngineError, match="cannot read"):
        certificates.brought(chain, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("host", "names", "shown"),
    [
        ("10.0.0.5", ["10.0.0.5", "localhost"], "10.0.0.5"),
        ("10.0.0.5", ["head.example", "*.example"], "head.example"),
        ("10.0.0.5", ["localhost", "*.example"], "10.0.0.5"),
        ("head", ["head"], "head"),
    ],
)
def test_others_are_shown_a_name_that_the_certificate_has(
    host: str, names: list[str], shown: str
) -> None:
    assert reach.shown_host(host, names) == shown


def test_a_controller_keeps_its_certificate_valid_and_says_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = write_certificate(tmp_path)
    config = ClusterConfig(nodes=(), certificate=str(chain), key=str(key))
    encryption = Encryption(Home(tmp_path / "home"), config)
    alarms, changes = Alarms(), asyncio.Event()
    monkeypatch.setattr("shoal.control.certificates.LOOK_S", 0.01)

    async def watch() -> None:
        running = asyncio.create_task(encryption.run(alarms, changes.set))
        await until_async(lambda: any("replace the file" in text for text in alarms.texts))
        chain.write_text("nonsense")
        await until_async(lambda: any("cannot be renewed" in text for text in alarms.texts))
        write_certificate(tmp_path, ends=100 * DAY)
        await until_async(lambda: changes.is_set() and not alarms.texts)
        running.cancel()

    asyncio.run(watch())
    assert encryption.fingerprint == fingerprint(chain.read_text())
