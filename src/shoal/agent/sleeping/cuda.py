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
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

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

    async def leave(self, processes: Processes) -> None:
        """Driver 595 hung a whole host when a process that it had restored was killed on its GPU,
        and not when it was moved off first (NVIDIA/cuda-checkpoint, issue 53)."""
        new = await self._contexts(processes, {})
        if new:
            await self._move(new)
        for pid in new:
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


# NVIDIA's driver, as far as sleep needs it: `libcuda.so.1` by ctypes, and NVML for memory.
#
# No call here makes a CUDA context, so the agent itself never has memory on a GPU.


LIBRARY = "libcuda.so.1"
NEEDED = 12_080  # CUDA 12.8, which came with driver 570, is the first that can
NEEDED_TEXT = "CUDA 12.8 (driver 570)"

# What GetState answers. Newer drivers also have states for the time in between.
RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3

NOT_INITIALIZED = 3

Memory = dict[int, int]  # MB by GPU, as NVML counts them


class DriverError(Exception):
    """The driver refused. The text is its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Driver(Protocol):
    """Each call blocks, so it is made in a thread. All but `why_not` raise DriverError."""

    def why_not(self) -> str:
        """Why it cannot put processes to sleep, in one clause; empty if it can."""

    def memory_mb(self) -> dict[int, Memory]:
        """Of each process with a CUDA context on a GPU of this machine: its memory there."""

    def free_mb(self) -> Memory: ...

    def state(self, pid: int) -> int:
        """Of a process that has initialized CUDA."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Its CUDA calls block from now on, and what it had given to the GPU is done."""

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int) -> None: ...

    def unlock(self, pid: int) -> None: ...


class LockArgs(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Nvidia:
    """The real one. It is loaded at the first call."""

    def __init__(self) -> None:
        self._cuda: Any = None
        self._nvml: Any = None
        self._started = False
        self._lock = threading.Lock()  # for the first call: later calls do not exclude each other

    def why_not(self) -> str:
        try:
            cuda = self._library()
        except OSError:
            return f"this machine has no NVIDIA driver ({LIBRARY})"
        version = ctypes.c_int()
        if code := int(cuda.cuDriverGetVersion(ctypes.byref(version))):
            return f"the NVIDIA driver does not answer: {self._text(code)}"
        if version.value < NEEDED or not hasattr(cuda, "cuCheckpointProcessLock"):
            return too_old(version.value, self._driver_name())
        try:
            self._library_of_memory()
        except Exception as error:  # not installed, or it fails: NVML has an exception for each
            return f"NVML does not work ({error}); pip install 'shoal[gpu]'"
        return ""

    def memory_mb(self) -> dict[int, Memory]:
        listed = self._of_each("nvmlDeviceGetComputeRunningProcesses_v3")
        used: dict[int, Memory] = {}
        for number, processes in listed.items():
            for one in processes:
                used.setdefault(int(one.pid), {})[number] = int(one.usedGpuMemory or 0) >> 20
        return used

    def free_mb(self) -> Memory:
        found = self._of_each("nvmlDeviceGetMemoryInfo")
        return {number: int(memory.free) >> 20 for number, memory in found.items()}

    def _of_each(self, name: str) -> dict[int, Any]:
        """What NVML answers for each GPU."""
        try:
            nvml = self._library_of_memory()
            ask, handle = getattr(nvml, name), nvml.nvmlDeviceGetHandleByIndex
            return {number: ask(handle(number)) for number in range(nvml.nvmlDeviceGetCount())}
        except Exception as error:  # NVML has an exception for each of its errors
            raise DriverError(-1, f"NVML: {error}") from None

    def state(self, pid: int) -> int:
        state = ctypes.c_int(FAILED)
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        return state.value

    def lock(self, pid: int, timeout_ms: int) -> None:
        args = LockArgs(timeout_ms=timeout_ms)
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(args))

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> None:
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, pid: int, args: Any) -> None:
        try:
            function = getattr(self._library(), name)
        except (OSError, AttributeError) as error:
            raise DriverError(-1, str(error)) from None
        code = int(function(ctypes.c_int(pid), args))
        if code == NOT_INITIALIZED and self._starts():
            code = int(function(ctypes.c_int(pid), args))
        if code:
            raise DriverError(code, self._text(code))

    def _starts(self) -> bool:
        """Some drivers want cuInit first. It opens the GPUs, and takes no memory on them."""
        with self._lock:
            first, self._started = not self._started, True
            return first and int(self._cuda.cuInit(0)) == 0

    def _text(self, code: int) -> str:
        """As the driver says it, for instance "operation not supported"."""
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorString(code, ctypes.byref(text)) or not text.value:
            return f"CUDA error {code}"
        return f"{text.value.decode(errors='replace')} (CUDA error {code})"

    def _library(self) -> Any:
        with self._lock:
            if self._cuda is None:
                self._cuda = ctypes.CDLL(LIBRARY)
            return self._cuda

    def _library_of_memory(self) -> Any:
        with self._lock:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            return self._nvml

    def _driver_name(self) -> str:
        try:
            return f"driver {self._library_of_memory().nvmlSystemGetDriverVersion()}"
        except Exception:  # only the words are poorer then
            return "the NVIDIA driver"


def too_old(version: int, name: str) -> str:
    """`version`: as the driver reports it, 1000 * major + 10 * minor."""
    has = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return f"{name} has {has}, and sleep needs {NEEDED_TEXT} or newer"


# The driver's calls of one sleep or one wake-up, in their order. They block: a thread makes them.
#
# A thread whose calls are refused undoes them itself, and so does one that nobody waits for any
# longer. So no process stays locked, whatever happens to the waiting side.


LOCK_MS = 15_000  # for what the process has given to the GPU
# A process waits this long for memory of its GPUs. Whoever had them has ended, but the driver may
# not have freed all. If a stranger uses them, it sleeps on: that loses nothing.
ROOM_S = 20.0
# One of which a part is awake already waits longer, and is then lost.
REST_S = 120.0
AGAIN_S = 0.2


class Work:
    """`needs`: what these processes had on GPUs, if this agent knows it."""

    def __init__(
        self, driver: Driver, pids: Sequence[int], needs: Mapping[int, Memory] | None = None
    ) -> None:
        self.pids = tuple(pids)
        self.given_up = threading.Event()
        self._driver = driver
        self._needs = needs or {}

    def sleep(self) -> None:
        """Raises Refused, and then the processes run as before; or Lost, if they cannot."""
        try:
            self._call("lock", "could not be stopped on its GPU")
            self._call("checkpoint", "could not be moved off its GPU")
        except BaseException:
            self.undo()
            raise

    def wake(self) -> None:
        """Raises Lost or Full. Does nothing to processes that are awake, or that never used CUDA. A
        process that was forked from one that did answers in its name, so each is asked in its
        turn."""
        begun_s = time.monotonic()
        self._await_room(begun_s + ROOM_S)
        for pid in self.pids:
            self._restore(pid, begun_s + REST_S)
        for pid in self.pids:
            if self._state(pid) == LOCKED:
                try:
                    self._driver.unlock(pid)
                except DriverError as error:
                    raise Lost(f"process {pid} stays locked: {error}") from None

    def undo(self) -> None:
        """In reverse order, by the state of each: a refused call may have done its work."""
        Work(self._driver, self.pids[::-1]).wake()

    def _call(self, name: str, problem: str) -> None:
        for pid in self.pids:
            if self.given_up.is_set():
                raise Refused("nobody waits for it any longer")
            try:
                if name == "lock":
                    self._driver.lock(pid, LOCK_MS)
                else:
                    self._driver.checkpoint(pid)
            except DriverError as error:
                raise Refused(f"process {pid} {problem}: {error}") from None
        if self.given_up.is_set():
            raise Refused("nobody waits for it any longer")

    def _await_room(self, deadline: float) -> None:
        """Nothing is restored before there is room for all of it."""
        while short := self._short_of_all():
            if time.monotonic() > deadline:
                raise Full(short)
            time.sleep(AGAIN_S)

    def _short_of_all(self) -> str:
        asleep = [pid for pid in self.pids if self._state(pid) == CHECKPOINTED]
        return next((short for pid in asleep if (short := self._short(pid))), "")

    def _restore(self, pid: int, deadline: float) -> None:
        """The driver does not promise that a process survives a restore that fails, so none is made
        before there is room. One that fails all the same is tried again while that is possible."""
        while (state := self._state(pid)) == CHECKPOINTED:
            short = self._short(pid)
            late = time.monotonic() > deadline
            try:
                if not short or late:
                    self._driver.restore(pid)
                    return
            except DriverError as error:
                if late:
                    why = short or str(error)
                    raise Lost(f"process {pid} could not be moved back to its GPU: {why}") from None
            time.sleep(AGAIN_S)
        if state == FAILED:
            raise Lost(f"the driver has lost what process {pid} had on its GPU")

    def _short(self, pid: int) -> str:
        """Which GPU has too little free memory for it, as far as that is known."""
        try:
            free = self._driver.free_mb()
        except DriverError:
            return ""
        for gpu, need in self._needs.get(pid, {}).items():
            if free.get(gpu, need) < need:
                return f"GPU {gpu} has {free[gpu]} MB free, and it needs {need} MB"
        return ""

    def _state(self, pid: int) -> int | None:
        """None: it has no CUDA at all, or has ended."""
        try:
            return self._driver.state(pid)
        except DriverError:
            return None
