"""A server that needs all its members: `python -m ... NAME`. Member 0 answers on $PORT when the
others have come to the rendezvous; the others end when member 0 does."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from tests.gateway.replica import main


def lead(name: str) -> None:
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))) as meeting:
        peers = [meeting.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        sys.argv[1:] = [os.environ["PORT"], name]
        asyncio.run(main())
        for peer in peers:
            peer.close()


def follow() -> None:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(where) as leader:
                leader.recv(1)
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        lead(sys.argv[1])
    else:
        follow()
