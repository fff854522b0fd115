"""The shares of one node: gives each member its limits, and looks whether they hold."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from shoal.agent.shares.mps import MpsDaemons
from shoal.agent.shares.rules import (
    Share,
    allocator_env,
    client_env,
    knows_fraction,
    share_of,
)
from shoal.model.commands import Launch, Prepare
from shoal.model.job import MemberRef
from shoal.model.policy import GpuOver

LOOKS = 4  # in a row, so that the driver was asked twice: memory may be freed a moment later
DRIVER = Path("/proc/driver/nvidia/version")
SYSTEM = ("/usr/local/lib", "/usr/lib")
Usage = Mapping[int, Mapping[int, int]]  # by GPU and process, in MB


Order = TypeVar("Order", Launch, Prepare)


class Overused(Protocol):
    def __call__(self, ref: MemberRef, why: str, *, end: bool) -> None: ...


class Shares:
    """`gpu_memory_mb` is the size of the node's GPUs. GPUs without a driver are only imagined, and
    have nothing to enforce."""

    def __init__(self, daemons: MpsDaemons, gpu_memory_mb: int, driver: Path = DRIVER) -> None:
        self.daemons = daemons
        self._gpu_memory_mb = gpu_memory_mb
        self._real = driver.exists()
        self._members: dict[MemberRef, tuple[Share, GpuOver]] = {}
        self._over: dict[MemberRef, int] = {}
        self._told: set[MemberRef] = set()

    def here(self, order: Order) -> Order | None:
        """The command with the limits of its share; None while its daemon is not ready."""
        share = self._share(order)
        if share is None:
            return order
        folder = self.daemons.here(share.gpu, share.uid)
        return None if folder is None else self._limited(order, share, folder)

    async def get(self, order: Order) -> Order:
        share = self._share(order)
        if share is None:
            return order
        return self._limited(order, share, await self.daemons.get(share.gpu, share.uid))

    def _share(self, order: Launch | Prepare) -> Share | None:
        """A warm interpreter that is prepared for a job uses no GPU yet."""
        if not self._real or isinstance(order, Prepare):
            return None
        return share_of(order, self._gpu_memory_mb)

    def _limited(self, order: Order, share: Share, folder: str) -> Order:
        if folder:
            more = client_env(share, folder)
        elif _torch_takes_limit(order):
            more = allocator_env(share, self._gpu_memory_mb, order.env)
        else:
            more = {}
        return msgspec.structs.replace(order, env={**order.env, **more})

    # -- looking ----------------------------------------------------------------------------

    def expect(self, launch: Launch) -> None:
        share = self._share(launch)
        if share is not None and share.memory_mb:
            self._members[launch.ref] = share, launch.limits.gpu_over

    def forget(self, ref: MemberRef) -> None:
        self._members.pop(ref, None)
        self._over.pop(ref, None)
        self._told.discard(ref)

    @property
    def gpus(self) -> set[int]:
        """Those that are shared, whose processes are worth reading."""
        return {share.gpu for share, _ in self._members.values()}

    def keep(
        self, usage: Usage, owner: Callable[[int], MemberRef | None], overused: Overused
    ) -> None:
        """Called every second: `overused` gets each member that is over its share for `LOOKS`
        looks, once."""
        used: dict[MemberRef, int] = {}
        for gpu, processes in usage.items():
            for pid, memory_mb in processes.items():
                ref = owner(pid)
                if ref in self._members and self._members[ref][0].gpu == gpu:
                    used[ref] = used.get(ref, 0) + memory_mb
        for ref, (share, rule) in list(self._members.items()):
            if used.get(ref, 0) <= share.most_mb:
                self._over.pop(ref, None)
                continue
            self._over[ref] = self._over.get(ref, 0) + 1
            if self._over[ref] >= LOOKS and ref not in self._told:
                self._told.add(ref)
                why = (
                    f"it used {used[ref]} MB of GPU {share.gpu}, but asked for "
                    f"{share.memory_mb} MB of it (GPU share)"
                )
                overused(ref, why, end=rule is GpuOver.END)


def _torch_takes_limit(launch: Launch | Prepare) -> bool:
    """Looks at the torch that the member will probably use: beside its program, or the system's."""
    path = launch.env.get("PATH") or os.environ.get("PATH", os.defpath)
    program = shutil.which(launch.argv[0], path=path) or ""
    for place in (f"{glob.escape(os.path.dirname(os.path.dirname(program)))}/lib", *SYSTEM):
        for found in glob.glob(f"{place}/python3*/*-packages/torch/version.py"):
            try:
                return knows_fraction(Path(found).read_text())
            except OSError:
                continue
    return False
