"""Which engine brings nodes to a cluster, as `shoal up` was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig

ENGINES = ("slurm", "kubernetes", "ray")
LOCAL = "local"


def chosen(flag: str | None, last: ClusterConfig | None) -> str:
    """The flag, or what the cluster had before."""
    if last is not None and last.engine == "ray" and last.reach and "://" not in last.reach:
        message = "this cluster was started by an earlier version, in which Ray carried messages"
        if flag is None:
            advice = "start it with: shoal up --engine local --host 0.0.0.0 --node-address ''"
            raise Failure(f"{message}; {advice}, then join the other machines again")
    if flag is None:
        return last.engine if last is not None else LOCAL
    if flag not in (LOCAL, *ENGINES):
        names = f"{', '.join(ENGINES)} or {LOCAL}"
        raise Failure(f"--engine: must be {names}, not '{flag[:40]}'", USAGE)
    return flag
