"""Serve a model with llama.cpp's own server, on the port that Shoal gives.

    shoal serve examples/engine/llama.yaml                         a tiny model of random weights
    shoal serve examples/engine/llama.yaml --env MODEL=/models/x.gguf

The engine is llama.cpp (the package xllamacpp brings it, for CPUs): it has OpenAI's interface,
answers several requests at a time, and shows its queue at /metrics.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import tiny_model
import xllamacpp

TOGETHER = 4  # requests that the engine works on at a time; more wait inside it


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        server = start(os.environ.get("MODEL") or tiny(folder))
        print(f"listens at {server.listening_address}", flush=True)
        signal.sigwait((signal.SIGTERM, signal.SIGINT))
        del server


def tiny(folder: str) -> str:
    path = str(Path(folder, "tiny.gguf"))
    tiny_model.write(path)
    return path


def start(path: str) -> xllamacpp.Server:
    wish = xllamacpp.CommonParams()
    wish.model.path = path
    wish.model_alias = {os.environ.get("SHOAL_SERVICE", "model")}
    wish.hostnames = [os.environ.get("HOST", "127.0.0.1")]
    wish.port = int(os.environ.get("PORT", "8000"))
    wish.n_parallel = TOGETHER
    wish.n_ctx = TOGETHER * 512
    wish.endpoint_metrics = True
    return xllamacpp.Server(wish)


if __name__ == "__main__":
    main()
