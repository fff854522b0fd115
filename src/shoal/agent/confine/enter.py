"""The launcher: a small process of the agent that starts members of tenants, confined.

It is root, holds nothing and has one thread, so that its forks are quick and safe, which forks of
the agent are not. Over the control socket the agent sends six descriptors (the order as JSON,
input, output, error output, a pipe that the agent holds while it waits, a pipe for problems) and
gets the process id. The new process joins its cgroup, makes its mounts and gives up every right. It
becomes the program without another word, because each word between processes takes long on a busy
machine.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import sys
import termios
from typing import Any

from shoal.agent.confine.read_only import Failure as NotHeld
from shoal.agent.confine.read_only import hold
from shoal.agent.warm.zygote import fork_twice, say

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 32, 4096, 16384, 1 << 19
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CLONE_PARENT = 0x00008000
KEYCTL = {"x86_64": 250, "aarch64": 219}.get(platform.machine(), 0)
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
KEYCTL_JOIN_SESSION_KEYRING = 1
COVER = "mode=755,size=1m,nr_inodes=4k"
UMASK = 0o077
HANDLES = 6
FIRST_FREE = 4  # 0, 1 and 2, and 3 for problems

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


class Failure(Exception):
    """In words that follow "cannot start PROGRAM: "."""


def main() -> None:
    agent, control = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        return
    size = array.array("i").itemsize * HANDLES
    while True:
        data, extra, _, _ = control.recvmsg(16, socket.CMSG_SPACE(size))
        handles = array.array("i")
        for _, kind, content in extra:
            if kind == socket.SCM_RIGHTS:
                handles.frombytes(content)
        if not data or len(handles) != HANDLES:
            return  # the agent is gone
        pid = _sibling()
        if pid == 0:
            control.close()
            _become(agent, *handles)
        for handle in handles:
            os.close(handle)
        say(control, {"pid": pid} if pid > 0 else {"why": "cannot fork"})


def _sibling() -> int:
    """A new process whose parent is the agent; 0 in the process itself, -1 if it failed. Where we
    do not know how to ask the kernel for that, the agent adopts it."""
    if not CLONE:
        return fork_twice()
    pid = int(libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        os.setsid()
    return pid


def _become(
    agent: int, content: int, given: int, output: int, error: int, waits: int, errors: int
) -> None:
    """Never returns: becomes the program, or says why not."""
    try:
        with open(content, "rb") as file:
            file.seek(0)
            order = json.load(file)
        for entrance in order["entrances"]:
            _join(entrance)
        _mount(order["mounts"])
        _must_be_awaited(waits)
        for handle, number in ((given, 0), (output, 1), (error, 2)):
            os.dup2(handle, number)
        if order.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if errors != FIRST_FREE - 1:
            os.dup2(errors, FIRST_FREE - 1, inheritable=False)
        os.closerange(FIRST_FREE, _files_max())
        errors = FIRST_FREE - 1
        _drop(order["uid"], order["files"], agent)
        _exec(order)
    except Failure as failure:
        why = str(failure)
    except OSError as problem:
        why = f"{problem.strerror}{f': {problem.filename}' if problem.filename else ''}"
    except BaseException as problem:
        why = repr(problem)
    with contextlib.suppress(OSError):
        os.write(errors, why.encode())
    os._exit(1)


def _join(entrance: str) -> None:
    handle = os.open(entrance, os.O_WRONLY)
    try:
        os.write(handle, b"0")
    except OSError as error:
        raise Failure(f"cannot join {entrance}: {error.strerror}") from None
    finally:
        os.close(handle)


def _must_be_awaited(waits: int) -> None:
    """If the agent has given up, nobody would know this process. It is in its group by now, which
    the agent ends."""
    os.set_blocking(waits, False)
    with contextlib.suppress(BlockingIOError):
        if not os.read(waits, 1):
            os._exit(1)


def _mount(mounts: dict[str, Any]) -> None:
    """In a mount namespace of its own. Mounts that the machine makes later still appear."""
    if not any(mounts.values()):
        return
    _check(libc.unshare(CLONE_NEWNS), "no mount namespace")
    _call("", "/", "", MS_REC | MS_SLAVE)
    private, bound = mounts["private"], mounts["bound"]
    sources = {one[0]: _open(one[0]) for one in (*private, *bound)}
    for source, path, *_ in private:
        _call(_name(sources[source]), path, "", MS_BIND | MS_NOSUID | MS_NODEV)
        _call("", path, "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
    for (path,) in mounts["covered"]:
        target = _open(path)  # not through a link, which a member that runs already may have put
        _call("shoal", _name(target), "tmpfs", MS_NOSUID | MS_NODEV, COVER)
        os.close(target)
    for source, path, writable, file in bound:
        target = _open(path) if file else _made(path)
        _call(_name(sources[source]), _name(target), "", MS_BIND)
        flags = MS_REMOUNT | MS_BIND | MS_NOSUID | (0 if file else MS_NODEV)
        _call("", path, "", flags if writable else flags | MS_RDONLY)
        os.close(target)
    try:
        hold(mounts["read_only"])
    except NotHeld as error:
        raise Failure(f"a volume cannot be kept read-only on this node: {error}") from None
    for (path,) in mounts["covered"]:
        _call("", path, "", MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_RDONLY, COVER)


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_NOFOLLOW)


def _name(handle: int) -> str:
    return f"/proc/self/fd/{handle}"


def _made(path: str) -> int:
    """A folder, made with those around it. No link is followed: a member that runs already may
    have put one there."""
    here = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for name in path.strip("/").split("/"):
        with contextlib.suppress(FileExistsError, OSError):
            os.mkdir(name, 0o755, dir_fd=here)
        inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        os.close(here)
        here = inner
    return here


def _call(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = (os.fsencode(word) if word else None for word in (source, target, kind))
    one, two, three = words
    _check(libc.mount(one, two, three, flags, data.encode() or None), f"cannot mount {target}")


def _drop(uid: int, files: int, agent: int) -> None:
    """Bounded, alone in its keyring, and without any right that its user does not have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, resource.getrlimit(7)[0]), files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(UMASK)
    if KEYCTL:
        libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")
    if os.getppid() != agent:
        os._exit(1)


def _exec(order: dict[str, Any]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(order["workdir"])
    except OSError as error:
        user = f"the tenant's user {order['uid']}"
        raise Failure(f"{user} cannot enter {order['workdir']}: {error.strerror}") from None
    os.execve(order["program"], order["argv"], order["env"])


def _check(result: int, what: str) -> None:
    if result != 0:
        raise Failure(f"{what}: {os.strerror(ctypes.get_errno())}")


def _files_max() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


if __name__ == "__main__":
    main()
