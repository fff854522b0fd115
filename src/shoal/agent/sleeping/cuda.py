"""Members with real GPUs: NVIDIA's driver moves what they have there to host memory and back.

Asleep: the process that has a CUDA context is locked and checkpointed, then the whole tree is
frozen. Awake: thawed, restored, unlocked. The driver works inside the process, so no call of it
reaches a process that is frozen.

Two processes can share memory of a GPU, as NCCL's do on one node. Driver 580 moves such memory off
the GPU without a word, and cannot bring it back: the job is lost. Nobody can see from outside
whether they share, so a member with several such processes is refused, and so is a gang.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.agent.sleeping.cuda_driver import Driver, DriverError, Memory, Nvidia
from shoal.agent.sleeping.cuda_work import Work
from shoal.agent.sleeping.port import Full, Lost, Processes, Refused
from shoal.machine.cgroups import mounts

# How much memory this host can give to processes that are put to sleep.
#
# What the driver moves from a GPU becomes memory of the process, so the limits of its cgroups count
# as well as the host's free memory. Too little would end in a kill by the kernel, and lose the job.


MB = 1024**2
UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 if there is no limit


def free_mb(pids: Iterable[int], proc: Path = Path("/proc")) -> tuple[int, str]:
    """The least that the host or a group of these processes has left, and which of them it is."""
    least = _available_mb(proc / "meminfo"), "the host"
    for folder in dict.fromkeys(one for pid in pids for one in _folders(proc, pid)):
        left = _left_mb(folder)
        if left is not None and left < least[0]:
            least = left, "its memory limit"
    return least


def _available_mb(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _folders(proc: Path, pid: int) -> Iterator[Path]:
    """The groups that the process is in, up to the top of each hierarchy that counts memory."""
    try:
        found = mounts(
            (proc / "self/mountinfo").read_text(), (proc / str(pid) / "cgroup").read_text()
        )
    except (OSError, ValueError):  # it has just ended
        return
    for mount in found:
        if mount.controllers and "memory" not in mount.controllers:
            continue
        top, folder = Path(mount.top), Path(f"{mount.top}{mount.own}")
        while folder != top and top in folder.parents:
            yield folder
            folder = folder.parent
        yield top


def _left_mb(folder: Path) -> int | None:
    """None where there is no limit. Files that are only cached do not count: they make room."""
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    if limit is None or limit >= UNLIMITED or used is None:
        return None
    return max(0, limit - used + _cached(folder / "memory.stat")) // MB


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # not this version of cgroups, or "max"
            continue
    return None


def _cached(stat: Path) -> int:
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    found = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return found.get("total_inactive_file", found.get("inactive_file", 0))


Answer = TypeVar("Answer")

CALLS_S_MAX = 90.0  # beside the time that its memory takes,
MB_S_MIN = 100  # which moves at least as fast as this
WAKE_S_MAX = 1_800.0  # this agent may not know how much there is: it may be a new one
LOOK_S_MAX = 20.0
RESERVE_MB = 2_000  # of host memory stays free: the node's own processes live there
ROUNDS_MAX = 3  # a process may make a context while others are put to sleep
SETTLE_S = 0.05
MAY_SHARE = "they may share memory there, which the driver moves away but not back"


class Cuda:
    name = "cuda"

    def __init__(
        self,
        driver: Driver | None = None,
        free: Callable[[Iterable[int]], tuple[int, str]] = free_mb,
    ) -> None:
        self._driver = driver or Nvidia()
        self._free = free
        self._why_not: str | None = None
        self._slept: dict[int, Memory] = {}  # processes that this agent has checkpointed
        self._under_way: set[Work] = set()

    def why_not(self) -> str:
        if self._why_not is None:
            self._why_not = self._driver.why_not()
        return self._why_not

    async def sleep(self, processes: Processes) -> int:
        moved: dict[int, Memory] = {}
        try:
            for _ in range(ROUNDS_MAX):
                if new := await self._contexts(processes, moved):
                    await self._move(new)
                    moved |= new
                await processes.freeze()
                if not await self._contexts(processes, moved):
                    return _total(moved)
                await processes.thaw()
            raise Refused("it starts to use its GPUs while it is put to sleep")
        except BaseException:
            await asyncio.shield(self._undo(processes, moved))
            raise

    async def wake(self, processes: Processes, gpus: Mapping[int, int]) -> None:
        if any(old != new for old, new in gpus.items()):
            raise Lost("it can be woken only on the GPUs that it had")
        await processes.thaw()
        pids = processes.pids()
        await self._settled(pids)
        known = [pid for pid in pids if pid in self._slept]
        try:
            work = Work(self._driver, known or pids, self._slept)
            await self._done(work, work.wake, WAKE_S_MAX)
        except Refused as refused:
            raise Lost(str(refused)) from None
        except Full:
            with contextlib.suppress(Refused):
                await processes.freeze()
            raise
        for pid in pids:
            self._slept.pop(pid, None)

    async def _contexts(self, processes: Processes, moved: dict[int, Memory]) -> dict[int, Memory]:
        """Its processes that use GPUs and have not been moved."""
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                used = await _in_thread(self._driver.memory_mb)
        except TimeoutError:
            raise Refused(f"the driver has not answered for {LOOK_S_MAX:.0f} s") from None
        except DriverError as error:
            raise Refused(str(error)) from None
        found = {pid: used[pid] for pid in processes.pids() if pid in used and pid not in moved}
        if len(found) + len(moved) > 1:
            raise Refused(f"{len(found) + len(moved)} of its processes use GPUs; {MAY_SHARE}")
        return found

    async def _move(self, new: dict[int, Memory]) -> None:
        need = _total(new)
        free, whose = self._free(new)
        if need + RESERVE_MB > free:
            left = max(0, free - RESERVE_MB)
            raise Refused(f"it has {need} MB on GPUs, and {whose} leaves {left} MB for them")
        work = Work(self._driver, list(new))
        await self._done(work, work.sleep, CALLS_S_MAX + need / MB_S_MIN)
        self._slept |= new

    async def _undo(self, processes: Processes, moved: dict[int, Memory]) -> None:
        await processes.thaw()
        for pid in moved:
            self._slept.pop(pid, None)
        if moved:
            work = Work(self._driver, list(moved))
            await self._done(work, work.undo, WAKE_S_MAX)

    async def _done(self, work: Work, call: Callable[[], None], seconds: float) -> None:
        """If it takes longer, its thread goes on, and undoes what it did when it can."""
        self._under_way.add(work)
        task = asyncio.ensure_future(_in_thread(call))
        task.add_done_callback(lambda done: self._over(work, done))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(task)
        except TimeoutError:
            raise Refused(f"the driver has not answered for {seconds:.0f} s") from None
        finally:
            if not task.done():
                work.given_up.set()

    def _over(self, work: Work, done: asyncio.Future[None]) -> None:
        self._under_way.discard(work)
        if not done.cancelled():
            done.exception()  # has been raised already, or nobody waits for it

    async def _settled(self, pids: Sequence[int]) -> None:
        """Until no thread deals with these processes that nobody waits for."""
        deadline = time.monotonic() + CALLS_S_MAX
        while any(set(work.pids) & set(pids) for work in self._under_way):
            if time.monotonic() > deadline:
                raise Lost("the driver does not answer")
            await asyncio.sleep(SETTLE_S)


def _total(moved: Mapping[int, Memory]) -> int:
    return sum(mb for memory in moved.values() for mb in memory.values())


async def _in_thread(call: Callable[[], Answer]) -> Answer:
    """In a thread of its own: the driver may hang, and must not keep this process from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Answer | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = call()
        except BaseException as error:  # it belongs to whoever waits
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="cuda-sleep", daemon=True).start()
    return await answer
