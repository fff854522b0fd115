"""Forks the members of test gangs from one process that has imported torch already.

Importing it takes seconds for each process, and the tests start many. A member is a process of its
own in every other way. Requests come over a socket, with the files for its output: see `gangs.py`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "fsspec.implementations.local",
)


def serve(line: socket.socket) -> dict[str, object] | None:
    """Answers requests; returns in a new member, with what it should run."""
    while True:
        data, handles, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not data:
            return None  # the tests are over
        request = json.loads(data)
        if "preload" in request:
            for name in request["preload"]:
                __import__(name)
            line.send(b"null")
            continue
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            line.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid:
            for handle in handles:
                os.close(handle)
            line.send(json.dumps(pid).encode())
            continue
        line.close()
        os.setsid()
        os.dup2(handles[0], 1)
        os.dup2(handles[1], 2)
        return dict(request)


def become(member: dict[str, object]) -> None:
    os.environ.clear()
    os.environ.update(member["env"])  # type: ignore[call-overload]
    arguments = [str(argument) for argument in member["argv"]]  # type: ignore[attr-defined]
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    gc.freeze()  # what is shared need not be collected by each member at its end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(asked)
