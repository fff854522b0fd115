"""How a client reaches a controller: where, with which token, and whose certificate it accepts."""

from __future__ import annotations

import functools
import hashlib
import http.client
import os
import re
import socket
import ssl
import struct
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.client.address import SOCKET_NAME, Address
from shoal.machine.files import read_own, require_own, short_path

CREDENTIALS = struct.Struct("3i")  # process, user, group
LOOK_S = 10.0  # for a server that a user names for the first time
PEM_BYTES_MAX = 64 * 1024
# OpenSSL's numbers for what is wrong with a certificate.
NOT_YET_VALID, EXPIRED, OTHER_NAME, OTHER_ADDRESS = 9, 10, 62, 64


class ShoalError(Exception):
    """A refusal or failure, with a message that a user can act on."""

    def __init__(self, message: str, field: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class Unreachable(ShoalError):
    """No controller answers at this address."""


class WrongCertificate(ShoalError):
    """Whoever answers at this address is not who the user logged in to. Nothing was sent."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A controller as a client knows it: by a socket file, or by its URL and the certificate (PEM)
    that the user accepted. Without one, the system decides whom to trust."""

    url: str
    token: str = ""
    socket: Path | None = None
    certificate: str = ""
    context: str = ""
    urls: tuple[str, ...] = ()  # of other heads, as the user named them ...
    heads: tuple[str, ...] = ()  # ... and as the cluster did

    @property
    def all_urls(self) -> tuple[str, ...]:
        """The one to try first, and those to try after it."""
        if self.socket is not None:
            return (self.url,)
        return tuple(dict.fromkeys((self.url, *self.urls, *self.heads)))

    def moved_to(self, url: str) -> Endpoint:
        """The same cluster at another of its heads."""
        others = tuple(one for one in self.all_urls if one != url)
        return msgspec.structs.replace(self, url=url, urls=others, heads=())

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def authority(self) -> str:
        """As requests name it."""
        return "localhost" if self.socket is not None else urlsplit(self.url).netloc

    @property
    def secure(self) -> bool:
        return self.socket is None and self.url.startswith("https://")


def at(url: str, token: str, certificate: str = "", context: str = "") -> Endpoint:
    """ShoalError if it is not a URL of a controller."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and parts.path in ("", "/") and not (parts.query or parts.fragment)
        good = good and parts.username is None and url.isascii() and url.isprintable()
    except ValueError:
        good = False
    if not good:
        raise ShoalError(f"{url[:200]!r} is not an address like https://head:7700")
    # In one form: whether it is secure is read off the URL, and "HTTPS://" is.
    plain = f"{parts.scheme}://{parts.netloc.lower()}"
    return Endpoint(url=plain, token=token, certificate=certificate, context=context)


def at_any(urls: str, token: str, certificate: str = "") -> Endpoint:
    """A cluster whose heads are written with commas between them."""
    found = [at(one.strip(), token, certificate) for one in urls.split(",") if one.strip()]
    if not found:
        return at(urls, token, certificate)
    return msgspec.structs.replace(found[0], urls=tuple(one.url for one in found[1:]))


def at_home(home: Path) -> Endpoint:
    """The cluster in this home. The socket file is used: any user can take a port while no
    controller listens."""
    try:
        require_own(home)
        address = msgspec.json.decode(read_own(home / "controller.json"), type=Address)
        token = read_own(home / "token").decode().strip()
    except FileNotFoundError:
        message = f"no cluster is up in {home}; start one with: shoal up"
        raise Unreachable(message) from None
    except PermissionError as error:
        raise Unreachable(f"cannot use {error.filename}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"{home}/controller.json is damaged; repair it with: shoal up"
        raise Unreachable(message) from None
    if not token:
        raise Unreachable(f"{home}/token is empty; repair it with: shoal down, then shoal up")
    if not address.socket:
        message = f"the cluster in {home} was started by another version of shoal"
        raise Unreachable(f"{message}; take it over with: shoal upgrade")
    # Beside the token, even if the home was moved.
    return Endpoint(url=address.url, token=token, socket=home / SOCKET_NAME)


def connection_to(endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    if endpoint.socket is not None:
        return _Local(endpoint.socket, timeout_s)
    if endpoint.secure:
        return _Secure(endpoint, timeout_s)
    return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout_s)


@functools.lru_cache(maxsize=4)
def trust_in(certificate: str) -> ssl.SSLContext:
    """Accepts what the certificate has signed, or is. Loading the system's takes 10 ms or more, so
    they are left out where a certificate is pinned."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if certificate:
        context.load_verify_locations(cadata=certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.load_default_certs()
    return context


class _Local(http.client.HTTPConnection):
    """A connection to the socket file of a home, if this user or root listens there."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path, self.timeout)


def connected(file: Path, timeout_s: float | None) -> socket.socket:
    """A connection to a socket file, if this user or root listens there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        with short_path(file) as path:
            made.connect(path)
        peer = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        owner = CREDENTIALS.unpack(peer)[1]
        if owner not in (0, os.geteuid()):
            raise Unreachable(f"{file} belongs to another user (uid {owner})")
    except BaseException:
        made.close()
        raise
    return made


class _Secure(http.client.HTTPSConnection):
    """A connection that is refused before a token is sent, if the certificate is not right."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        context = trust_in(endpoint.certificate)
        super().__init__(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
        self._endpoint = endpoint

    def connect(self) -> None:
        try:
            super().connect()
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise _wrong(self._endpoint, error) from None
        except ssl.SSLError as error:
            self.close()
            if error.reason == "WRONG_VERSION_NUMBER":
                message = f"{self._endpoint.url} does not speak TLS; is it an http:// address?"
                raise Unreachable(message) from None
            raise


# -- certificates ------------------------------------------------------------------------------


class Presented(msgspec.Struct, frozen=True):
    """What somebody at an address shows, as PEM: nothing of it is verified. `anchor` is what a
    cluster offers to those who log in; the certificate itself if it offers nothing."""

    leaf: str
    anchor: str


def presented(endpoint: Endpoint) -> Presented:
    """Nothing secret is sent. OSError or HTTPException if nobody speaks TLS there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        endpoint.host, endpoint.port, timeout=LOOK_S, context=context
    )
    try:
        connection.connect()
        der = connection.sock.getpeercert(binary_form=True)
        leaf = ssl.DER_cert_to_PEM_cert(der or b"")
        try:
            # Under this name it answers, even if it does not know the address that we used.
            connection.request("GET", "/v1/certificate", headers={"Host": "localhost"})
            with connection.getresponse() as response:
                text = response.read(PEM_BYTES_MAX).decode("ascii")
            fingerprint(text)
            return Presented(leaf, text)
        except (OSError, http.client.HTTPException, ValueError):
            return Presented(leaf, leaf)
    finally:
        connection.close()


def fingerprint(pem: str) -> str:
    """ValueError if it is not a certificate."""
    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.strip())).hexdigest()


def read_fingerprint(text: str) -> str:
    """As others write it: with colons, in capitals, with or without sha256. ValueError if it is not
    a whole one: a part of it would be easy to imitate."""
    found = re.sub(r"^sha-?256[:=]?", "", text.strip().lower().replace("fingerprint=", ""))
    found = found.strip().replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", found):
        raise ValueError("write sha256: and 64 digits, as the head shows it: shoal login --show")
    return f"sha256:{found}"


def _wrong(endpoint: Endpoint, error: ssl.SSLCertVerificationError) -> WrongCertificate:
    """One line that says what is wrong with the certificate, and what to do."""
    if error.verify_code in (OTHER_NAME, OTHER_ADDRESS):
        names = ", ".join(_names(endpoint)) or "other hosts"
        message = f"the certificate at {endpoint.url} is for {names}, not for {endpoint.host}"
        return WrongCertificate(f"{message}; log in with one of these names")
    if error.verify_code == EXPIRED:
        message = f"the certificate at {endpoint.url} has expired, or this machine's clock is wrong"
        return WrongCertificate(f"{message}; renew it on the head with: shoal down, then shoal up")
    if error.verify_code == NOT_YET_VALID:
        message = f"the certificate at {endpoint.url} is not valid yet"
        return WrongCertificate(f"{message}; set this machine's clock")
    expected = fingerprint(endpoint.certificate) if endpoint.certificate else ""
    try:
        shown = presented(endpoint)
        # Anyone can offer the right CA; that they cannot use it shows in their own certificate.
        offered = fingerprint(shown.anchor)
        found = offered if offered != expected else fingerprint(shown.leaf)
    except (OSError, http.client.HTTPException, ValueError):
        found = "none"
    # A command with the fingerprint that was found would be too easy to paste.
    if not expected:
        message = f"this system does not trust the certificate at {endpoint.url} (it is {found})"
        advice = "log in with the line that the head prints for: shoal login --show"
        return WrongCertificate(f"{message}; {advice}")
    message = f"the certificate at {endpoint.url} is not the one you logged in with"
    message += f" (expected {expected}, found {found})"
    advice = "was the head set up again? then log in again with the line that it prints for: "
    advice += "shoal login --show; otherwise someone is in between, and nothing was sent to them"
    return WrongCertificate(f"{message}; {advice}")


def _names(endpoint: Endpoint) -> list[str]:
    """The names in a certificate that is right but for its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if endpoint.certificate:
        context.load_verify_locations(cadata=endpoint.certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.load_default_certs()
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout=10) as link,
            context.wrap_socket(link, server_hostname=endpoint.host) as secure,
        ):
            shown: dict[str, Any] = dict(secure.getpeercert() or {})
    except OSError:
        return []
    return [str(value) for _, value in shown.get("subjectAltName", ())][:5]
