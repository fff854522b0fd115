"""The shares of one node: gives each member its limits, and looks whether they hold."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from shoal.agent.inherited import inherited_env
from shoal.machine.kernel import NODE_MARK
from shoal.model.commands import Launch, Prepare
from shoal.model.job import MemberRef
from shoal.model.policy import GpuOver
from shoal.model.resources import WHOLE_GPU_MILLI

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
    for folder in packages_of(os.path.dirname(os.path.dirname(program))):
        with contextlib.suppress(OSError):
            return knows_fraction(Path(f"{folder}/torch/version.py").read_text())
    return False


def packages_of(root: str) -> Iterator[str]:
    """Where an interpreter in `root`/bin finds packages, in this order: beside it, where a .pth
    file there or the environment that it was made from points to, and the system's."""
    own = glob.glob(f"{glob.escape(root)}/lib/python3*/*-packages")
    yield from own
    for file in [found for folder in own for found in glob.glob(f"{glob.escape(folder)}/*.pth")]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield from (line for line in Path(file).read_text().splitlines() if line[:1] == "/")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path(f"{root}/pyvenv.cfg").read_text().splitlines()
        said = {line.partition("=")[0].strip(): line.partition("=")[2].strip() for line in lines}
        if said.get("include-system-site-packages", "").lower() == "true":
            base = glob.escape(os.path.dirname(said.get("home", "")))
            yield from glob.glob(f"{base}/lib/python3*/*-packages")
    for place in SYSTEM:
        yield from glob.glob(f"{place}/python3*/*-packages")


# NVIDIA's MPS: one daemon for each shared GPU and Unix user, as a child of the agent.
#
# A daemon that root runs for all users lets the programs of one user wait until those of another
# have ended. With a daemon each, users share the GPU by turns, and one user's fault cannot end the
# programs of another.


log = logging.getLogger("shoal.agent")

PROGRAM = "nvidia-cuda-mps-control"
READY = "control"  # the daemon's socket in its folder
READY_S = 30.0
RETRY_S = 60.0  # after a failure; until then members go without
LOOK_S = 0.01
RUN = Path("/run")


class Daemon:
    __slots__ = ("folder", "process", "ready")

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process
        self.ready = False


class MpsDaemons:
    """Started when a member needs one. Where none can be, `failed` says why."""

    def __init__(self, node: Path, program: str | None = None, own: Sequence[int] = ()) -> None:
        """`own`: the machine's numbers of the node's GPUs, if they are not 0, 1, ..."""
        self._own = own
        self._node = node
        self._program = program if program is not None else shutil.which(PROGRAM) or ""
        # Where tenants may enter, which they may not in the node's folder.
        mark = hashlib.sha256(str(node).encode()).hexdigest()[:12]
        self._root = RUN / f"shoal-mps-{mark}" if os.access(RUN, os.W_OK) else node / "mps"
        self._daemons: dict[tuple[int, int], Daemon] = {}
        self.failed = "" if self._program else f"{PROGRAM} is not installed"
        self._retry_at = 0.0

    def here(self, gpu: int, uid: int) -> str | None:
        """The folder of the daemon if it is ready; "" if there can be none."""
        if not self._program or time.monotonic() < self._retry_at:
            return ""
        daemon = self._daemons.get((gpu, uid))
        return str(daemon.folder) if daemon is not None and daemon.ready else None

    async def get(self, gpu: int, uid: int) -> str:
        """A member that starts before its daemon is ready would run without limits."""
        found = self.here(gpu, uid)
        if found is not None:
            return found
        try:
            daemon = self._daemons.get((gpu, uid)) or self._start(gpu, uid)
            async with asyncio.timeout(READY_S):
                while not (daemon.folder / READY).exists():
                    if (gpu, uid) not in self._daemons:
                        raise OSError(f"it ended: {_last_line(daemon.folder)}")
                    await asyncio.sleep(LOOK_S)
        except OSError as error:  # a timeout, too
            self.failed = str(error) or f"it was not ready after {READY_S:.0f} s"
            self._retry_at = time.monotonic() + RETRY_S
            log.warning("shares of GPUs go without MPS: %s", self.failed)
            self._end(gpu, uid)
            return ""
        daemon.ready, self.failed = True, ""
        return str(daemon.folder)

    def _start(self, gpu: int, uid: int) -> Daemon:
        folder = self._root / f"{gpu}-{uid}"
        self._root.mkdir(exist_ok=True)
        self._root.chmod(0o711)  # whatever the umask
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier life
        folder.mkdir(mode=0o700)
        who = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
        if uid:
            os.chown(folder, uid, uid)
        process = subprocess.Popen(
            [self._program, "-f"],
            # As a job's: a daemon's environment can be read by its user.
            env={
                **inherited_env(),
                **daemon_env(self._own[gpu] if self._own else gpu, str(folder)),
                NODE_MARK: str(self._node),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **who,  # type: ignore[call-overload]
        )
        daemon = self._daemons[gpu, uid] = Daemon(folder, process)
        log.info("MPS for GPU %d and user %d: process %d", gpu, uid, process.pid)
        return daemon

    def pids(self) -> set[int]:
        return {daemon.process.pid for daemon in self._daemons.values()}

    def ended(self, pid: int, code: int) -> bool:
        """The process is no more and was waited for; was it ours?"""
        for key, daemon in list(self._daemons.items()):
            if daemon.process.pid == pid:
                daemon.process.returncode = code
                log.warning("MPS for GPU %d ended with code %d", key[0], code)
                self._end(*key)
                return True
        return False

    def _end(self, gpu: int, uid: int) -> None:
        daemon = self._daemons.pop((gpu, uid), None)
        if daemon is None:
            return
        if daemon.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.process.pid, signal.SIGKILL)
            daemon.process.returncode = -signal.SIGKILL  # the agent waits for all its children
        shutil.rmtree(daemon.folder, ignore_errors=True)

    def close(self) -> None:
        for key in list(self._daemons):
            self._end(*key)
        shutil.rmtree(self._root, ignore_errors=True)


def _last_line(folder: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (folder / "control.log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return "it said nothing"


# What a member with a share of a GPU may use, and the variables that make it so. Pure.


PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Torch's allocator, by its old and its new name.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
FRACTION = "per_process_memory_fraction"
TORCH_WITH_FRACTION = (2, 10)  # earlier ones fail at an option they do not know
# A CUDA context, its kernels and libraries take memory that no allocator counts.
CONTEXT_MB = 1_024


class Share(NamedTuple):
    """A part of one GPU."""

    gpu: int
    memory_mb: int  # 0: not known, because the node's GPUs have no size
    percent: int  # of its compute units
    uid: int = 0  # the Unix user, 0: the agent's own

    @property
    def most_mb(self) -> int:
        """Beyond this, a member uses what others asked for."""
        return self.memory_mb + CONTEXT_MB


def share_of(launch: Launch, gpu_memory_mb: int) -> Share | None:
    """None for a member with whole GPUs, or none. `gpu_memory_mb` is the size of a GPU."""
    if len(launch.gpus) != 1 or not 0 < launch.gpu_milli < WHOLE_GPU_MILLI:
        return None
    memory_mb = launch.gpu_memory_mb or gpu_memory_mb * launch.gpu_milli // WHOLE_GPU_MILLI
    percent = max(1, round(launch.gpu_milli * 100 / WHOLE_GPU_MILLI))
    return Share(launch.gpus[0], memory_mb, percent, launch.uid)


def daemon_env(gpu: int, folder: str) -> dict[str, str]:
    """For the MPS daemon of one GPU."""
    return {
        PIPES: folder,
        LOGS: folder,
        VISIBLE: str(gpu),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which NVML and Shoal count GPUs
    }


def client_env(share: Share, folder: str) -> dict[str, str]:
    """For a member. Its GPU is the daemon's only one, so the number of that GPU is 0 here."""
    env = {PIPES: folder, VISIBLE: "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share.percent)}
    if share.memory_mb:
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={share.memory_mb}M"
    return env


def allocator_env(share: Share, gpu_memory_mb: int, env: Mapping[str, str]) -> dict[str, str]:
    """Torch's own limit, added to the options that the job sets itself."""
    if not share.memory_mb or not gpu_memory_mb:
        return {}
    limit = f"{FRACTION}:{min(1.0, share.memory_mb / gpu_memory_mb):.4f}"
    found = {}
    for name in ALLOCATOR:
        own = env.get(name, "")
        if FRACTION in own:
            return {}  # the job sets a limit; whether it is low enough is seen by looking
        if own:
            found[name] = f"{own},{limit}"
    return found or {ALLOCATOR[0]: limit}


def knows_fraction(version_file: str) -> bool:
    """Does the torch with this version.py take the option?"""
    match = re.search(r"""__version__\s*=\s*['"](\d+)\.(\d+)""", version_file)
    return match is not None and (int(match[1]), int(match[2])) >= TORCH_WITH_FRACTION
