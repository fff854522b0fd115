"""A real llama.cpp server with a model that speaks letters: the simulated one stands beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.engine.running import ROOT

EXAMPLE = ROOT / "examples" / "engine"
# The example's model says any bytes, most of which are no text; this one says letters. (It reads a
# space as other tokens than it writes, so a text with spaces could not be continued.)
# Its cache is not rounded, because then the same text has the same answer in any batch.
START = """
import sys, gguf, tiny_model, server, xllamacpp
add = gguf.GGUFWriter.add_tensor
def letters(self, name, weights, *more, **named):
    if name == "output.weight":
        weights = weights.copy()
        for token in range(len(weights)):
            if chr(max(0, token - 3)) not in "abcdefghijklmnopqrstuvwxyz":
                weights[token] = 0
    return add(self, name, weights, *more, **named)
gguf.GGUFWriter.add_tensor = letters
tiny_model.write(sys.argv[1])
real = xllamacpp.Server
def exact(wish):
    wish.cache_type_k = wish.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    wish.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return real(wish)
xllamacpp.Server = exact
server.main()
"""


def python(folder: Path) -> str:
    """One that has llama.cpp: `SHOAL_LLAMA`, or a new environment in this folder."""
    if named := os.environ.get("SHOAL_LLAMA"):
        return named
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "-r", str(EXAMPLE / "requirements.txt")]
    subprocess.run(pip, check=True, capture_output=True)
    return str(folder / "bin" / "python")


class Llama:
    """The server of the example, as a process at this port."""

    def __init__(self, interpreter: str, port: int, folder: Path) -> None:
        model = str(folder / f"letters-{port}.gguf")
        self.port = port
        self.log = (folder / f"llama-{port}.log").open("wb")
        self.process = subprocess.Popen(
            [interpreter, "-c", START, model],
            cwd=EXAMPLE,
            env={**os.environ, "PYTHONPATH": str(EXAMPLE), "PORT": str(port), "MODEL": model},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()
