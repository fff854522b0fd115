"""From nothing to a chat in one go: train, save, serve what was saved, and talk to it.

    python examples/train_serve_chat.py              about three minutes on two CPU cores
    python examples/train_serve_chat.py --steps 20   sooner, and it talks nonsense

A cluster of its own with two virtual nodes in a temporary directory; nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOAL = [sys.executable, "-m", "shoal.main"]


def shoal(*words: str, told: bool = True) -> str:
    """Run a verb as a person would, and show what was typed."""
    if told:
        print(f"\n$ shoal {' '.join(words)}", flush=True)
    done = subprocess.run([*SHOAL, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"shoal {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    if told:
        print(done.stdout.strip(), flush=True)
    return done.stdout


def ask(url: str, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "seed": 1}
    request = urllib.request.Request(
        f"{url}v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-") as home:
        os.environ["SHOAL_HOME"] = home
        try:
            train_and_chat(home, options.steps)
        finally:
            shoal("down", told=False)


def train_and_chat(home: str, steps: int) -> None:
    shoal("up", "--nodes", "2", "--port", "0")
    train = [sys.executable, str(HERE / "train" / "chars.py"), "--steps", str(steps)]
    shoal("run", "--wait", "-n", "2", "--retries", "2", "--name", "chars", "--", *train)
    print(shoal("events", told=False).strip().splitlines()[-1])
    server = [sys.executable, str(HERE / "serve" / "server.py")]
    saved = f"{home}/checkpoints/j1"
    replicas = ("--replicas", "1..2", "--probe", "/health")
    shoal("serve", "chat", *replicas, "--", *server, "--checkpoint", saved)
    service = json.loads(shoal("service", "chat", "--json", told=False))
    with urllib.request.urlopen(f"{service['url']}health", timeout=30) as health:
        print(f"\n{service['url']}health says {health.read().decode().strip()}")
    print(f"you:  To be\nchat: {ask(service['url'], 'To be')!r}")


if __name__ == "__main__":
    main()
