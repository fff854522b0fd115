"""Turns every error into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys

from shoal.forms.failure import REFUSED, Failure

TYPE_CHECKING = False  # as type checkers read it: the first help page does without `typing`
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

NO_CLUSTER = 3
INTERRUPTED = 130  # 128 + SIGINT
PATH_SHOWN = 200
PIPE_CLOSED = 141  # 128 + SIGPIPE, as for any tool whose reader exits


def exit_code_of(act: Callable[[], Any]) -> int:
    """The exit code of `act`. Any error it raises becomes one line on stderr."""
    debug = bool(os.environ.get("SHOAL_DEBUG"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            result = act()
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except BaseException:
            if debug:
                import traceback

                traceback.print_exc()
            raise
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _drop_output()
    except Exception as error:
        return _print(error)


def print_error(message: str) -> None:
    """One line on stderr, whatever the message contains."""
    from shoal.model.phrases import printable

    print(f"error: {printable(message)}", file=sys.stderr)


def _print(error: Exception) -> int:
    code = getattr(error, "exit_code", None)
    if isinstance(error, Failure):
        print_error(error.message)
        return error.code
    if isinstance(code, int):  # Click's own: a usage error, or an early end as of --help
        if hasattr(error, "format_message"):
            print_error(_usage_message(error))
        return code
    if isinstance(error, OSError):
        return _print_os_error(error)
    return _print_ours(error)


def _print_ours(error: Exception) -> int:
    from shoal.client import ShoalError, Unreachable
    from shoal.control.lifecycle import LifecycleError
    from shoal.ports import EngineError

    if isinstance(error, Unreachable):
        print_error(str(error))
        return NO_CLUSTER
    if isinstance(error, ShoalError | LifecycleError | EngineError):
        print_error(str(error))
        return REFUSED
    where = _write_traceback(error)
    print_error(f"this should not happen: {type(error).__name__}: {error} (details in {where})")
    return REFUSED


def _usage_message(error: Any) -> str:
    """Click's message in our form: the flag, the problem, the help page."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    close = getattr(error, "possibilities", None)
    if close:
        asked = getattr(error, "option_name", "") or ""
        return f"{_plain(error.message)}; did you mean {' or '.join(_closest(asked, close))}?"
    if parameter is not None:
        option = parameter.param_type_name == "option"
        name = max(parameter.opts, key=len) if option else parameter.metavar or parameter.name
        missing = type(error).__name__ == "MissingParameter"
        text = f"{name} is missing" if missing else f"{name}: {_plain(error.message)}"
    else:
        text = _plain(error.format_message())
    return f"{text}; see: {context.command_path} --help" if context else text


def _closest(asked: str, names: Sequence[str]) -> list[str]:
    """At most two, the most similar first; only one, if it is what was typed and a letter more."""
    from difflib import SequenceMatcher

    ranked = sorted(names, key=lambda name: (-SequenceMatcher(None, asked, name).ratio(), name))
    almost = asked and ranked[0].startswith(asked) and len(ranked[0]) == len(asked) + 1
    return ranked[: 1 if almost else 2]


def _plain(sentence: str) -> str:
    """The sentence without capital letter and full stop."""
    sentence = sentence.strip().rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _print_os_error(error: OSError) -> int:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC and error.filename is None:
        reason = "cannot write the output: no space left on device"
    name = str(error.filename or "")
    short = name if len(name) <= PATH_SHOWN else f"{name[: PATH_SHOWN // 2]}...{name[-20:]}"
    print_error(f"{short}: {reason}" if name else reason)
    return REFUSED


def _drop_output() -> int:
    """The reader of a pipe exited, as `head` does. Buffered output must not fail again at exit."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    except (OSError, ValueError):
        pass
    return PIPE_CLOSED


def _write_traceback(error: Exception) -> str:
    import tempfile
    import time
    import traceback
    from pathlib import Path

    text = "".join(traceback.format_exception(error))
    home = Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal")
    for folder in (home, Path(tempfile.gettempdir())):
        path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        try:
            # Another user may have guessed the name and put a link there.
            with path.open("x", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            continue
        return str(path)
    return "SHOAL_DEBUG=1"
