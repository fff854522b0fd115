"""A member of a gang that steps together, without torch: `stepper.py STEPS PACE_FILE`.

While the pace file names a node, members there need SLOW_S of their own for a step and the others
QUICK_S; while it is empty, nobody sleeps. The first step waits until the file is there. Rank 0
saves each step, and a new attempt goes on from the last one saved.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from shoal.train.beats import Beats

QUICK_S, SLOW_S = 0.025, 0.15
JOIN_S = 60.0


class Peers:
    """All wait for all: rank 0 hears from everybody, then answers with the step it is at."""

    def __init__(self, rank: int, world: int) -> None:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._others: list[socket.socket] = []
        self._first: socket.socket | None = None
        if rank == 0:
            with socket.create_server(address) as server:
                server.settimeout(JOIN_S)
                self._others = [server.accept()[0] for _ in range(world - 1)]
        else:
            self._first = _connect(address)

    def meet(self, step: int) -> int:
        if self._first is not None:
            self._first.sendall(b"!")
            return int.from_bytes(_read(self._first, 8), "big")
        for other in self._others:
            _read(other, 1)
        for other in self._others:
            other.sendall(step.to_bytes(8, "big"))
        return step


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _read(line: socket.socket, size: int) -> bytes:
    data = line.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        sys.exit("a peer has left")
    return data


def main() -> None:
    total, pace = int(sys.argv[1]), Path(sys.argv[2])
    rank, node = int(os.environ["RANK"]), os.environ["SHOAL_NODE"]
    saved = Path(os.environ["SHOAL_CHECKPOINT_DIR"]) / "step"
    beats, peers = Beats(), Peers(rank, int(os.environ["WORLD_SIZE"]))
    while not pace.exists():
        time.sleep(0.05)
    begin = peers.meet(int(saved.read_text()) if saved.exists() else 0)
    print(f"from {begin} on {node}", flush=True)
    own_ns = wait_ns = 0
    for step in range(begin + 1, total + 1):
        began = time.perf_counter_ns()
        if slow := pace.read_text():
            time.sleep(SLOW_S if slow == node else QUICK_S)
        done = time.perf_counter_ns()
        peers.meet(step)
        own_ns, wait_ns = own_ns + done - began, wait_ns + time.perf_counter_ns() - done
        if rank == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").rename(saved)
        if time.perf_counter_ns() >= beats.due_ns or step == total:
            beats.send(
                step=step,
                steps=step - begin,
                compute_us=own_ns // 1000,
                wait_us=wait_ns // 1000,
                steps_total=total,
                saved_step=step if rank == 0 else 0,
            )
    print(f"done {total}", flush=True)


if __name__ == "__main__":
    main()
