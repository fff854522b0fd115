"""How other machines reach this one: its names and addresses, and whether they can at all."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterable

from shoal.machine.kernel import own_address

LOOKUP_S = 2.0  # a resolver that does not answer must not hold up `shoal up`
WILDCARDS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def names_of(host: str) -> list[str]:
    """What a certificate for a cluster that listens on `host` should name."""
    names = [] if host in WILDCARDS else [host.lower()]
    names += [socket.gethostname().lower(), _full_name().lower(), "localhost", "127.0.0.1", "::1"]
    if host in WILDCARDS:
        names += _addresses()
    return list(dict.fromkeys(name for name in names if name))


def shown_host(host: str, names: Iterable[str]) -> str:
    """The name or address that others are given: one that the certificate has, if it has any."""
    known = [name for name in names if not name.startswith("*.")]
    wanted = own_address() if host in WILDCARDS else host
    others = (name for name in known if not is_loopback(name))
    return wanted if wanted in known else next(others, wanted)


def machine_address(host: str) -> str:
    """Where members on other machines meet those on this one, if the cluster listens on `host`."""
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
    except ValueError:
        if is_loopback(host):
            return "127.0.0.1"
    return own_address()


def _full_name() -> str:
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(socket.getfqdn()), daemon=True)
    asking.start()
    asking.join(LOOKUP_S)
    return found[0] if found else ""


def _addresses() -> list[str]:
    """Of all interfaces, except those that are valid on one link only."""
    import psutil

    found = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                found.append(one.address)
    return sorted(found)
