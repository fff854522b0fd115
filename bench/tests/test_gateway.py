"""What `bench/gateway.py` counts, on samples made up for it; the parts run in the bench itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.gateway import compared, failed, replica, spread_of
from bench.gateway_load import Sample
from bench.gateway_peers import available, free_port

BENCH = Path(__file__).parents[1]


def test_failures_and_percentiles_are_counted() -> None:
    samples = [Sample(0.0, number / 1000, 200) for number in range(1, 101)]
    lost = [Sample(0.0, 0.5, 0), Sample(0.0, 0.5, 503), Sample(0.0, 0.5, 429)]
    assert [failed(sample) for sample in lost] == [True, True, False]
    figures = spread_of([samples, samples[:50] + lost[:1]])
    assert figures["answered"] == 0.9804
    assert figures["requests"] == 151
    assert spread_of([samples])["p99_ms"] == 99.0


def test_each_is_set_beside_plain_haproxy(capsys: pytest.CaptureFixture[str]) -> None:
    figures = compared({"haproxy": {"x": 4}, "shoal": {"x": 3}}, "x", "title")
    assert figures["shoal"]["x_to_haproxy"] == 0.75
    assert "title" in capsys.readouterr().out
    found, missing = available()
    assert "direct" in found
    assert all(": " in line or ";" in line for line in missing)


@pytest.mark.outside("a load of 100 requests a second has to keep its pace")
def test_the_load_and_the_replica_understand_each_other() -> None:
    port = free_port()
    process = replica(port, 1.0)
    try:
        words = [port, "/", 100, 0.5, 0, "POST", 1]
        said = subprocess.run(
            [sys.executable, str(BENCH / "gateway_load.py"), *map(str, words)],
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
    finally:
        process.kill()
        process.wait()
    samples = msgspec.json.decode(said, type=list[Sample])
    assert len(samples) > 10
    assert {sample.status for sample in samples} == {200}
