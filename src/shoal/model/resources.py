"""Amounts of CPUs, memory and GPUs: what a member asks for and what it is given."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Demand(NamedTuple):
    """What one member of a gang needs of the node it runs on."""

    gpus: int
    cpu_milli: int
    memory_mb: int

    def __str__(self) -> str:
        parts = []
        if self.gpus:
            parts.append(plural(self.gpus, "GPU"))
        if self.cpu_milli:
            parts.append(
                f"{cpus_text(self.cpu_milli)} CPU" + ("" if self.cpu_milli == 1000 else "s")
            )
        if self.memory_mb:
            parts.append(f"{self.memory_mb} MB")
        return ", ".join(parts) or "nothing"


class Slice(msgspec.Struct, frozen=True):
    """Part of one node, held by one member from its placement until it is over."""

    node: str
    gpus: tuple[int, ...] = ()
    cpu_milli: int = 0
    memory_mb: int = 0


def cpus_text(cpu_milli: int) -> str:
    """CPUs as people write them: 1500 -> '1.5', 2000 -> '2'."""
    return f"{cpu_milli / 1000:g}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
