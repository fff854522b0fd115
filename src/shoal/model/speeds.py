"""Rates and sizes in words: 940 MB/s, 12.5 GB/s, 64 KiB."""

from __future__ import annotations

KILO = 1000


def rate_text(mbs: float) -> str:
    """Decimal, as disks and networks are sold."""
    return f"{amount_text(mbs)}/s"


def amount_text(mb: float) -> str:
    """At most three figures, from megabytes."""
    for unit in ("MB", "GB", "TB"):
        if mb < KILO or unit == "TB":
            break
        mb /= KILO
    figures = f"{mb:.0f}" if mb >= 100 or mb == int(mb) else f"{mb:.1f}" if mb >= 1 else f"{mb:.2g}"
    return f"{figures} {unit}"


def size_text(size_bytes: int) -> str:
    """Binary, as messages are sized."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"
