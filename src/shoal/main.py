"""The entry point: the command line, or the controller that it starts in the background."""

from __future__ import annotations

import sys


def main() -> None:
    """Imports wait until it is known which of the two is wanted: the command line must be quick."""
    if sys.argv[1:2] == ["controller"] and len(sys.argv) >= 5:
        from shoal.head.controller import run_controller

        sys.exit(run_controller(sys.argv[2], *map(int, sys.argv[3:])))
    from shoal.cli.app import run

    run()


if __name__ == "__main__":
    main()
