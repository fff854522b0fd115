"""Amounts of CPUs, memory and GPUs: what a member asks for and what it gets."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from shoal.model.labels import admits

WHOLE_GPU_MILLI = 1000


class Kind(NamedTuple):
    """Nodes with equal resources are of one kind, if they are also alike in the labels and taints
    that matter to some job (ADR 39)."""

    gpus: int
    cpu_milli: int
    memory_mb: int
    gpu_model: str = ""
    gpu_memory_mb: int = 0
    containers: bool = False  # can run images
    labels: tuple[str, ...] = ()  # as words: `pool` and `pool=a100`; see `labels.words_of`
    taints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(Demand(self.gpus, self.cpu_milli, self.memory_mb)) + (
            f" ({self.gpu_model})" if self.gpu_model else ""
        )


class Demand(NamedTuple):
    """What one member of a gang needs of the node it runs on.

    `gpu_milli` is the share of each GPU in thousandths; 0 means the share of one GPU that
    `gpu_memory_mb` is of its memory, which depends on the kind of node.
    """

    gpus: int
    cpu_milli: int
    memory_mb: int
    gpu_milli: int = WHOLE_GPU_MILLI
    gpu_memory_mb: int = 0
    gpu_models: tuple[str, ...] = ()
    image: bool = False  # it runs in a container
    where: tuple[str, ...] = ()  # conditions on the node's labels
    tolerates: tuple[str, ...] = ()  # taints that do not keep it away

    def suits(self, kind: Kind) -> bool:
        """Whether nodes of this kind have what it needs, whatever the amount: GPUs of the right
        model and size, something that runs images, and labels that meet its conditions."""
        if (self.where or kind.taints) and not admits(
            self.where, self.tolerates, kind.labels, kind.taints
        ):
            return False
        if self.image and not kind.containers:
            return False
        if not self.gpus:
            return True
        return kind.gpu_memory_mb >= self.gpu_memory_mb and (
            not self.gpu_models
            or kind.gpu_model in self.gpu_models
            or any(is_called(kind.gpu_model, name) for name in self.gpu_models)
        )

    def share_milli(self, kind: Kind) -> int:
        """How much of each GPU it takes on a node of this kind."""
        if self.gpu_milli or not self.gpus:
            return self.gpu_milli
        return -(-self.gpu_memory_mb * WHOLE_GPU_MILLI // kind.gpu_memory_mb)

    def __str__(self) -> str:
        parts = []
        if self.gpus:
            parts.append(self._gpus_text())
        if self.cpu_milli:
            parts.append(
                f"{cpus_text(self.cpu_milli)} CPU" + ("" if self.cpu_milli == 1000 else "s")
            )
        if self.memory_mb:
            parts.append(f"{self.memory_mb} MB")
        return ", ".join(parts) or "nothing"

    def _gpus_text(self) -> str:
        text = plural(self.gpus, "GPU")
        if self.gpu_milli == 0:
            text = f"{self.gpu_memory_mb} MB of a GPU"
        elif self.gpu_milli < WHOLE_GPU_MILLI:
            text = f"{self.gpu_milli / WHOLE_GPU_MILLI:g} GPU"
        elif self.gpu_memory_mb:
            text += f" of {self.gpu_memory_mb} MB"
        return text + (f" ({' or '.join(self.gpu_models)})" if self.gpu_models else "")


class Slice(msgspec.Struct, frozen=True):
    """Part of one node, held by one member from its placement until its end."""

    node: str
    gpus: tuple[int, ...] = ()
    cpu_milli: int = 0
    memory_mb: int = 0
    gpu_milli: int = WHOLE_GPU_MILLI  # share of each of its GPUs


@lru_cache(maxsize=4096)
def is_called(model: str, name: str) -> bool:
    """Whether the name means this GPU model: all its words are in the model's name. "H100" and
    "h100 80gb" both mean "NVIDIA H100 80GB HBM3", as the driver calls it."""
    words = _words(name)
    return bool(words) and words <= _words(model)


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text.lower()).split())


def cpus_text(cpu_milli: int) -> str:
    """CPUs as people write them: 1500 -> '1.5', 2000 -> '2'."""
    return f"{cpu_milli / 1000:g}"


def memory_text(mb: int) -> str:
    """Three figures at most: '512M', '3.5G', '62G', '1.2T'."""
    for unit, size in (("T", 1024 * 1024), ("G", 1024)):
        if mb >= size:
            digits = 0 if mb >= 10 * size else 1
            return f"{mb / size:.{digits}f}".removesuffix(".0") + unit
    return f"{mb}M" if mb else "0"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
