"""Jumps of the machine's clock: noticed and logged. No decision uses that clock."""

from __future__ import annotations

from shoal.core.state.events.cluster import ClockJumped
from shoal.core.state.round import Round

# Small corrections, as NTP makes them, are not worth an event.
JUMP_MS = 5_000


def note_clock(round_: Round, drift_ms: int | None) -> None:
    known_ms = round_.state.drift_ms
    if drift_ms is None or abs(drift_ms - known_ms) < JUMP_MS:
        return
    jumped_ms = drift_ms - known_ms
    way = "ahead" if jumped_ms > 0 else "back"
    why = (
        f"the machine's clock was set {abs(jumped_ms) / 1000:.0f} s {way}; time limits, retries "
        "and the ledger are not affected"
    )
    round_.emit(ClockJumped(at_ms=round_.now_ms, drift_ms=drift_ms, why=why))
