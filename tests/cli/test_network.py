"""`shoal check --network`: the picture, the words and the exit code."""

from __future__ import annotations

import json

import msgspec
import pytest

from shoal.api.fabric import fabric_view, weak_text
from shoal.cli.checks.network import matrix, plain, print_network
from shoal.control.history.history import TOURS_KEPT, Measured
from shoal.control.history.store import HistoryFile
from shoal.core.state.heard import Touring
from shoal.core.state.state import State
from shoal.model.fabric import Collective, Fabric, FabricView, Host, LinkView, Pair, Weak
from shoal.model.health import CheckResult
from tests.cli.conftest import Shoal, assert_one_clear_line


def view_of(count: int, per_group: int) -> FabricView:
    """940 MB/s within a group and 420 between them; n2 and n5 have a weak link, n1 and n6 none."""
    names = [f"n{number}" for number in range(1, count + 1)]
    group = {name: number // per_group for number, name in enumerate(names)}
    links = []
    for number, a in enumerate(names):
        for b in names[:number]:
            rate = 940 if group[a] == group[b] else 420
            fault = "refused" if (b, a) == ("n1", "n6") else ""
            rate = 95 if (b, a) == ("n2", "n5") else rate
            links.append(LinkView(a, b, 30, rate, rate + 9, fault))
    return FabricView(
        id="t1",
        nodes=names,
        answered=count,
        heard_from=names,
        ended_ms=9300,
        links=links,
        places={name: f"m{group[name] + 1}" for name in names},
        usual_mbs=940,
        usual_latency_us=30,
    )


def test_the_matrix_has_a_digit_for_each_pair_and_shows_groups_side_by_side() -> None:
    lines = [plain(line) for line in matrix(view_of(6, 3), 80)]
    assert lines == [
        "      1 2 3  4 5 6",
        "n1 1  · 9 9  4 4 x",
        "n2 2  9 · 9  4 1 4",
        "n3 3  9 9 ·  4 4 4",
        "",
        "n4 4  4 4 4  · 9 9",
        "n5 5  4 1 4  9 · 9",
        "n6 6  x 4 4  9 9 ·",
    ]


def test_the_matrix_of_60_nodes_fits_into_80_columns_and_that_of_more_is_a_table_of_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [plain(line) for line in matrix(view_of(60, 20), 80)]
    assert len(lines) == 62
    assert max(map(len, lines)) <= 80
    assert matrix(view_of(61, 20), 200) == []
    print_network(view_of(90, 30))
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["GROUP", "GROUP", "LINKS", "MEDIAN", "LOWEST", "FAILED"]
    [own] = [line.split() for line in out if line.startswith("m1     m1")]
    assert own == ["m1", "m1", "435", "940", "MB/s", "95", "MB/s", "1"]


def test_weak_links_groups_collectives_and_busy_nodes_are_said_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = view_of(6, 3)
    view.weak = [
        Weak(node="n3", mbs=110, usual_mbs=940, why="4 of its 5 links are slow or failed"),
        Weak(node="n2", peer="n5", mbs=95, usual_mbs=12_500),
        Weak(node="n1", peer="n6", usual_mbs=930, why="refused"),
    ]
    view.outliers = [weak_text(one) for one in view.weak]
    view.busy, view.heard_from = ["n2"], view.nodes[:5]
    view.collectives = [
        Collective(
            name="all-reduce",
            size_bytes=1 << 20,
            ranks=6,
            took_us=1260,
            algorithm_mbs=800,
            bus_mbs=1333,
            backend="gloo",
        )
    ]
    print_network(view)
    out = capsys.readouterr().out
    for line in (
        "n3: 4 of its 5 links are slow or failed; they carry 110 MB/s, where 940 MB/s is usual",
        "n2 - n5: 95 MB/s, where 12.5 GB/s is usual",
        "n1 - n6: no connection (refused)",
        "no answer from n6; see: shoal nodes",
        "  m2: n4, n5, n6",
        "all-reduce  1 MiB      6  1.26 ms   800 MB/s  1.3 GB/s  gloo",
        "jobs ran during the tour on n2",
    ):
        assert line in out.splitlines()
    assert "place: measured" in out


def ended(number: int) -> State:
    state = State()
    tour = Touring(
        id=f"t{number}",
        hosts=(Host("a", "10.0.0.1", 1), Host("b", "10.0.0.2", 2)),
        begun_ms=0,
        until_ms=9,
        ended_ms=number,
        results={"b": CheckResult(id=f"t{number}", pairs=(Pair("a", 20, 900, 910),))},
    )
    state.heard.tours = {tour.id: tour}
    state.fabric = Fabric(id=tour.id, usual_mbs=900, places={"a": "m1", "b": "m1", "gone": "m2"})
    return state


def test_the_last_tours_are_found_again_after_a_restart() -> None:
    file = HistoryFile(None)
    measured = Measured(file)
    for number in range(100, 100 + TOURS_KEPT + 3):
        measured.look(ended(number))
        measured.look(ended(number))
        measured.save()
    again = Measured(file)
    again.restore()
    assert again.last == measured.last
    assert again.last is not None
    view = fabric_view(again.last.tour, again.last.fabric)
    assert (view.id, view.usual_mbs, view.places) == ("t110", 900, {"a": "m1", "b": "m1"})
    assert view.links == [LinkView("b", "a", 20, 900, 910)]
    assert again.find("t103") is not None
    assert again.find("t102") is None, "only the last are kept"


def test_links_are_not_sent_while_a_tour_runs_and_an_older_agent_is_named() -> None:
    tour = ended(1).heard.tours["t1"]
    tour.results["a"] = CheckResult(id="t1", figures={"cpu_one_mbs": 5})
    tour.ended_ms = None
    view = fabric_view(tour, Fabric())
    assert (view.links, view.answered) == ([], 2)
    assert view.errors == ["a: its agent is too old to measure the network; see: shoal upgrade"]


def test_what_cannot_be_measured_is_said_in_one_line(live_shoal: Shoal) -> None:
    for args in (
        ["--network", "n1"],
        ["--network", "n1", "n99"],
        ["--network", "--here"],
        ["--collectives"],
        ["--save", "h.toml"],
        ["--network", "--save", "h.toml"],
        ["--network", "--collectives", "--save", "no-such-folder/h.toml"],
        ["--storage", ""],
    ):
        assert_one_clear_line(live_shoal("check", *args, "--json"))


def test_a_real_tour_between_two_nodes(live_shoal: Shoal) -> None:
    found = live_shoal("check", "--network", "n1", "n2", "--json")
    assert found.code == 0, found
    view = msgspec.json.decode(found.out, type=FabricView)
    assert [sorted((link.a, link.b)) for link in view.links] == [["n1", "n2"]]
    assert view.links[0].mbs > 0
    assert json.loads(found.out)["usual_mbs"] == view.usual_mbs > 0
