"""A training gang in small: `trainer.py STEPS`. Its members take each step together, and rank 0
saves each as a checkpoint would be. A new attempt goes on from the last step that was saved."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from tests.soak.member import hold_gpus, note

PAUSE_S = 0.1
JOIN_S = 60.0


def main() -> None:
    hold_gpus()
    steps = Path(os.environ["SOAK_SHARED"]) / f"{os.environ['SHOAL_JOB_ID']}.steps"
    meeting = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    total = int(sys.argv[1])
    if os.environ["RANK"] == "0":
        _lead(meeting, int(os.environ["WORLD_SIZE"]) - 1, steps, total)
    else:
        _follow(meeting)


def _lead(meeting: tuple[str, int], others: int, steps: Path, total: int) -> None:
    done = len(steps.read_text().splitlines()) if steps.exists() else 0
    with socket.create_server(meeting) as server:
        server.settimeout(JOIN_S)
        links = [server.accept()[0] for _ in range(others)]
    while done < total:
        if not all(link.recv(1) for link in links):
            sys.exit("a member is gone")
        note(steps, f"{os.environ['SHOAL_ATTEMPT']} {done}")
        done += 1
        for link in links:
            link.sendall(b"n" if done < total else b"l")
        time.sleep(PAUSE_S)


def _follow(meeting: tuple[str, int]) -> None:
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            link = socket.create_connection(meeting, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                sys.exit("the leader does not answer")
            time.sleep(PAUSE_S)
    link.settimeout(None)
    while True:
        link.sendall(b".")
        answer = link.recv(1)
        if not answer:
            sys.exit("the leader is gone")
        if answer == b"l":
            return


if __name__ == "__main__":
    main()
