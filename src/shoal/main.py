"""The entry point: the command line, or the controller that it starts in the background."""

from __future__ import annotations

import gc
import os
import sys

# Modules and answers have few cycles: looking for them took a twentieth of a short command.
GARBAGE = 50_000, 20, 100


def main() -> None:
    """Imports wait until it is known what is wanted: the command line must be quick."""
    if sys.argv[1:2] == ["controller"] and len(sys.argv) >= 5:
        from shoal.head.controller import run_controller

        sys.exit(run_controller(sys.argv[2], *map(int, sys.argv[3:])))
    if sys.argv[1:] in ([], ["--help"]) and "_SHOAL_COMPLETE" not in os.environ:
        from shoal.cli.errors import exit_code_of
        from shoal.cli.first_page import first_page

        sys.exit(exit_code_of(lambda: print(first_page(), end="")))
    gc.set_threshold(*GARBAGE)
    from shoal.cli.app import run
    from shoal.machine.leave import end_as

    end_as(run)


if __name__ == "__main__":
    main()
