"""One declaration makes a column of the API's list, of `shoal ps` and of its CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from shoal.api.views import gpu_use
from shoal.api.web import FOLDER
from shoal.cli import cluster
from shoal.cli.app import call
from shoal.client import Client
from shoal.model.columns import COLUMNS, Column, Kind
from shoal.model.job import MemberRef
from shoal.model.series import GpuSample, NodeSample
from tests.api.server import OPERATORS, Server, serving
from tests.api.world import POLICY, World
from tests.core.build import Cluster

LENGTH = Column(
    "length", "letters of its name", Kind.NUMBER, of=lambda job: len(job.spec.name or "")
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setitem(COLUMNS, LENGTH.name, LENGTH)
    with serving(tmp_path / "home", POLICY) as served:
        url = f"http://127.0.0.1:{served.port}"
        monkeypatch.setattr(cluster, "connect", lambda _: Client(url, OPERATORS))
        yield served


def test_a_column_that_is_declared_stands_in_every_list(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(server)
    ended = world.theirs["done"]  # zebradone, which the store has

    def ids(**query: object) -> list[str]:
        path = f"/v1/jobs?{urlencode(query)}"
        rows = msgspec.json.decode(server.call(OPERATORS, "GET", path).body)
        assert all(row["cells"] == {"length": len(row["name"])} for row in rows)
        return [row["id"] for row in rows]

    down = ids(sort="-length")
    assert ended in down and ids(sort="length") == down[::-1]
    path = f"/v1/jobs?sort=-length&limit={len(down) - 1}"
    cursor = server.call(OPERATORS, "GET", path).headers["shoal-next"]
    assert ids(sort="-length", cursor=cursor) == down[-1:]

    def lines(*words: str) -> list[str]:
        assert call(["ps", "-a", *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert any(line.split()[0] == "length" for line in lines("-o", "help"))
    head, *rows = lines("-o", "name,length", "--sort", "-length")
    assert head.split() == ["NAME", "LENGTH"]
    assert [row.split()[-1] for row in rows] == sorted(
        (str(len(row.split()[0])) for row in rows), key=int, reverse=True
    )
    file = tmp_path / "jobs.csv"
    lines("--csv", str(file))
    with file.open(newline="") as opened:
        (told,) = [row for row in csv.DictReader(opened) if row["id"] == ended]
    assert list(told) == list(COLUMNS)
    assert told["length"] == "9" and told["state"] == "succeeded"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}", told["ended"])
    assert re.fullmatch(r"\d+\.\d{3}", told["time"]), "seconds"


def test_names_are_unique_and_a_value_that_python_makes_has_a_cell_on_the_page() -> None:
    names = [name for one in COLUMNS.values() for name in (one.name, one.also) if name]
    assert len(names) == len({*names})
    cells = (
        (FOLDER / "job-cells.js").read_text().partition("const CELLS = {")[2].partition("\n};")[0]
    )
    drawn = {*re.findall(r"^  (\w+)[:,]", cells, re.MULTILINE)}
    assert {one.name for one in COLUMNS.values() if one.value is not None} <= drawn <= {*COLUMNS}


def test_how_busy_the_gpus_of_a_job_are_and_what_it_has_on_them() -> None:
    made = Cluster()
    made.join("a", gpus=4, gpu_memory_mb=80_000)
    whole, share = made.run(gpus=2), made.run(gpus=1, gpu_milli=500)
    (gpu,) = made.job(share).members[0].slice.gpus
    samples = [GpuSample(busy_milli=400, memory_milli=250)] * 4
    samples[made.job(whole).members[0].slice.gpus[0]] = GpuSample(busy_milli=900, memory_milli=500)
    samples[gpu] = GpuSample(busy_milli=700, memory_milli=900)
    sample = NodeSample(at_ms=1, gpus=tuple(samples))
    loop: Any = SimpleNamespace(state=made.state, newest={"a": sample})
    made.state.heard.uses["a"] = {MemberRef(share, 1, 0): 3_000}
    found = [gpu_use(loop, made.job(job)) for job in (whole, share)]
    assert found[0] == {"gpu_busy_milli": 650, "gpu_used_mb": 60_000}
    assert found[1] == {"gpu_busy_milli": 700, "gpu_used_mb": 3_000}, "not its neighbors'"
    loop.newest.clear()
    assert gpu_use(loop, made.job(whole)) == {"gpu_busy_milli": None, "gpu_used_mb": None}
