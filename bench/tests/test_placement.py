"""The placement bench: its reader, its rules on clusters checked by hand, its bound."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from bench import placement
from bench.openb import BadList, Node, Pod, arrivals, read_nodes, read_pods
from bench.placement_bound import forced, upper_bound
from bench.placement_run import POLICIES, Cluster, put, replay
from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy, fits

NODES = "sn,cpu_milli,memory_mib,gpu,model\nb,8000,1000,2,T4\na,4000,1000,1,P100\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"

TRACES = Path(os.environ.get("SHOAL_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
OPENB = TRACES / "openb-fgd"


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write_list(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_list


def _node(name: str, cpus: int = 8, gpus: tuple[int, ...] = (WHOLE,), model: str = "T4") -> Node:
    return Node(name, Vacancy(1000 * cpus, 10_000, gpus, model))


def _mixed(count: int, seed: int) -> list[Footprint]:
    generator = random.Random(seed)
    kinds = [
        Footprint(2_000, 10, 1, 300),
        Footprint(1_000, 10, 1, 810),
        Footprint(4_000, 10, 1, WHOLE),
        Footprint(8_000, 10, 2, WHOLE),
        Footprint(3_000, 10, 0, 0),
        Footprint(1_000, 10, 1, 500, ("T4",)),
    ]
    return [generator.choice(kinds) for _ in range(count)]


SMALL = [
    _node("n0", 16, (WHOLE,) * 2),
    _node("n1", 16, (WHOLE,) * 2, "P100"),
    _node("n2", 32, (WHOLE,) * 4, "P100"),
]


def test_lists_are_read_by_name_and_gzip_is_unpacked(write, tmp_path) -> None:  # type: ignore[no-untyped-def]
    nodes = read_nodes(write("nodes.csv", NODES))
    assert nodes == [
        Node("a", Vacancy(4000, 1000, (WHOLE,), "P100")),
        Node("b", Vacancy(8000, 1000, (WHOLE, WHOLE), "T4")),
    ]
    packed = tmp_path / "pods.csv.gz"
    packed.write_bytes(gzip.compress((PODS + "q,1,2,0,0,\np,1,2,1,500,T4|P100|T4\n").encode()))
    assert read_pods(packed) == [
        Pod("p", Footprint(1, 2, 1, 500, ("P100", "T4"))),
        Pod("q", Footprint(1, 2, 0, 0)),
    ]


def test_a_pod_list_without_the_model_column_is_open_to_any_model(write) -> None:  # type: ignore[no-untyped-def]
    path = write("pods.csv", "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,2,8,1000\n")
    assert read_pods(path) == [Pod("p", Footprint(1, 2, 8, WHOLE))]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ("p,x,2,1,500,\n", "row 2, field cpu_milli: is not an integer: 'x'"),
        ("p,1,2,1,500,\nq,1,,1,500,\n", "row 3, field memory_mib: is empty"),
        ("p,1,2,1,1001,\n", "row 2, field gpu_milli: must be between 0 and 1000, not 1001"),
        ("p,1,2,1,0,\n", "row 2, field gpu_milli: is 0 although num_gpu is not"),
        ("p,1,2,2,500,\n", "row 2, field gpu_milli: must be 1000 where num_gpu is above 1"),
        ("p,-1,2,1,500,\n", "row 2, field cpu_milli: must be 0 or more, not -1"),
        ("p,1\n", "row 2, field num_gpu: is empty"),
        ("", "holds a header but no rows"),
        ("p,1,2,0,0,\n", "no pod asks for a GPU"),
    ],
)
def test_bad_pods_are_refused_in_one_line_that_names_row_and_field(write, rows, wrong) -> None:  # type: ignore[no-untyped-def]
    path = write("pods.csv", PODS + rows)
    with pytest.raises(BadList) as caught:
        read_pods(path)
    assert wrong in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_nodes_are_refused(write, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadList, match="lacks the field sn"):
        read_nodes(write("nodes.csv", "name,cpu_milli,memory_mib,gpu,model\n"))
    with pytest.raises(BadList, match="two nodes are named b"):
        read_nodes(write("nodes.csv", NODES + "b,1,1,1,T4\n"))
    with pytest.raises(BadList, match="cannot be read"):
        read_nodes(tmp_path / "none.csv")
    (tmp_path / "nodes.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(BadList, match="cannot be read"):
        read_nodes(tmp_path / "nodes.csv.gz")


def test_each_pod_arrives_once_before_any_arrives_again() -> None:
    pods = [Pod(f"p{number}", Footprint(number, 0, 1, WHOLE)) for number in range(10)]
    order = arrivals(pods, capacity=10 * WHOLE, arrived=1.3, seed=1)
    assert len(order) == 13
    assert sorted(order[:10]) == [pod.task for pod in pods]
    assert (
        order == arrivals(pods, 10 * WHOLE, 1.3, seed=1) != arrivals(pods, 10 * WHOLE, 1.3, seed=2)
    )


def test_a_list_that_asks_for_too_much_is_cut() -> None:
    pods = [Pod(f"p{number}", Footprint(number, 0, 1, WHOLE)) for number in range(100)]
    order = arrivals(pods, capacity=10 * WHOLE, arrived=1.3, seed=1)
    assert len(order) == len(set(order)) == 13


@pytest.mark.parametrize("ties", ["name", "random"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_places_only_what_fits_and_gives_the_same_result_again(
    policy: str, ties: str
) -> None:
    order = _mixed(60, seed=3)
    cluster = Cluster(SMALL)
    chooser = POLICIES[policy](SMALL, order)
    rooms = {index: node.room for index, node in enumerate(SMALL)}
    generator = random.Random(1)
    for task in order:
        chooser.saw(task)
        fitting = cluster.fitting(task)
        assert set(fitting) == {room for room in rooms.values() if fits(room, task)}
        if not fitting:
            continue
        index = put(cluster, chooser, fitting, task, generator, by_name=ties == "name")
        assert fits(rooms[index], task)
        rooms = {node: room for room, nodes in cluster.groups.items() for node in nodes}
        assert sorted(rooms) == [0, 1, 2]
        assert min(min(room[:2]) for room in rooms.values()) >= 0
    once, again = (replay(policy, SMALL, order, order, ties, seed=5) for _ in range(2))
    assert once == again


def test_ties_go_to_the_smallest_name_or_to_any() -> None:
    nodes = [_node(f"n{number}") for number in range(6)]
    task = Footprint(1_000, 10, 1, WHOLE)
    chosen = {True: set(), False: set()}  # type: dict[bool, set[int]]
    for by_name in (True, False):
        for seed in range(40):
            cluster = Cluster(nodes)
            chooser = POLICIES["best-fit"](nodes, [task])
            generator = random.Random(seed)
            rooms = cluster.fitting(task)
            chosen[by_name].add(put(cluster, chooser, rooms, task, generator, by_name=by_name))
    assert chosen == {True: {0}, False: set(range(6))}


def test_allocation_is_counted_by_what_has_arrived() -> None:
    nodes = [_node("n", gpus=(WHOLE, WHOLE))]
    order = [
        Footprint(1_000, 10, 1, WHOLE),
        Footprint(1_000, 10, 1, 500),
        Footprint(1_000, 10, 1, 600),
    ]
    assert replay("first-fit", nodes, order, order, "name", seed=0) == {50: 50, 75: 75, 105: 75}


def test_the_bound_is_exact_where_nothing_was_relaxed() -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    rooms = [_node("n", gpus=(WHOLE, WHOLE)).room]
    assert upper_bound(rooms, [Footprint(0, 0, 1, 810)] * 5) == pytest.approx(0.81, abs=1e-3)
    assert upper_bound(rooms, [Footprint(0, 0, 1, 600), Footprint(0, 0, 1, 400)]) == pytest.approx(
        0.5
    )
    assert upper_bound(rooms, [Footprint(8_000, 0, 1, WHOLE)] * 2) == pytest.approx(0.5)
    assert upper_bound(rooms, [Footprint(0, 0, 1, WHOLE, ("P100",))] * 2) == pytest.approx(0)


def test_no_policy_passes_the_bound() -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    for seed in range(5):
        order = _mixed(60, seed)
        bound = upper_bound([node.room for node in SMALL], order)
        assert bound is not None
        for policy in POLICIES:
            ends = replay(policy, SMALL, order, order, "random", seed)
            assert ends[max(ends)] <= 100 * bound + 1e-6


def test_a_task_is_forced_while_nothing_could_have_closed_every_node() -> None:
    rooms = [_node("a").room, _node("b").room]
    whole = Footprint(1_000, 10, 1, WHOLE)
    assert forced(rooms, [whole] * 4) == [True, True, False, False]
    assert forced(rooms, [Footprint(4_000, 10, 0, 0)] * 5)[:2] == [True, True]
    assert forced(rooms, [whole._replace(models=("P100",))]) == [False]


def test_the_last_line_is_one_flat_json_object(write, capsys) -> None:  # type: ignore[no-untyped-def]
    nodes = write("nodes.csv", NODES)
    pods = write("pods.csv", PODS + "p,1000,10,1,500,\nq,2000,10,1,1000,\n")
    asked = ["--nodes", str(nodes), "--pods", str(pods), "--seeds", "2", "--ties", "both"]
    assert placement.main([*asked, "--policies", "fgd,shoal-default"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["fgd", "fgd-random-ties", "shoal-default", "shoal-default-random-ties"]
    assert sorted(last) == names  # they come as their processes end
    assert all(0 < value <= 100 for value in last.values())


def test_a_list_that_cannot_be_read_ends_in_one_line(write, capsys) -> None:  # type: ignore[no-untyped-def]
    nodes = write("nodes.csv", NODES)
    assert placement.main(["--nodes", str(nodes), "--pods", str(nodes)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.soak
@pytest.mark.skipif(not OPENB.is_dir(), reason=f"the openb lists are not in {OPENB}")
def test_on_the_default_list_the_rules_are_the_published_ones_and_shoal_is_better() -> None:
    nodes = read_nodes(OPENB / "openb_node_list_gpu_node.csv")
    pods = read_pods(OPENB / "pods" / "openb_pod_list_default.csv.gz")
    published = placement.read_published(
        OPENB / placement.PUBLISHED, Path("openb_pod_list_default.csv.gz")
    )
    best_fit = placement.figure_of(placement.Run("best-fit", "name", 42), nodes, pods, 1.3)
    shoal = placement.figure_of(placement.Run("shoal-default", "random", 42), nodes, pods, 1.3)
    assert best_fit is not None and shoal is not None
    assert best_fit.at_end == pytest.approx(published["best-fit"][1], abs=0.5)
    assert shoal.at_end > published["fgd"][1] + 0.5


@pytest.mark.skipif(not OPENB.is_dir(), reason=f"the openb lists are not in {OPENB}")
@pytest.mark.parametrize("name", ["multigpu40", pytest.param("gpuspec25", marks=pytest.mark.soak)])
def test_when_demand_equals_capacity_shoal_allocates_more_than_published_fgd(name: str) -> None:
    """Tasks bound to GPU models, and tasks for whole nodes, must still find their places."""
    pods = f"openb_pod_list_{name}.csv.gz"
    published = placement.read_published(OPENB / placement.PUBLISHED, Path(pods))
    nodes = read_nodes(OPENB / "openb_node_list_gpu_node.csv")
    run = placement.Run("shoal-default", "name", 42)
    shoal = placement.figure_of(run, nodes, read_pods(OPENB / "pods" / pods), 1.01)
    assert shoal is not None and shoal.at_100 is not None
    assert shoal.at_100 > published["fgd"][0]
