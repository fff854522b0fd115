"""`shoal up` for a cluster with several heads: its database, shared folder and invitation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig, Home


class Several(NamedTuple):
    """The flags; None means not given."""

    database: str | None
    shared: Path | None
    head: Path | None

    def changes(self, home: Home, last: ClusterConfig | None) -> dict[str, object]:
        """What they change in the configuration of the last time; a home that is invited becomes
        one of that cluster."""
        if self.head is not None:
            return self._invited(home)
        if last is not None and last.database:
            return self._as_before()
        if self.database is None:
            if self.shared is not None:
                raise Failure("--shared: has no effect without --database", USAGE)
            return {}
        return self._first(home)

    def _first(self, home: Home) -> dict[str, object]:
        from shoal.control.invitation import InvitationError, free_name, mark_shared

        if self.shared is None:
            raise Failure("--shared: name a folder that all heads see, with --database", USAGE)
        if home.database.exists():
            text = f"--database: the cluster in {home.path} has its own file, {home.database.name}"
            raise Failure(f"{text}; see docs/several-heads.md for how to move it")
        others = _heads(self.database or "")
        if others:
            text = f"--database: it already has a cluster (its heads: {', '.join(others)})"
            raise Failure(f"{text}; to add a head, run there: shoal heads invite")
        folder = self.shared.expanduser().absolute()
        home.create()
        try:
            mark_shared(folder, home.cluster_id(), first=True)
        except InvitationError as error:
            raise Failure(str(error), USAGE) from None
        return {"database": self.database, "shared": str(folder), "head": free_name(())}

    def _as_before(self) -> dict[str, object]:
        """The server may have another address by now; the head keeps its name."""
        changes: dict[str, object] = {}
        if self.database is not None:
            _heads(self.database)
            changes["database"] = self.database
        if self.shared is not None:
            changes["shared"] = str(self.shared.expanduser().absolute())
        return changes

    def _invited(self, home: Home) -> dict[str, object]:
        from shoal.control.invitation import (
            InvitationError,
            accept,
            free_name,
            mark_shared,
            read,
        )

        assert self.head is not None
        try:
            found = read(self.head)
            database = self.database or found.database
            folder = (self.shared or Path(found.shared)).expanduser().absolute()
            mark_shared(folder, found.cluster, first=False)
            taken = (*_heads(database), *(one.name for one in found.heads))
            accept(home, found)
        except InvitationError as error:
            raise Failure(str(error), USAGE) from None
        before = home.read_config()
        name = before.head if before is not None and before.head else free_name(taken)
        return {
            "database": database,
            "shared": str(folder),
            "head": name,
            "engine": found.engine,
            "domain": found.domain,
        }


def _heads(database: str) -> tuple[str, ...]:
    """Their names. A database that cannot be used is refused in one line."""
    from shoal.database.lease import Lease
    from shoal.ports import StoreError

    lease = None
    try:
        lease = Lease(database)
        return tuple(one.name for one in lease.heads())
    except StoreError as error:
        raise Failure(f"--database: {error}") from None
    finally:
        if lease is not None:
            lease.close()


def with_names(config: ClusterConfig) -> ClusterConfig:
    """Virtual nodes of several heads must not have the same names."""
    import re

    import msgspec

    if not config.database:
        return config
    named = [
        msgspec.structs.replace(one, id=f"{config.head}-{one.id}")
        if re.fullmatch(r"n[0-9]+", one.id)
        else one
        for one in config.nodes
    ]
    return msgspec.structs.replace(config, nodes=tuple(named))
