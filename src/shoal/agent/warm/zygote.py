"""A warm interpreter: holds the imports of a job and forks its members, ready to run.

The agent starts this file with the job's own interpreter, where Shoal need not be installed: only
the standard library is used. It never starts a thread and never touches a GPU, because neither
survives a fork. If a module does, the agent is told its name and goes without it.

Over the control socket the agent sends three descriptors (the command as JSON, the member's
output, a pipe that says when to go) and gets one answer: the member's process id, or an error.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # nothing is imported from this file's folder

import array
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import time
import types
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
ROOM = "SHOAL_ROOM"  # placeholder that a member's environment is written over
SETTINGS = "SHOAL_ZYGOTE"
NICE = 19
AUTOGROUP = "/proc/self/autogroup"
OOM_SCORE = "/proc/self/oom_score_adj"
OOM_FIRST = "1000"
TITLE_BYTES_MAX = 2048


def main(directory: str) -> None:  # noqa: ARG001  (an argument so that `ps` shows whose it is)
    """Serves until the agent is gone. Returns only in a member, after its script has ended."""
    settings = json.loads(os.environ.pop(SETTINGS))
    os.environ.pop(ROOM, None)
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["agent"]:
        os._exit(1)
    control = socket.socket(fileno=settings["control"])
    for name, value in os.environ.items():
        # Libraries may keep pointers to the environment: they must not point into the placeholder.
        os.putenv(name, value)
    interrupted: list[int] = []
    atexit.register(_end_by_interrupt, interrupted)  # the first one registered is the last to run
    before = _be_modest()
    files = _preload(control, settings["modules"])
    gc.collect()
    gc.freeze()  # memory shared with the members should stay shared
    order = _serve(control, files)
    if before is not None:
        _take_place(before)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(PR_SET_PTRACER, settings["agent"], 0, 0, 0)  # so that its py-spy may look inside
    if os.getppid() != settings["agent"]:
        os._exit(1)
    _become(order)
    _run(order, interrupted)


# -- the warm interpreter ------------------------------------------------------------------


def _be_modest() -> tuple[int, str] | None:
    """Importing must not slow the job down, and when memory runs out this process should be killed
    first. A member must get the normal values back, which not every user may set: that is tried in
    a process that ends at once. Returns the values to restore."""
    with open(OOM_SCORE) as file:
        before = os.getpriority(os.PRIO_PROCESS, 0), file.read()
    probe = os.fork()
    if probe == 0:
        code = 1
        with contextlib.suppress(OSError):
            _take_place((NICE, OOM_FIRST))
            _take_place(before)
            code = 0
        os._exit(code)
    if os.waitpid(probe, 0)[1] != 0:
        return None
    _take_place((NICE, OOM_FIRST))
    # The kernel may share the CPUs between sessions. This one is ours; members begin their own.
    with contextlib.suppress(OSError), open(AUTOGROUP, "w") as file:
        file.write(str(NICE))
    return before


def _take_place(place: tuple[int, str]) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, place[0])
    with open(OOM_SCORE, "w") as file:
        file.write(place[1])


def _preload(control: socket.socket, modules: list[str]) -> dict[str, tuple[int, int]]:
    """Import everything, tell the agent, and return the modules' files with their present state."""
    began = time.monotonic()
    for module in modules:
        with contextlib.suppress(Exception):  # missing or broken: the script will report it
            importlib.import_module(module)
        harm = _harm()
        if harm:
            say(control, {"module": module, "why": harm})
            os._exit(1)
    files = {}
    for loaded in list(sys.modules.values()):
        path = getattr(loaded, "__file__", None)
        if isinstance(path, str) and os.path.isabs(path):
            with contextlib.suppress(OSError):
                files[path] = _version(path)
    names = sorted({name.partition(".")[0] for name in sys.modules} - {"__main__"})
    seconds = round(time.monotonic() - began, 3)
    say(control, {"names": names, "seconds": seconds, "modules": len(sys.modules)})
    return files


def _harm() -> str:
    """Why this process cannot be forked, if so. Threads that end before a fork and come back when
    needed (OpenBLAS has such) are fine, so a fork is tried."""
    probe = os.fork()
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        return "starts threads"
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/fd/" + entry).startswith(("/dev/nvidia", "/dev/kfd")):
                return "opens a GPU"
    return ""


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _serve(control: socket.socket, files: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Answer requests forever. Returns in each member, with its command, when it may start."""
    size = array.array("i").itemsize * 3
    while True:
        data, extra, _, _ = control.recvmsg(16, socket.CMSG_SPACE(size))
        handles = array.array("i")
        for _, kind, content in extra:
            if kind == socket.SCM_RIGHTS:
                handles.frombytes(content)
        if not data or len(handles) != 3:
            os._exit(0)  # the agent is gone
        changed = _changed(files)
        if changed:
            say(control, {"why": changed + " has changed"})
            os._exit(0)
        pid = fork_twice()
        if pid == 0:
            control.close()
            return _take(*handles)
        for handle in handles:
            os.close(handle)
        say(control, {"pid": pid} if pid > 0 else {"why": "cannot fork"})


def _changed(files: dict[str, tuple[int, int]]) -> str:
    for path, version in files.items():
        try:
            if _version(path) != version:
                return path
        except OSError:
            return path
    return ""


def fork_twice() -> int:
    """The member's process id; 0 in the member, -1 if the fork failed. It forks twice, so that the
    process in between ends at once and the agent, which adopts orphans, becomes the member's
    parent. By then the member leads a session, so its group can be signaled by its id."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()
        os.write(writer, str(os.getpid()).encode())
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    said = os.read(reader, 32)
    os.close(reader)
    os.waitpid(between, 0)
    return int(said) if said else -1


def say(control: socket.socket, answer: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(answer).encode())
    except OSError:
        os._exit(1)


# -- a member ------------------------------------------------------------------------------


def _take(order: int, output: int, go: int) -> dict[str, Any]:
    """Wait until the agent has recorded the member. If the agent gave up, end silently."""
    if os.read(go, 1) != b"g":
        os._exit(0)
    os.close(go)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    with open(order, "rb") as file:
        file.seek(0)
        taken: dict[str, Any] = json.load(file)
    return taken


def _become(order: dict[str, Any]) -> None:
    """Become what a process started by this command would be."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir(order["workdir"])
    os.environ.clear()
    os.environ.update(order["env"])
    _write_start(order["argv"], order["env"])
    sys.argv = [order["target"], *order["args"]]
    sys.orig_argv = list(order["argv"])
    importlib.invalidate_caches()
    # `random` reseeds itself after a fork; these do not, and members would draw equal numbers.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _write_start(argv: list[str], env: dict[str, str]) -> None:
    """/proc shows command line and environment from the memory of the start. Overwrite it, so that
    `ps` and searches for marks see the member. The end stays where it is: if the last byte is not
    zero, the kernel reads on to the first zero byte."""
    with open("/proc/self/stat") as file:
        numbers = file.read().rpartition(")")[2].split()
    start, middle, also_middle, end = (int(number) for number in numbers[45:49])
    if start == 0 or middle != also_middle or end - start < 2 * TITLE_BYTES_MAX:
        return
    title = b" ".join(os.fsencode(word) for word in argv)[:TITLE_BYTES_MAX].replace(b"\0", b" ")
    block = title.ljust(middle - start, b" ") + b"\0"
    for name, value in sorted(env.items(), key=lambda item: not item[0].startswith("SHOAL_")):
        entry = os.fsencode(name) + b"=" + os.fsencode(value) + b"\0"
        if len(block) + len(entry) <= end - start:
            block += entry
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def _run(order: dict[str, Any], interrupted: list[int]) -> None:
    """Run the script as the interpreter would: same `__main__`, tracebacks and exit codes."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __builtins__=builtins, __package__=None, __spec__=None, __annotations__={}
    )
    sys.modules["__main__"] = main_module
    try:
        if order["module"]:
            _enter(os.getcwd())
            sys.argv[0] = "-m"
            run_module: Any = vars(runpy)["_run_module_as_main"]
            run_module(order["target"])
        else:
            _run_script(order["target"], main_module)
    except SystemExit:
        raise
    except BaseException as error:
        _tell(error)
        if isinstance(error, KeyboardInterrupt):
            interrupted.append(os.getpid())
        sys.exit(1)


def _run_script(script: str, main_module: types.ModuleType) -> None:
    path = script if os.path.isabs(script) else os.getcwd() + "/" + script
    _enter(os.path.dirname(os.path.realpath(path)))
    main_module.__dict__.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _enter(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _tell(error: BaseException) -> None:
    """Without the frames of this file, which are not the script's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def _end_by_interrupt(interrupted: list[int]) -> None:
    """An interpreter that ends because of Ctrl-C dies by the signal, so that its parent knows."""
    if os.getpid() in interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv[1])
