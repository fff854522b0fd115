"""What `bench/sleep.py` runs: plain programs that know nothing of Shoal, and nothing of sleep.

    sleep_work.py train MARKS STEP_S MB [SAVES EVERY]   steps for ever, each written to MARKS
    sleep_work.py take MARKS SECONDS MB                 takes that much of the GPU, holds it, ends
    sleep_work.py serve MARKS PORT WEIGHTS              answers HTTP requests from its weights
    sleep_work.py share MARKS STEP_S MB                 two processes that share memory of the GPU

A line of MARKS is `time pid what`. Without a GPU, the same happens with host memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

WIDTH = 4096
VIRTUAL = "BENCH_VIRTUAL" in os.environ


def main() -> None:
    kind, marks = sys.argv[1], Path(sys.argv[2])
    mark(marks, "begin")
    kinds: dict[str, Callable[..., None]] = {"train": train, "take": take, "serve": serve}
    kinds["share"] = share
    kinds[kind](marks, *sys.argv[3:])


def mark(marks: Path, what: str) -> None:
    handle = os.open(marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{time.time():.4f} {os.getpid()} {what}\n".encode())
    os.close(handle)


class Model:
    """`step` depends on all steps before, so a step that is lost or done twice shows. `ballast` is
    memory that sleep has to move, and that must come back as it was."""

    def __init__(self, mb: int) -> None:
        self.step = 0
        if VIRTUAL:
            self.chain = b""
            return
        import torch

        torch.manual_seed(0)
        self.one: Any = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.two: Any = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.ballast: Any = torch.full((mb << 18,), 7, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()

    def advance(self, seconds: float) -> None:
        """One step, of products that take about this long on an H200."""
        self.step += 1
        if VIRTUAL:
            time.sleep(seconds)
            self.chain = hashlib.sha256(self.chain + b"%d" % self.step).digest()
            return
        for _ in range(max(1, int(seconds / 0.0002))):
            self.one = (self.one @ self.two).clamp(-1, 1)
        self.one[0, 0].item()

    def sound(self) -> bool:
        return VIRTUAL or bool((self.ballast == 7).all())

    def save(self, file: Path) -> None:
        """Written beside and moved, so that a stop in the middle leaves the last one."""
        new = file.with_suffix(".new")
        if VIRTUAL:
            new.write_bytes(b"%d %s" % (self.step, self.chain.hex().encode()))
        else:
            import torch

            torch.save({"step": self.step, "one": self.one, "ballast": self.ballast}, new)
        new.replace(file)

    def load(self, file: Path) -> None:
        if VIRTUAL:
            step, _, chain = file.read_bytes().partition(b" ")
            self.step, self.chain = int(step), bytes.fromhex(chain.decode())
            return
        import torch

        state = torch.load(file, map_location="cuda", weights_only=True)
        self.step, self.one, self.ballast = state["step"], state["one"], state["ballast"]


def train(marks: Path, step_s: str, mb: str, saves: str = "", every: str = "0") -> None:
    model = Model(int(mb))
    file = Path(saves or ".") / "state"
    if saves and file.exists():
        model.load(file)
    mark(marks, "ready")
    while True:
        model.advance(float(step_s))
        mark(marks, str(model.step))
        if int(every) and model.step % int(every) == 0:
            model.save(file)
            mark(marks, "saved")
        if (marks.parent / "look").exists() and not model.sound():
            mark(marks, "broken")


def take(marks: Path, seconds: str, mb: str) -> None:
    held: list[Any] = []
    if not VIRTUAL:
        import torch

        for _ in range(int(mb) >> 10):
            held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
    mark(marks, "holds")
    time.sleep(float(seconds))
    mark(marks, "ends")


def serve(marks: Path, port: str, weights: str) -> None:
    if VIRTUAL:
        data: Any = Path(weights).read_bytes()
    else:
        import torch

        size = os.path.getsize(weights) // 2
        data = torch.from_file(weights, size=size, dtype=torch.bfloat16).to("cuda")
        data = data[: size - size % WIDTH].view(-1, WIDTH)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if VIRTUAL:
                text = hashlib.sha256(data).hexdigest().encode()
            else:
                text = b"%.6f" % (data @ data[0]).float().sum().item()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", int(port)), Answers)
    mark(marks, "ready")
    server.serve_forever()


def share(marks: Path, step_s: str, mb: str) -> None:
    """CUDA's memory between processes: the child sees what the parent has."""
    if VIRTUAL:
        train(marks, step_s, mb)
    import torch.multiprocessing as multi

    context = multi.get_context("spawn")
    model = Model(int(mb))
    ready = context.Event()
    child = context.Process(target=watch, args=(model.ballast, ready), daemon=True)
    child.start()
    ready.wait()
    mark(marks, "ready")
    while child.is_alive():
        model.advance(float(step_s))
        mark(marks, str(model.step))


def watch(shared: Any, ready: Any) -> None:
    ready.set()
    while True:
        shared[0].item()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
