"""Probe of a node's own links as the kernel reports them: InfiniBand, RoCE and Ethernet.

Formats: Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net of Linux.
Counters are shown as they are; what counts is how they grow from one check to the next.
"""

from __future__ import annotations

from pathlib import Path

from shoal.probes.reading import Asked, Reading, nothing

SYS = Path("/sys")
PORTS_MAX = 32  # of each kind; larger machines have rails that are alike
# Sums, because which of them grows depends on the card; each is a cable or a port that is going.
IB_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_rcv_remote_physical_errors",
)
ETH_ERRORS = ("rx_errors", "tx_errors")


def probe(_: Asked) -> Reading:
    return links()


def links(root: Path = SYS) -> Reading:
    """`root`: where sysfs is mounted."""
    found = nothing()
    for port in _folders(root / "class" / "infiniband", "*/ports/*"):
        _infiniband(port, found)
    for device in _folders(root / "class" / "net", "*"):
        if (device / "device").exists():  # bridges, tunnels and pairs have none
            _ethernet(device, found)
    return found


def _infiniband(port: Path, found: Reading) -> None:
    """`state` is "4: ACTIVE", `rate` "400 Gb/sec (4X NDR)". A port that is down has some rate,
    too, so that is left out."""
    card, number = port.parent.parent.name, port.name
    name = f"ib_{_plain(card)}_{_plain(number)}"
    state = _text(port / "state").partition(": ")[2]
    if not state:
        return
    physical = _text(port / "phys_state").partition(": ")[2] or "?"
    kind = {"Ethernet": "RoCE"}.get(_text(port / "link_layer"), "InfiniBand")
    found.figures[f"{name}_up"] = int(state == "ACTIVE")
    if state == "ACTIVE":
        rate = _mbits(_text(port / "rate"))
        if rate:
            found.figures[f"{name}_rate_mbits"] = rate
    else:
        found.notes.append(f"{kind} port {number} of {card} is {state} ({physical})")
    counters = port / "counters"
    _add(found, f"{name}_link_downs", counters, ("link_downed",))
    _add(found, f"{name}_recoveries", counters, ("link_error_recovery",))
    _add(found, f"{name}_errors", counters, IB_ERRORS)


def _ethernet(device: Path, found: Reading) -> None:
    """`speed` is in Mbit/s; it is -1, or cannot be read, where there is no link or no number."""
    name = f"eth_{_plain(device.name)}"
    state = _text(device / "operstate")
    if state in ("", "unknown"):
        return
    found.figures[f"{name}_up"] = int(state == "up")
    speed = _number(device / "speed")
    if state == "up" and speed is not None and speed > 0:
        found.figures[f"{name}_rate_mbits"] = speed
    if state == "up" and _text(device / "duplex") == "half":
        found.faults.append(f"{device.name}: runs in half duplex; its cable or switch is wrong")
    _add(found, f"{name}_link_downs", device, ("carrier_down_count",))
    _add(found, f"{name}_errors", device / "statistics", ETH_ERRORS)


def _add(found: Reading, figure: str, folder: Path, files: tuple[str, ...]) -> None:
    """The sum of those counters that there are."""
    values = [value for file in files if (value := _number(folder / file)) is not None]
    if values:
        found.figures[figure] = sum(values)


def _mbits(text: str) -> int:
    """'2.5 Gb/sec (1X SDR)' is 2500."""
    try:
        return round(float(text.split(" ")[0]) * 1000)
    except ValueError:
        return 0


def _folders(place: Path, pattern: str) -> list[Path]:
    try:
        return sorted(place.glob(pattern))[:PORTS_MAX]
    except OSError:
        return []


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()[:200]
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None
