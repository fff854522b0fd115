"""The certificate of a cluster that other machines reach: made by a small CA of the cluster's own,
or brought by the operator. Needs `cryptography`, so it is imported only where there is TLS."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.control import reach
from shoal.control.alarms import Alarms
from shoal.control.home import ClusterConfig, Home
from shoal.machine.files import read_own, write_private
from shoal.ports import EngineError

CA_DAYS = 20 * 365  # everyone has to log in again when it ends
SERVER_DAYS = 90
RENEW_DAYS = 30  # before it ends
SKEW = timedelta(days=1)  # a client's clock may be behind
NAMES_MAX = 100
DNS_NAME = re.compile(r"(\*\.)?([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster shows to those who connect. Clients that log in keep `anchor` (PEM), and
    trust what it has signed, or is. `names` are those in the certificate."""

    chain: Path
    key: Path
    anchor: str
    names: tuple[str, ...]
    until: datetime

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.anchor)


def fingerprint(pem: str) -> str:
    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def context_of(served: Served) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # a client could make us compute forever
    made.set_alpn_protocols(["http/1.1"])
    load(made, served)
    return made


def load(context: ssl.SSLContext, served: Served) -> None:
    """Connections that begin after this use the certificate; the others go on with theirs."""

    def refuse() -> str:
        raise EngineError(f"--key: {served.key} has a passphrase; remove it")

    try:
        context.load_cert_chain(served.chain, served.key, password=refuse)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            message = f"--key: {served.key} is not the key of {served.chain}"
        else:
            message = f"--certificate: {served.chain} or its key {served.key} is not in PEM form"
        raise EngineError(message) from None
    except OSError as error:
        where = error.filename or f"{served.chain} or {served.key}"
        raise EngineError(f"--certificate: cannot read {where}: {error.strerror}") from None


def is_public(served: Served, name: str) -> bool:
    """Does this system trust the certificate for the name, without anything being pinned? Found
    out by a handshake in memory."""
    trusting = ssl.create_default_context()
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up, server_hostname=name)
    server = context_of(served).wrap_bio(up, down, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except (ssl.SSLError, ValueError):
            return False
    return True


# -- brought by the operator -------------------------------------------------------------------


def brought(chain: Path, key: Path) -> Served:
    """EngineError with one line if it cannot be used."""
    try:
        leaf = x509.load_pem_x509_certificates(chain.read_bytes())[0]
    except OSError as error:
        raise EngineError(f"--certificate: cannot read {chain}: {error.strerror}") from None
    except ValueError:
        message = f"--certificate: {chain} holds no certificate in PEM form"
        raise EngineError(message) from None
    served = _served(chain, key, leaf, leaf)
    now = datetime.now(UTC)
    if leaf.not_valid_after_utc <= now:
        raise EngineError(f"--certificate: {chain} expired on {_day(leaf.not_valid_after_utc)}")
    if leaf.not_valid_before_utc > now:
        begins = _day(leaf.not_valid_before_utc)
        raise EngineError(f"--certificate: {chain} is not valid before {begins}")
    if not served.names:
        message = "names no host (it has no subjectAltName), so no client would accept it"
        raise EngineError(f"--certificate: {chain} {message}")
    context_of(served)
    return served


# -- a CA of our own ---------------------------------------------------------------------------


def own(folder: Path, names: Iterable[str]) -> Served:
    """The certificate in the folder; a new one if there is none, if it ends soon, or if it lacks
    one of the names."""
    folder.mkdir(mode=0o700, exist_ok=True)
    authority, key = _authority(folder)
    wanted = list(dict.fromkeys(name for name in names if _is_name(name)))[:NAMES_MAX]
    path = folder / "server.pem"
    leaf = _read_leaf(path)
    if leaf is None or not _is_good(leaf, authority, wanted):
        try:
            leaf = _sign(path, authority, key, wanted)
        except OSError:  # the disk is full; one that still works is better than none
            if leaf is None or not _is_issued(leaf, authority):
                raise
    return _served(path, path, leaf, authority)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = folder / "ca.pem", folder / "ca.key"
    advice = f"restore it, or remove {folder} to make a new one (then everyone logs in again)"
    if not certificate_path.exists():
        return _make_authority(certificate_path, key_path)
    try:
        certificate = x509.load_pem_x509_certificate(read_own(certificate_path))
        key = serialization.load_pem_private_key(read_own(key_path), password=None)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "is damaged"
        raise EngineError(f"the cluster's CA in {folder}: {reason}; {advice}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != (
        certificate.public_key()
    ):
        raise EngineError(f"{key_path} is not the key of {certificate_path}; {advice}")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        # Not replaced by itself: a clock that is wrong would make everyone log in again.
        ended = _day(certificate.not_valid_after_utc)
        advice = (
            f"set the clock, or remove {folder} to make a new one (then everyone logs in again)"
        )
        raise EngineError(f"the cluster's CA {certificate_path} ended on {ended}; {advice}")
    return certificate, key


def _make_authority(
    certificate_path: Path, key_path: Path
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    # The name differs with each CA: browsers confuse CAs of the same name.
    name = _name(f"Shoal CA {os.urandom(4).hex()}")
    certificate = (
        _builder(name, name, public, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    # The key first: a certificate without its key would be damage.
    write_private(key_path, _key_pem(key))
    write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _sign(
    path: Path, authority: x509.Certificate, by: ec.EllipticCurvePrivateKey, names: list[str]
) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    alternatives = x509.SubjectAlternativeName([_general(name) for name in names])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    certificate = (
        _builder(_name("shoal"), authority.subject, public, SERVER_DAYS)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(issuer, critical=False)
        .sign(by, hashes.SHA256())
    )
    chain = [one.public_bytes(serialization.Encoding.PEM) for one in (certificate, authority)]
    # One file, so that a certificate and its key are never of different ages.
    write_private(path, b"".join([*chain, _key_pem(key)]))
    return certificate


def _is_good(leaf: x509.Certificate, authority: x509.Certificate, names: list[str]) -> bool:
    late = leaf.not_valid_after_utc - timedelta(days=RENEW_DAYS) <= datetime.now(UTC)
    early = leaf.not_valid_before_utc > datetime.now(UTC)
    named = set(names) <= set(_names(leaf))
    return named and not late and not early and _is_issued(leaf, authority)


def _is_issued(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except Exception:  # any of several: damaged, of another CA, of another kind
        return False
    return True


def _read_leaf(path: Path) -> x509.Certificate | None:
    try:
        data = read_own(path)
        serialization.load_pem_private_key(data[data.index(b"-----BEGIN PRIVATE") :], None)
        return x509.load_pem_x509_certificates(data)[0]
    except (FileNotFoundError, ValueError, TypeError):
        return None


def self_signed(subject: str) -> bytes:
    """With its key, as PEM: for those to whom it was given as it is."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(subject)
    certificate = (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + _key_pem(key)


# -- pieces ------------------------------------------------------------------------------------


def _served(chain: Path, key: Path, leaf: x509.Certificate, anchor: x509.Certificate) -> Served:
    return Served(
        chain=chain,
        key=key,
        anchor=anchor.public_bytes(serialization.Encoding.PEM).decode(),
        names=tuple(_names(leaf)),
        until=leaf.not_valid_after_utc,
    )


def _names(leaf: x509.Certificate) -> list[str]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [
        *(name.lower() for name in found.get_values_for_type(x509.DNSName)),
        *(str(address) for address in found.get_values_for_type(x509.IPAddress)),
    ]


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _is_name(name: str) -> bool:
    return _address(name) is not None or (bool(DNS_NAME.fullmatch(name)) and len(name) <= 253)


def _general(name: str) -> x509.GeneralName:
    address = _address(name)
    return x509.DNSName(name) if address is None else x509.IPAddress(address)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")


# The TLS of a controller: the certificate it shows, kept valid while it runs.


LOOK_S = 600.0
WARN_DAYS = 14  # before a certificate ends that only the operator can renew


class Encryption:
    """EngineError, in one line, if there is no certificate that could be used."""

    def __init__(self, home: Home, config: ClusterConfig) -> None:
        self._home = home
        self._config = config
        self.served = self.find()
        self.context = context_of(self.served)
        self.host = reach.shown_host(config.host, self.served.names)
        public = bool(config.certificate) and is_public(self.served, self.host)
        self._public = public

    @property
    def fingerprint(self) -> str:
        """Empty if clients trust the certificate without it."""
        return "" if self._public else self.served.fingerprint

    def find(self) -> Served:
        """The operator's certificate as its file is now, or our own, made again if it ends soon."""
        if self._config.certificate:
            chain = Path(self._config.certificate)
            return brought(chain, Path(self._config.key or chain))
        try:
            names = reach.names_of(self._config.host)
            named = urlsplit(self._config.reach).hostname  # nodes may see the head under another
            names += [named] if named and named not in names else []
            return own(self._home.tls, names)
        except OSError as error:
            where = error.filename or self._home.tls
            raise EngineError(f"cannot make a certificate: {where}: {error.strerror}") from None

    def use(self, found: Served) -> bool:
        """True if it is another one. Connections that begin from now on see it."""
        if found == self.served:
            return False
        load(self.context, found)
        self.served = found
        return True

    async def run(self, alarms: Alarms, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self.use(await asyncio.to_thread(self.find)):
                    changed()
                alarms.clear("certificate")
            except EngineError as error:
                alarms.raise_("certificate", f"the certificate cannot be renewed: {error}")
            left = self.served.until - datetime.now(UTC)
            if left < timedelta(days=WARN_DAYS):
                text = f"{self.served.chain} ends on {self.served.until:%Y-%m-%d}"
                alarms.raise_("certificate ends", f"the certificate {text}; replace the file")
            else:
                alarms.clear("certificate ends")
