"""One declaration makes a column of the API's list, of `shoal ps` and of its CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

from shoal.api.web import FOLDER
from shoal.cli import cluster
from shoal.cli.app import call
from shoal.client import Client
from shoal.model.columns import COLUMNS, Column, Kind
from tests.api.server import OPERATORS, Server, serving
from tests.api.world import POLICY, World

pytestmark = pytest.mark.filterwarnings("ignore::litestar.exceptions.LitestarDeprecationWarning")
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
