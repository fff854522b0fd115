"""A training gang in small: members on several hosts take each step together, and the steps are
written down as a checkpoint would be. Run as a job, it goes on where the last attempt was."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

PAUSE_S = 0.05
NEXT, LAST = b"n", b"l"


def main() -> None:
    shared = Path(os.environ["SHARED"])
    steps, finish = shared / f"{os.environ['SHOAL_JOB_ID']}.steps", shared / "finish"
    meeting = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        lead(meeting, int(os.environ["WORLD_SIZE"]) - 1, steps, finish)
    else:
        follow(meeting)


def lead(meeting: tuple[str, int], others: int, steps: Path, finish: Path) -> None:
    done = len(steps.read_text().splitlines()) if steps.exists() else 0
    with socket.create_server(meeting) as server:
        links = [server.accept()[0] for _ in range(others)]
    last = False
    while not last:
        assert all(link.recv(1) for link in links), "a member is gone"
        last = finish.exists()
        with steps.open("a") as ledger:
            ledger.write(f"{os.environ['SHOAL_ATTEMPT']} {done}\n")
        done += 1
        for link in links:
            link.sendall(LAST if last else NEXT)
        time.sleep(PAUSE_S)


def follow(meeting: tuple[str, int]) -> None:
    while True:
        try:
            link = socket.create_connection(meeting, timeout=5)
            break
        except OSError:
            time.sleep(PAUSE_S)
    link.settimeout(None)
    while True:
        link.sendall(b".")
        answer = link.recv(1)
        assert answer, "the leader is gone"
        if answer == LAST:
            return


if __name__ == "__main__":
    main()
