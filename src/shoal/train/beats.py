"""Reports the run's progress to the node's agent: small datagrams that never block the run."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from typing import Any

import msgspec

from shoal.model.progress import BEAT_BYTES_MAX, BEATS_ENV, METRICS_MAX, Beat

BEAT_EVERY_NS = 200_000_000
REF_ENV = "SHOAL_REF"
NAME_LENGTH_MAX = 64


class Beats:
    """Does nothing in a process that Shoal did not start."""

    def __init__(self) -> None:
        name, self._ref = os.environ.get(BEATS_ENV, ""), os.environ.get(REF_ENV, "")
        self._address = "\0" + name
        self._socket: socket.socket | None = None
        if name and self._ref:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
        self.due_ns = 0 if self._socket else 1 << 62  # when the loop sends the next beat
        self._lock = threading.Lock()
        self._values = Values()
        self._last = Beat(ref=self._ref)

    def log(self, metrics: dict[str, Any]) -> None:
        if self._socket is not None:
            self._values.take(metrics)

    def hurry(self) -> None:
        """Send the next beat after the current step."""
        if self._socket is not None:
            self.due_ns = 0

    def send(self, **numbers: int | bool) -> None:
        """Send what is known now. A full or missing socket does not concern the run."""
        if self._socket is None:
            return
        self.due_ns = time.perf_counter_ns() + BEAT_EVERY_NS
        with self._lock:
            loss, metrics = self._values.read()
            self._last = msgspec.structs.replace(self._last, loss=loss, metrics=metrics, **numbers)
            data = msgspec.msgpack.encode(self._last)
            if len(data) <= BEAT_BYTES_MAX:
                with contextlib.suppress(OSError):
                    self._socket.sendto(data, self._address)


class Values:
    """The newest loss and metrics. A value on a GPU is copied without waiting and read when it has
    arrived; reading it directly would make the loop wait for the GPU."""

    def __init__(self) -> None:
        self._newest: dict[str, Any] = {}
        self._on_the_way: tuple[Any, dict[str, Any]] | None = None
        self._known: dict[str, float] = {}

    def take(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name in self._newest or len(self._newest) <= METRICS_MAX:
                self._newest[name] = value.detach() if hasattr(value, "detach") else value

    def read(self) -> tuple[float | None, dict[str, float]]:
        if self._on_the_way is not None and self._on_the_way[0].query():
            self._keep(self._on_the_way[1])
            self._on_the_way = None
        far = {name: value for name, value in self._newest.items() if _is_far(value)}
        self._keep({name: value for name, value in self._newest.items() if name not in far})
        if far and self._on_the_way is None:
            self._on_the_way = _bring(far)
        self._newest = {}
        metrics = {name: value for name, value in self._known.items() if name != "loss"}
        return self._known.get("loss"), metrics

    def _keep(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not a single number
                number = float(value)
                known = name == "loss" or name in self._known or len(self._known) < METRICS_MAX
                if known and math.isfinite(number):
                    self._known[name[:NAME_LENGTH_MAX]] = number


def _is_far(value: Any) -> bool:
    return bool(getattr(value, "is_cuda", False))


def _bring(values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    copies = {}
    for name, value in values.items():
        near = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copies[name] = near.copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, copies
