"""The port through which a member is put to sleep and woken, whatever its GPUs are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Refused(Exception):
    """It cannot be put to sleep, and is awake as before. The text is one clause that says why."""


class Lost(Exception):
    """It cannot be woken, so it has to be killed. The text is one clause that says why."""


class Full(Exception):
    """It cannot be woken now, because its GPUs have no room for it; it sleeps as before. The text
    is one clause that says how much is free and needed."""


class Processes(Protocol):
    """All processes of one member: its own, their descendants in any session, its container."""

    def pids(self) -> list[int]:
        """Those that live now, as far as this node can see them."""

    async def freeze(self) -> None:
        """None of them runs from now on. Raises Refused, and then all run."""

    async def thaw(self) -> None:
        """All run that ran before. Does nothing to a member that is not frozen."""


class Sleeping(Protocol):
    """One way to sleep. At most one call per member is under way at a time; calls for different
    members may be under way together. A call that is cancelled may leave the member anywhere in
    between: then `wake` is called, or the member is killed."""

    name: str  # as in NodeSpec.sleep

    def why_not(self) -> str:
        """Why it does not work on this node, in one clause; empty if it does."""

    async def sleep(self, processes: Processes) -> int:
        """Returns how many MB of GPU memory were moved to the host. Raises Refused."""

    async def wake(self, processes: Processes, gpus: Mapping[int, int]) -> None:
        """`gpus`: by the GPU that it had, the one that it gets, both as the node counts them; empty
        if they are the same. Raises Lost or Full."""

    async def leave(self, processes: Processes) -> None:
        """They are about to be killed, after they slept and woke: take them off their GPUs first,
        as far as that is possible. Raises Refused or Lost if it is not."""
