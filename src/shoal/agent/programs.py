"""Finds the program of a member on this node, before it starts."""

from __future__ import annotations

import os
import shutil

from shoal.agent.faults import CannotStart
from shoal.model.job import Fault


def find_program(program: str, workdir: str, path: str) -> str:
    if not os.path.isdir(workdir):
        raise CannotStart(f"workdir {workdir} is not a directory on this node", Fault.MISSING)
    if "/" in program:
        found = os.path.join(workdir, program)
        if not os.path.exists(found):
            raise CannotStart(f"{found} does not exist on this node", Fault.MISSING)
        if os.path.isdir(found) or not os.access(found, os.X_OK):
            raise CannotStart(f"{found} cannot be executed: is it a program, with chmod +x?")
        return found
    found_in_path = shutil.which(program, path=path)
    if found_in_path is None:
        raise CannotStart(f"no program {program!r} in PATH on this node", Fault.MISSING)
    return found_in_path
