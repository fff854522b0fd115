"""How much of their caps tenants have used, in lines for people."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.state.state import State

LINES_MAX = 10  # a policy may name thousands of tenants


def caps_of(state: State, sees: Callable[[str], bool]) -> list[str]:
    """One line for each tenant with a cap that the reader may see, the fullest first."""
    lines: list[tuple[int, str]] = []
    for tenant in state.policy.tenants:
        parts = [
            (counts.get(tenant.name, 0), most, noun)
            for counts, most, noun in (
                (state.tally.live, tenant.jobs_max, "live jobs"),
                (state.tally.waiting, tenant.waiting_max, "waiting jobs"),
            )
            if most
        ]
        if parts and sees(tenant.name):
            text = ", ".join(f"{have} of at most {most} {noun}" for have, most, noun in parts)
            lines.append(
                (max(1000 * have // most for have, most, _ in parts), f"{tenant.name}: {text}")
            )
    lines.sort(key=lambda line: (-line[0], line[1]))
    return [text for _, text in lines[:LINES_MAX]]
