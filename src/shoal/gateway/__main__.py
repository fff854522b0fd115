"""`python -m shoal.gateway stop DIRECTORY`: stop the gateway that was started there."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.gateway.binary import GatewayError, Presence, end_router


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "stop":
        print("usage: python -m shoal.gateway stop DIRECTORY", file=sys.stderr)
        return 2
    try:
        Presence(Path(arguments[1])).stop(grace_s=0)
        end_router(Path(arguments[1]))
    except GatewayError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
