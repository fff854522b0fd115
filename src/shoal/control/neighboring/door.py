"""The door of this cluster's gateway, where gateways of other clusters call services that are in
several: its certificate, and what others say of theirs."""

from __future__ import annotations

import ipaddress
import ssl
import threading

import msgspec

from shoal.database.settings import Settings
from shoal.model.far import Far

DOOR = "door.pem"  # a setting: the certificate and its key
APART = 1_000  # the door's port is so far above the gateway's

_making = threading.Lock()


def door_pem(settings: Settings, *, leads: bool = True) -> str:
    """The certificate with its key: made once, by a head that leads. Empty: there is none yet.
    Blocks."""
    with _making:
        body = settings.get(DOOR)
        if body is None and leads:
            from shoal.control.certificates import self_signed

            body = self_signed("shoal door")
            settings.set(DOOR, body)
    return body.decode("ascii") if body is not None else ""


def certificate_in(text: str) -> str:
    """The one certificate in a PEM text, and nothing else of it. ValueError if there is none that
    a proxy could load: one that it could not would keep it from serving anything."""
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    try:
        der = ssl.PEM_cert_to_DER_cert(text[max(0, begin) : end + len(ssl.PEM_FOOTER)])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=der)
    except (ValueError, ssl.SSLError):
        raise ValueError("is no certificate in PEM form") from None
    if der[:2] != b"\x30\x82" or int.from_bytes(der[2:4], "big") + 4 != len(der):
        raise ValueError("is more than one certificate")
    return ssl.DER_cert_to_PEM_cert(der)


def plain(door: Far) -> Far:
    """ValueError, as a sentence about it, if a gateway could not use it."""
    try:
        address = ipaddress.ip_address(door.address)
    except ValueError:
        raise ValueError(f"{door.address} is no IP address") from None
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        raise ValueError(f"{address} is not the address of a cluster")
    try:
        certificate = certificate_in(door.certificate)
    except ValueError as error:
        raise ValueError(f"the certificate of {door.site} {error}") from None
    return msgspec.structs.replace(door, address=str(address), certificate=certificate)
