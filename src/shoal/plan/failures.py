"""How often a run is interrupted, how often it should save, and how much of its time is work.

Failures arrive at random with a constant rate (a Poisson process). Sources: the rate is that of
the Llama 3 405B run (arXiv 2407.21783, table 5), the interval that of Daly (Future Generation
Computer Systems 22, 2006), whose first term is Young's (CACM 17, 1974).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

HOUR_S = 3600.0

# 54 days of Llama 3 405B: 419 unexpected interruptions on 16,384 GPUs, one per 50,700 GPU-hours.
LLAMA3_INTERRUPTIONS, LLAMA3_GPUS, LLAMA3_DAYS = 419, 16_384, 54
PER_GPU_HOUR = LLAMA3_INTERRUPTIONS / (LLAMA3_GPUS * LLAMA3_DAYS * 24)

# Found, replaced, started, warmed up again. No source measures all of it: an assumption.
RESTART_S = 600.0
# What Llama 3's storage sustains: 2 TB/s for the 2,048 nodes of that run.
STORAGE_BYTES_PER_S_PER_NODE = 1e9
# How much of the time saving and repeating may cost before better storage is worth a sentence.
SAVING_SHARE = 0.03
NEVER = math.inf


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed about a cluster's failures and its storage."""

    per_gpu_hour: float = PER_GPU_HOUR
    restart_s: float = RESTART_S
    storage_bytes_per_s: float = NEVER  # of the whole cluster


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What failures do to a run of many GPUs. Shares are of the run's whole time and add up to 1
    with `goodput`: the share in which work was done that was kept."""

    gpus: int
    failures_per_day: float
    mean_between_s: float
    checkpoint_bytes: float
    save_s: float
    load_s: float
    restart_s: float  # with the load
    interval_s: float  # of work between two checkpoints
    goodput: float
    saving: float
    repeating: float
    restarting: float
    storage_needed_bytes_per_s: float  # so that saving and repeating cost SAVING_SHARE at most


def mean_between_s(gpus: int, per_gpu_hour: float = PER_GPU_HOUR) -> float:
    """Seconds between two failures of any of these GPUs."""
    rate = gpus * per_gpu_hour
    return HOUR_S / rate if rate > 0 else NEVER


def young_s(save_s: float, between_s: float) -> float:
    """Work between two checkpoints by Young: the square root of 2 x save x mean time between."""
    return math.sqrt(2 * save_s * between_s)


def daly_s(save_s: float, between_s: float) -> float:
    """Work between two checkpoints by Daly's higher order estimate."""
    if between_s == NEVER:
        return NEVER
    if save_s >= 2 * between_s:
        return between_s
    part = save_s / (2 * between_s)
    return young_s(save_s, between_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


class Shares(NamedTuple):
    """Where the time goes; the four add up to 1."""

    work: float
    saving: float
    repeating: float
    restarting: float


def shares(interval_s: float, save_s: float, restart_s: float, between_s: float) -> Shares:
    """Daly's complete model, which also counts failures during a save or a restart: to keep
    `interval` seconds of work takes  M e^(R/M) (e^((interval + save)/M) - 1)  seconds."""
    if between_s == NEVER:
        return Shares(1.0, 0.0, 0.0, 0.0)
    segment = (interval_s + save_s) / between_s
    if segment > 500 or restart_s / between_s > 500:
        return Shares(0.0, 0.0, 0.0, 1.0)  # it never gets from one checkpoint to the next
    attempts = math.expm1(segment) * between_s  # without restarts
    whole = math.exp(restart_s / between_s) * attempts
    work, saving = interval_s / whole, save_s / whole
    repeating = (attempts - interval_s - save_s) / whole
    return Shares(work, saving, repeating, 1 - work - saving - repeating)


def goodput(gpus: int, checkpoint_bytes: float, faults: Faults) -> Goodput:
    """With Daly's interval between checkpoints."""
    between_s = mean_between_s(gpus, faults.per_gpu_hour)
    save_s = checkpoint_bytes / faults.storage_bytes_per_s
    restart_s = faults.restart_s + save_s  # it loads as fast as it saves
    interval_s = daly_s(save_s, between_s)
    found = shares(interval_s, save_s, restart_s, between_s)
    return Goodput(
        gpus=gpus,
        failures_per_day=24 * HOUR_S / between_s,
        mean_between_s=between_s,
        checkpoint_bytes=checkpoint_bytes,
        save_s=save_s,
        load_s=save_s,
        restart_s=restart_s,
        interval_s=interval_s,
        goodput=found.work,
        saving=found.saving,
        repeating=found.repeating,
        restarting=found.restarting,
        storage_needed_bytes_per_s=storage_needed(checkpoint_bytes, between_s),
    )


def storage_needed(checkpoint_bytes: float, between_s: float) -> float:
    """At Daly's interval, saving and repeating cost about sqrt(2 x save / M) of the time."""
    return checkpoint_bytes / (between_s * SAVING_SHARE**2 / 2)
