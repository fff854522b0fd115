"""A policy: frozen numbers that the core obeys."""

from __future__ import annotations

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults suit one machine; a silent node is given up only after `grace_ms`."""

    suspect_after_ms: int = 5_000
    grace_ms: int = 60_000
    # A blocked job may be overtaken by jobs behind it for this long; then the queue is held for it.
    patience_ms: int = 600_000
    # Node losses do not use up a job's retries, but nothing is retried without a bound.
    losses_max: int = 100
    backoff_ms_max: int = 300_000
    # Rendezvous ports lie below the range that Linux hands out to outgoing connections.
    port_first: int = 20_000
    port_count: int = 12_000
    # One step places at most this many jobs and asks to be called again, so that no step is long.
    placements_per_step_max: int = 200
