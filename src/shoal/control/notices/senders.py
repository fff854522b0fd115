"""Sending one notice: as a signed webhook, to Slack or a server that understands the same, or by
mail. All of it may block, for 10 seconds at most, and runs in threads of its own.

Webhooks follow the Standard Webhooks specification: `webhook-id` stays the same however often a
notice is sent, and `webhook-signature` is an HMAC-SHA256 of id, time and body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import ipaddress
import smtplib
import socket
import ssl
import time
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from shoal.link.http import ended_after, fetch
from shoal.model.notice import Encryption, Notice, Smtp, What

SEND_S = 10.0  # for all of it: names, connection, TLS, request and answer
KEY_PREFIX = "whsec_"  # as the specification writes keys
BAD = (What.FAILED, What.NODE_LOST)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
METADATA = ipaddress.ip_address("fd00:ec2::254")  # a cloud's; the IPv4 one is link-local

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class SendError(Exception):
    """Why the notice was not delivered, without the URL."""


def signature(key: str, number: str, seconds: int, body: bytes) -> str:
    raw = base64.b64decode(key.removeprefix(KEY_PREFIX))
    signed = f"{number}.{seconds}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(raw, signed, hashlib.sha256).digest()).decode()


def webhook(notice: Notice, url: str, key: str, cluster: str, allow: tuple[Network, ...]) -> None:
    body = msgspec.json.encode(content(notice, cluster))
    seconds = int(time.time())
    headers = {
        "webhook-id": notice.id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": signature(key, notice.id, seconds, body),
    }
    _post(url, body, headers, notice.trusted, allow)


def slack(notice: Notice, url: str, allow: tuple[Network, ...]) -> None:
    text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    mark = ":x: " if notice.what in BAD else ""
    body = msgspec.json.encode({"text": f"{mark}{text}"})
    _post(url, body, {"webhook-id": notice.id}, notice.trusted, allow)


def mail(notice: Notice, address: str, smtp: Smtp, password: str, cluster: str) -> None:
    message = EmailMessage()
    message["From"], message["To"] = smtp.sender, address
    message["Subject"] = "[shoal] " + " ".join(notice.text.split())[:200]
    message["Message-ID"] = f"<{notice.id}@{cluster}.shoal>"
    message["Date"] = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime())
    lines = [notice.text, ""]
    lines += [f"{name}: {value}" for name, value in content(notice, cluster).items()]
    message.set_content("\n".join(lines) + "\n")
    context = ssl.create_default_context()
    try:
        if smtp.encryption is Encryption.TLS:
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                smtp.host, smtp.port, timeout=SEND_S, context=context
            )
        else:
            server = smtplib.SMTP(smtp.host, smtp.port, timeout=SEND_S)
        with ended_after(SEND_S, lambda: server.sock), server:
            if smtp.encryption is Encryption.STARTTLS:
                server.starttls(context=context)
            if smtp.user:
                server.login(smtp.user, password)
            server.send_message(message)
    except smtplib.SMTPException as error:
        raise SendError(f"the mail server refuses: {_brief(error)}") from None
    except (OSError, ValueError) as error:
        raise SendError(f"the mail server cannot be reached: {_brief(error)}") from None


def content(notice: Notice, cluster: str) -> dict[str, Any]:
    """What a webhook gets, as JSON. Fields that say nothing about this notice are left out."""
    given = {
        "id": notice.id,
        "type": notice.what.value,
        "at_ms": notice.at_ms,
        "text": notice.text,
        "cluster": cluster,
        "job": notice.job,
        "name": notice.name,
        "tenant": notice.of_tenant,
        "user": notice.user,
        "state": notice.state,
        "exit_code": notice.code,
        "why": notice.why,
        "node": notice.node,
        "labels": notice.labels,
    }
    return {name: value for name, value in given.items() if value not in ("", {}, None)}


def _post(
    url: str, body: bytes, headers: dict[str, str], trusted: bool, allow: tuple[Network, ...]
) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise SendError("the URL cannot be read") from None
    if parts.scheme not in ("http", "https") or not host:
        raise SendError("the URL must begin with https:// or http://")
    headers = {**headers, "Content-Type": "application/json", "User-Agent": "shoal"}
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    def connect(host: str, port: int) -> socket.socket:
        return _connect(host, port, trusted, allow)

    try:
        status, _ = fetch(url, body, headers, connect, SEND_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SendError(_brief(error)) from None
    if 300 <= status < 400:
        raise SendError(
            f"it answers with {status}; redirects are not followed, so give the new URL"
        )
    if not 200 <= status < 300:
        raise SendError(f"it answers with {status}")


def _connect(host: str, port: int, trusted: bool, allow: tuple[Network, ...]) -> socket.socket:
    """To an address that was checked, so that the name cannot mean another one by then."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    open_ = [one for one in found if trusted or permitted(str(one[4][0]), allow)]
    if not open_:
        raise SendError(
            "it is an address of the head itself, or link-local; an admin may allow it: "
            "shoal notify settings --help"
        )
    last: OSError | None = None
    deadline = time.monotonic() + SEND_S
    for family, kind, protocol, _, address in open_:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
        else:
            return sock
    raise last or OSError("no address")


def permitted(text: str, allow: tuple[Network, ...]) -> bool:
    """Whether a tenant may have notices sent to this address. The tenant's jobs reach the rest of
    the network anyway; they do not reach services that trust the head because they are on it."""
    address = _plain(ipaddress.ip_address(text.partition("%")[0]))
    if any(address in network for network in allow):
        return True
    if (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
        or address == METADATA
    ):
        return False
    return not _is_own(address)


def _plain(address: Address) -> Address:
    """IPv4 in the clothes of IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        inside = address.ipv4_mapped or address.sixtofour
        if inside is not None:
            return inside
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_own(address: Address) -> bool:
    """Only an address of this machine can be bound."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _brief(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer within {SEND_S:g} s"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]
