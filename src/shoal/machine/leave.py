"""The end of a process, without the interpreter's clean-up of everything that was loaded."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def end_as(main: Callable[[], object]) -> NoReturn:
    """Run a main program and exit as the interpreter would, but without taking hundreds of modules
    apart first, which takes longer than all else at the end of a process."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
