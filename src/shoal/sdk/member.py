"""A member of a job that runs a function: calls it, and keeps what it returned or raised.

The result is a file in the job's kept folder, so it survives the node and a restart of the head.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # started by its path: then the first place for imports is its folder
    sys.path[0] = str(Path(__file__).parents[2])

from shoal.tasks.errors import portable
from shoal.tasks.functions import moved, offer_main, paths_here

CALL = "SHOAL_TASKS_CALL"  # in the environment: the call itself
IN_PACKAGE = "package"  # in its place: the call is a file
CALL_FILE = ".shoal-call"  # in the package: the call, if it is too large for the environment
RESULTS = ".shoal"  # in the kept folder
RESULT_BYTES_MAX = 256 << 20


class Sent(NamedTuple):
    """A call on its way. `root` is the folder that was packed, `here` where to run if none was."""

    python: tuple[int, int]
    path: list[str]
    script: str
    root: str
    here: str
    body: bytes  # the function and its arguments


class Returned(NamedTuple):
    """What a member kept. `text` is the traceback of an error, and empty for a result."""

    attempt: int
    at_ms: int
    body: bytes
    text: str = ""


def main() -> int:
    """The exit code of the member."""
    try:
        function, arguments = _loaded(_sent())
        body, text = _dump(function(*arguments)), ""
    except SystemExit as error:
        if error.code:
            raise
        body, text = _dump(None), ""  # it ended by itself, and well
    except BaseException as error:
        body, text = portable(error)
        print(text, file=sys.stderr, end="", flush=True)
    _keep(body, text)
    return 1 if text else 0


def _sent() -> Sent:
    text = os.environ.pop(CALL)
    if text == IN_PACKAGE:
        data = (Path(os.environ["SHOAL_PACKAGE"]) / CALL_FILE).read_bytes()
    else:
        data = zlib.decompress(base64.b64decode(text))
    return Sent(*pickle.loads(data))


def _loaded(sent: Sent) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    python = sys.version_info[:2]
    if tuple(sent.python) != python:
        theirs, ours = (".".join(map(str, one)) for one in (sent.python, python))
        node = os.environ.get("SHOAL_NODE", "this node")
        raise RuntimeError(
            f"{node} has Python {ours}, and the function was sent from Python {theirs}: functions "
            "cannot be sent between them"
        )
    if sent.here:
        os.chdir(sent.here)
    sys.path[:] = paths_here(sent.path, sent.root)
    offer_main(moved(sent.script, sent.root, os.environ.get("SHOAL_PACKAGE", "")))
    function, arguments = pickle.loads(sent.body)
    return function, arguments


def _dump(value: Any) -> bytes:
    try:
        body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        body = _dump_by_value(value)
    if len(body) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the result has {len(body):,} bytes, and {RESULT_BYTES_MAX:,} can be returned; write "
            "it to a file in $SHOAL_OUTPUT, and return its name"
        )
    return body


def _dump_by_value(value: Any) -> bytes:
    """Values of classes that came here by value go back the same way."""
    try:
        import cloudpickle

        body: bytes = cloudpickle.dumps(value)
        return body
    except Exception as error:
        message = f"the result, a {type(value).__name__}, cannot be sent: {error}"
        raise TypeError(message) from None


def _keep(body: bytes, text: str = "") -> None:
    """In one piece: a file that is there is complete."""
    environ = os.environ
    folder = Path(environ["SHOAL_OUTPUT"]) / RESULTS
    folder.mkdir(exist_ok=True)
    name = f"result-{environ['SHOAL_MEMBER']}"
    at_ms = time.time_ns() // 1_000_000
    kept = Returned(int(environ["SHOAL_ATTEMPT"]), at_ms, body, text)
    new = folder / f"{name}.new"
    new.write_bytes(pickle.dumps(tuple(kept), pickle.HIGHEST_PROTOCOL))
    new.replace(folder / name)


if __name__ == "__main__":
    sys.exit(main())
