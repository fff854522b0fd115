"""A node's tree: as sysfs shows it, and what is chosen from it, against all choices there are."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from shoal.agent.nearby import Nearby
from shoal.agent.tree import Found, bus_address, read, tree_of
from shoal.core.books.grouping import Groups, closest, groups_of, split
from shoal.machine.cgroups import Ceiling, Cgroups
from shoal.model.commands import Launch, Limits
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.tree import (
    Card,
    Numa,
    Tree,
    TreeGpu,
    beside,
    cards_of,
    list_text,
    numbers_in,
    tree_lines,
)
from tests.agent.machines import NAMES, machine
from tests.agent.rig import rig_of
from tests.needs import need_cgroups

# GPUs that are taken already, and what a job asks for: members on the node, and GPUs of each.
TAKEN = ((), (0,), (0, 1), (2, 5), (0, 3, 6), (1, 2, 4, 7))
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))


def spec(tree: Tree) -> NodeSpec:
    return NodeSpec(id="n1", cpu_milli=64_000, memory_mb=1, gpus=len(tree.gpus), tree=tree)


def spans(groups: Groups, some: tuple[int, ...]) -> list[int]:
    """NVLink groups, sockets, outer and inner switches that these GPUs are spread over."""
    return [len({groups[gpu][level] for gpu in some}) for level in range(4)]


def left_behind(groups: Groups, free: tuple[int, ...], some: tuple[int, ...]) -> list[int]:
    """Of each kind of group that is opened: how many free GPUs stay in it."""
    found = []
    for level in range(4):
        opened = {groups[gpu][level] for gpu in some}
        rest = [gpu for gpu in free if gpu not in some]
        found.append(len([gpu for gpu in rest if groups[gpu][level] in opened]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_is_the_best_of_all_choices(name: str, tmp_path: Path) -> None:
    """Thirty shapes of jobs on each machine, or as many as fit into what is free."""
    groups = groups_of(spec(machine(name, tmp_path)))
    assert groups is not None
    tried = 0
    for taken in TAKEN:
        free = tuple(gpu for gpu in range(len(groups)) if gpu not in taken)
        for members, each in SHAPES:
            if members * each > len(free):
                continue
            parts = split(groups, free, each, members)
            given = tuple(sorted(gpu for part in parts for gpu in part))
            assert len(set(given)) == members * each
            assert set(given) <= set(free)
            best = min(
                [*spans(groups, some), *left_behind(groups, free, some)]
                for some in combinations(free, members * each)
            )
            chosen = [*spans(groups, given), *left_behind(groups, free, given)]
            assert chosen == best, (taken, members, each, given)
            tried += 1
    assert tried == (30 if len(groups) == 8 else 23)


def test_sixteen_gpus_at_switches_of_their_own_are_chosen_fast_and_on_one_socket() -> None:
    """More ways than are tried: those that stand together are."""
    gpus = tuple(TreeGpu(numa=number % 2, switches=(number,), nvlink=0) for number in range(16))
    groups = groups_of(spec(Tree(gpus)))
    assert groups is not None
    free = tuple(range(16))
    assert spans(groups, closest(groups, free, 8))[1] == 1
    assert spans(groups, closest(groups, free[3:], 4))[1] == 1


def test_random_trees_are_chosen_from_like_all_choices() -> None:
    rng = random.Random("trees")
    for _ in range(40):
        size = rng.randint(3, 7)
        gpus = tuple(
            TreeGpu(
                numa=rng.randint(-1, 1),
                switches=tuple(rng.randint(0, 2) for _ in range(rng.randint(0, 2))),
                nvlink=rng.randint(-1, 2),
            )
            for _ in range(size)
        )
        groups = groups_of(spec(Tree(gpus)))
        if groups is None:
            continue
        free = tuple(sorted(rng.sample(range(size), rng.randint(2, size))))
        count = rng.randint(1, len(free))
        given = closest(groups, free, count)
        ways = combinations(free, count)
        best = min([*spans(groups, some), *left_behind(groups, free, some)] for some in ways)
        assert [*spans(groups, given), *left_behind(groups, free, given)] == best


def test_a_tree_that_makes_no_difference_is_not_looked_at() -> None:
    alike = Tree(tuple(TreeGpu(numa=0, nvlink=0) for _ in range(8)))
    assert groups_of(spec(alike)) is None
    assert groups_of(NodeSpec(id="n1", cpu_milli=1, memory_mb=1, gpus=8)) is None
    lies = msgspec.structs.replace(spec(alike), gpus=9)
    assert groups_of(lies) is None


def test_dgx_h100_cards_and_cpus_are_those_next_to_the_gpus(tmp_path: Path) -> None:
    tree = machine("dgx-h100", tmp_path)
    assert len({gpu.nvlink for gpu in tree.gpus}) == 1
    assert [card.name for card in cards_of(tree, (0,))] == ["mlx5_0"]
    assert [card.name for card in cards_of(tree, (1, 5))] == ["mlx5_3", "mlx5_9"]
    near = beside(tree, (4, 7), 16_000)
    assert near is not None
    assert (near.cpus, near.mems, near.count) == ("56-111,168-223", "1", 112)
    assert beside(tree, (3, 4), 1_000) is None  # on two sockets
    assert beside(tree, (4,), 113_000) is None  # it would get fewer CPUs than it asked for


def test_a_socket_of_several_parts_is_taken_as_a_whole_if_one_part_is_too_small(
    tmp_path: Path,
) -> None:
    tree = machine("hgx-a100", tmp_path)
    small, large = beside(tree, (0,), 40_000), beside(tree, (0,), 41_000)
    assert small is not None
    assert large is not None
    assert (small.mems, large.mems, large.cpus) == ("0", "0-1", "0-39,80-119")
    assert beside(tree, (0, 2), 1_000) == large
    assert beside(tree, (2, 4), 1_000) is None
    assert [card.name for card in cards_of(tree, (2, 3))] == ["mlx5_2"]
    assert cards_of(tree, (3, 4)) == []  # GPU 4 has none, so none are named


def test_a_card_that_is_down_or_not_for_rdma_is_not_named() -> None:
    card = Card("mlx5_0", True, "InfiniBand", 400, True, 0)
    tree = Tree((TreeGpu(numa=0),), (card,), (Numa(0, "0-3"),))
    assert cards_of(tree, (0,)) == [card]
    for other in (
        msgspec.structs.replace(card, up=False),
        msgspec.structs.replace(card, verbs=False),
        msgspec.structs.replace(card, numa=1),
    ):
        assert cards_of(msgspec.structs.replace(tree, cards=(other,)), (0,)) == []
    slow = Card("mlx5_1", True, "Ethernet", 25, True, 0)
    assert cards_of(msgspec.structs.replace(tree, cards=(slow, card)), (0,)) == [card]


def test_the_drawing_names_every_gpu_and_card_once_at_its_place(tmp_path: Path) -> None:
    tree = machine("hgx-a100", tmp_path)
    lines = tree_lines(tree, used=(2,))
    assert lines[:5] == [
        "NUMA 0, socket 0: CPUs 0-19,80-99, 256G",
        "  switch 0",
        "    GPU 0 GPU, 80G, NVLink group 0",
        "    GPU 1 GPU, 80G, NVLink group 0",
        "    mlx5_0 InfiniBand 400 Gbit/s",
    ]
    assert [line for line in lines if "in use" in line] == [
        "    GPU 2 GPU, 80G, NVLink group 0, in use"
    ]
    words = " ".join(lines).split()
    assert words.count("mlx5_1") == words.count("mlx5_2") == 1
    strange = Tree((TreeGpu(model="a", numa=7), TreeGpu(model="b", memory_mb=1024)))
    assert tree_lines(strange) == ["place not known", "  GPU 0 a", "  GPU 1 b, 1G"]


@pytest.mark.parametrize(("nodes", "numa"), [(1, 0), (2, -1)])
def test_a_gpu_that_names_no_numa_node_is_at_the_only_one(
    nodes: int, numa: int, tmp_path: Path
) -> None:
    """As in a virtual machine: seen with an H200."""
    for number in range(nodes):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{8 * number}-{8 * number + 7}")
    device = tmp_path / "devices/pci0000:00/0000:00:05.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("-1")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:00:05.0").symlink_to(device)
    tree = read([Found("0000:00:05.0", "NVIDIA H200")], tmp_path)
    assert [gpu.numa for gpu in tree.gpus] == [numa]
    assert any("place not known" in line for line in tree_lines(tree)) is (numa < 0)


def test_lists_of_the_kernel() -> None:
    assert numbers_in("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert numbers_in("") == numbers_in("x-3") == []
    assert len(numbers_in("0-99999999")) < 10_000
    assert list_text([3, 1, 2, 8]) == "1-3,8"
    assert bus_address("00000000:1B:00.0") == "0000:1b:00.0"


def test_a_file_that_is_wrong_leaves_the_node_without_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tree.json"
    monkeypatch.setenv("SHOAL_TREE", str(file))
    node = NodeSpec(id="n1", cpu_milli=1, memory_mb=1, gpus=2)
    for text in (
        "",
        "[]",
        '{"gpus": [{}]}',
        '{"gpus": [{}, {"numa": 99999}]}',
        '{"gpus": [{}, {}], "cards": [{"name": "a b; rm"}]}',
        '{"gpus": [{}, {}], "numas": [{"number": 0, "cpus": "0-3\\n1"}]}',
    ):
        file.write_text(text)
        assert tree_of(node, (0, 1), real=False) is msgspec.UNSET
    file.write_text('{"gpus": [{"numa": 1}, {}]}')
    tree = tree_of(node, (0, 1), real=False)
    assert isinstance(tree, Tree)
    assert tree.gpus[0].numa == 1


SHOWS = """
import os
mine = [line.split() for line in open("/proc/self/status") if "allowed_list" in line]
print(dict(mine), os.environ.get("NCCL_IB_HCA"), os.environ.get("UCX_NET_DEVICES"), flush=True)
"""


def test_a_member_runs_next_to_its_gpus_and_knows_their_cards(tmp_path: Path) -> None:
    """Two sockets of one CPU each, as a file says. The second has no memory that exists here, so
    the kernel refuses it, and the member runs on all CPUs."""
    need_cpuset()
    cards = [
        {"name": f"mlx5_{one}", "verbs": True, "link": "InfiniBand", "up": True, "numa": one}
        for one in (0, 1)
    ]
    numas = [
        {"number": 0, "cpus": "0", "socket": 0},
        {"number": 4000, "cpus": "1", "socket": 1},
    ]
    gpus = [{"numa": 0}, {"numa": 0}, {"numa": 4000}]
    file = tmp_path / "tree.json"
    file.write_bytes(msgspec.json.encode({"gpus": gpus, "cards": cards, "numas": numas}))
    everywhere = list_text(os.sched_getaffinity(0))
    with rig_of(0, {"SHOAL_TREE": str(file)}, gpus=3) as made:
        assert made.report is not None
        assert isinstance(made.report.spec.tree, Tree)

        def shown(number: int, *, gpus: tuple[int, ...], cpu_milli: int = 0, **env: str) -> str:
            ref = MemberRef(f"j{number}", 1, 0)
            argv = (sys.executable, "-c", SHOWS)
            made.launch(
                ref, *argv, env={"SHOAL_MEMBERS": "2", **env}, gpus=gpus, cpu_milli=cpu_milli
            )
            made.exit(ref)
            return made.text(ref)

        near = shown(1, gpus=(0,), cpu_milli=1_000)
        assert "'Cpus_allowed_list:': '0'" in near
        assert near.endswith("=mlx5_0 mlx5_0:1\n")
        own = shown(2, gpus=(1,), NCCL_IB_HCA="mine", SHOAL_MEMBERS="2")
        assert own.endswith("mine mlx5_0:1\n")
        asks_more = shown(3, gpus=(0,), cpu_milli=2_000)
        assert f"'Cpus_allowed_list:': '{everywhere}'" in asks_more
        far = shown(4, gpus=(2,))
        assert f"'Cpus_allowed_list:': '{everywhere}'" in far
        assert far.endswith("None None\n")
        none = shown(5, gpus=(), cpu_milli=1_000)
        assert f"'Cpus_allowed_list:': '{everywhere}'" in none


def test_members_get_the_cards_beside_their_gang_and_never_fewer_cpus_than_they_asked_for(
    tmp_path: Path,
) -> None:
    near = Nearby(machine("hgx-a100", tmp_path))
    launch = Launch(
        node="n1",
        incarnation=1,
        ref=MemberRef("j1", 1, 0),
        argv=("x",),
        env={},
        workdir="",
        stop_grace_ms=0,
        gpus=(0,),
        cpu_milli=30_000,
    )
    gang = msgspec.structs.replace(launch, env={"SHOAL_MEMBERS": "8"})
    assert near.cards(gang) == {"NCCL_IB_HCA": "=mlx5_0", "UCX_NET_DEVICES": "mlx5_0:1"}
    whole = msgspec.structs.replace(launch, env={"SHOAL_MEMBERS": "8", "SHOAL_JOB_GPUS": "0,2"})
    assert near.cards(whole)["NCCL_IB_HCA"] == "=mlx5_0,mlx5_2"
    assert near.cards(msgspec.structs.replace(gang, limits=Limits(rdma=False))) == {}
    assert near.cards(launch) == {}
    first = near.bound(launch, Ceiling(cpu_milli=30_000), [])
    assert first.cpus == "0-19,80-99"
    assert near.bound(launch, Ceiling(cpu_milli=30_000), [first]).cpus == ""
    other = msgspec.structs.replace(launch, gpus=(2,))
    assert near.bound(other, Ceiling(cpu_milli=30_000), [first]).mems == "1"
    assert near.bound(other, Ceiling(cpu_milli=30_000), [Ceiling(cpu_milli=30_000)]).mems == "1"


def need_cpuset() -> None:
    need_cgroups()
    with tempfile.TemporaryDirectory() as folder:
        groups = Cgroups.open(Path(folder), 0, binds=True)
        made = groups.make("probe", Ceiling(cpus="0", mems="0"))
        bound = made is not None and any(
            Path(one, "cpuset.cpus").exists()
            and Path(one, "cpuset.cpus").read_text().strip() == "0"
            for one in made.folders
        )
        groups.close()
    if not bound or not os.sched_getaffinity(0) >= {0, 1}:
        pytest.skip("needs a cpuset cgroup that this user may write, and two CPUs")
