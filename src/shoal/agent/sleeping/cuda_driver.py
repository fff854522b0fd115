"""NVIDIA's driver, as far as sleep needs it: `libcuda.so.1` by ctypes, and NVML for memory.

No call here makes a CUDA context, so the agent itself never has memory on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol

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
        """Of a process that has initialised CUDA."""

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
