"""Runs the command line without what macOS lacks: `python as_macos.py VERB ...`."""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time
import types
import zoneinfo  # noqa: F401 (it reads how this Python was built, by the name of the platform)
from typing import Any

LACKS: dict[Any, tuple[str, ...]] = {
    os: (
        "copy_file_range",
        "eventfd",
        "eventfd_read",
        "eventfd_write",
        "fdatasync",
        "getrandom",
        "getxattr",
        "memfd_create",
        "pidfd_open",
        "pipe2",
        "posix_fadvise",
        "posix_fallocate",
        "sched_getaffinity",
        "sched_setaffinity",
        "setns",
        "splice",
        "unshare",
        "EFD_CLOEXEC",
        "EFD_NONBLOCK",
        "MFD_CLOEXEC",
        "O_PATH",
        "O_TMPFILE",
    ),
    socket: ("SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_BINDTODEVICE", "AF_NETLINK"),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    resource: ("prlimit",),
    fcntl: ("F_OFD_SETLK", "F_ADD_SEALS"),
    time: ("CLOCK_BOOTTIME",),
}


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    path: Any = arguments[0] if arguments else None
    named = event in ("open", "os.listdir", "os.scandir") and isinstance(path, str | bytes)
    if named and os.fsdecode(path).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, "there is no /proc on this system", path)
    if event in ("socket.bind", "socket.connect"):
        address = arguments[1]
        if isinstance(address, str | bytes) and address[:1] in ("\0", b"\0"):
            raise OSError(errno.ENOENT, "there are no abstract addresses on this system")
    if event == "ctypes.dlsym" and arguments[1] in ("prctl", "unshare", "setns", "mount"):
        raise AttributeError(f"this system has no {arguments[1]}")


def _no_sendfile(*_: object) -> int:
    raise OSError(errno.ENOTSUP, "not with this kind of socket")


def become() -> None:
    for module, names in LACKS.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.sendfile = _no_sendfile  # type: ignore[assignment]
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] in ("uvloop", "httptools", "uvicorn"):
            raise ImportError(f"{name} is the head's")
        return imported(name, *rest, **more)

    builtins.__import__ = without
    proxies = types.ModuleType("_scproxy")  # which macOS has
    vars(proxies).update(_get_proxy_settings=dict, _get_proxies=dict)
    sys.modules["_scproxy"] = proxies
    ctypes.CDLL(None)  # which may be used, but not for Linux's own calls
    sys.addaudithook(_refuse)
    sys.platform = "darwin"


if __name__ == "__main__":
    become()
    from shoal.main import main

    main()
