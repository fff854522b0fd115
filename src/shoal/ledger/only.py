"""Whose amounts a report of the ledger shows."""

from __future__ import annotations

from typing import NamedTuple


class Only(NamedTuple):
    """Whose amounts are wanted; None: anybody's, "": of what has no name."""

    tenant: str | None = None
    user: str | None = None
    job: str | None = None

    @property
    def given(self) -> bool:
        return self != EVERYBODY

    def fits(self, tenant: str, user: str, job: str) -> bool:
        pairs = ((self.tenant, tenant), (self.user, user), (self.job, job))
        return all(wanted in (None, there) for wanted, there in pairs)

    @property
    def condition(self) -> tuple[str, tuple[str, ...]]:
        """More words for a query, and their values."""
        named = {'owners."user"': self.user, "owners.tenant": self.tenant, "owners.job": self.job}
        own = {column: value for column, value in named.items() if value is not None}
        return "".join(f"AND {column} = ? " for column in own), tuple(own.values())


EVERYBODY = Only()
