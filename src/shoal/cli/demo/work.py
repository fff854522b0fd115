"""The work of the demo's processes: a small training run, a server, its clients, a map.

    python -m shoal.cli.demo.work train STEPS [SLOW] | serve | ask URL SECONDS | map

It is real work in plain Python, so the demo needs nothing but Shoal.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

FEATURES = 8
BATCH = 16
STEP_S = 0.1
SLOWNESS = 1.6  # how many times longer a slow member takes
SAVE_EVERY = 10
LEARNING_RATE = 0.02
THINK_S = 0.05  # how long the server takes to answer
ASKERS = 6
TELL_S = 0.5  # between two lines of the clients


def train(steps: int, slow: int = -1) -> None:
    """Fits a line to noisy points and saves the weights, so that the next attempt continues. The
    member `slow`, if there is one, takes longer for each step, and the others wait for it."""
    from shoal.train.beats import Beats

    rank = int(os.environ.get("RANK", "0"))
    file = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", ".")) / "weights.json"
    begun = {"step": 0, "weights": [0.0] * FEATURES}
    with contextlib.suppress(OSError, ValueError):
        begun = json.loads(file.read_text())
    beats, weights = Beats(), list(begun["weights"])  # type: ignore[call-overload]
    chance, truth = random.Random(7), [number - 3.5 for number in range(FEATURES)]
    first, saved, compute_us, wait_us = int(begun["step"]), int(begun["step"]), 0, 0  # type: ignore[call-overload]
    if rank == 0:
        print(f"attempt {os.environ.get('SHOAL_ATTEMPT', '1')} begins at step {first}", flush=True)
    for step in range(first, steps):
        began = time.perf_counter()
        loss = _descend(weights, truth, chance)
        # The members differ a little, as real ones do, and wait for the slowest.
        whole_s = STEP_S * (SLOWNESS if slow >= 0 else 1)
        own_s = whole_s if rank == slow else STEP_S * (0.82 + 0.04 * rank + 0.06 * chance.random())
        time.sleep(max(0.0, whole_s - (time.perf_counter() - began)))
        compute_us += int(own_s * 1e6)
        wait_us += int(max(0.0, whole_s - own_s) * 1e6)
        if (step + 1) % SAVE_EVERY == 0:
            if rank == 0:
                _save(file, step + 1, weights)
                print(f"step {step + 1} of {steps}  loss {loss:.4f}", flush=True)
            saved = step + 1
        beats.log({"loss": loss})
        beats.send(
            step=step + 1,
            steps=step + 1 - first,
            steps_total=steps,
            compute_us=compute_us,
            wait_us=wait_us,
            saved_step=saved,
            samples=(step + 1 - first) * BATCH,
        )


def _descend(weights: list[float], truth: list[float], chance: random.Random) -> float:
    total = 0.0
    gradient = [0.0] * FEATURES
    for _ in range(BATCH):
        point = [chance.gauss(0, 1) for _ in range(FEATURES)]
        target = sum(a * b for a, b in zip(truth, point, strict=True)) + chance.gauss(0, 0.3)
        error = sum(a * b for a, b in zip(weights, point, strict=True)) - target
        total += error * error
        for index, value in enumerate(point):
            gradient[index] += 2 * error * value / BATCH
    for index, slope in enumerate(gradient):
        weights[index] -= LEARNING_RATE * slope
    return total / BATCH


def _save(file: Path, step: int, weights: list[float]) -> None:
    half = file.with_suffix(".new")
    half.write_text(json.dumps({"step": step, "weights": weights}))
    half.replace(file)


def serve() -> None:
    """Answers after a short delay, until SIGTERM."""

    class Thinker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One write for an answer: half an answer of a killed replica could not be asked for again.
        wbufsize = 1 << 16

        def do_GET(self) -> None:
            if self.path != "/health":
                time.sleep(THINK_S * (0.5 + random.random()))
            body = b"a thought\n"
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Thinker)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("serving on port", os.environ["PORT"], flush=True)
    server.serve_forever()


def ask(url: str, seconds: float) -> None:
    """Several clients at once; each sends its next request after an answer."""
    parts, end = urlsplit(url), time.monotonic() + seconds
    answered, failed = [0] * ASKERS, [0] * ASKERS

    def client(number: int) -> None:
        while time.monotonic() < end:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
            try:
                connection.request("GET", parts.path)
                good = connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                good = False
            finally:
                connection.close()
            answered[number] += good
            failed[number] += not good
            if not good:
                time.sleep(THINK_S)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(ASKERS)]
    for thread in threads:
        thread.start()
    before, looked = 0, time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(TELL_S)
        now, seen = time.monotonic(), sum(answered)
        rate = (seen - before) / (now - looked)
        print(f"{seen} answers, {sum(failed)} failures, {rate:.0f} per second", flush=True)
        before, looked = seen, now
    print(f"{sum(answered)} answers, {sum(failed)} failures")


def count_letters(text: str) -> int:
    time.sleep(0.05)
    return len(text)


def map_words() -> None:
    import shoal

    words = [f"{number} fish" for number in range(40)]
    lengths = list(shoal.map(count_letters, words))
    print(f"{len(lengths)} lines mapped, {sum(lengths)} letters")


def main(words: list[str]) -> None:
    match words:
        case ["train", steps, *slow]:
            train(int(steps), *map(int, slow[:1]))
        case ["serve"]:
            serve()
        case ["ask", url, seconds]:
            ask(url, float(seconds))
        case ["map"]:
            map_words()
        case _:
            sys.exit("demo_work: train STEPS [SLOW] | serve | ask URL SECONDS | map")


if __name__ == "__main__":
    main(sys.argv[1:])
