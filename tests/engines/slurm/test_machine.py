"""What a machine of an allocation says of itself: what Slurm gave us there, and no more."""

from __future__ import annotations

import msgspec

from shoal.engines.slurm.machine import (
    END,
    gpus_of,
    join_argv,
    labels_of,
    memory_of,
    newest_end,
    place_of,
)
from shoal.engines.slurm.read import node_named
from shoal.engines.slurm.render import NOTICE_S, Settings
from shoal.machine.ends import EndNote

TOLD = Settings(
    url="https://head:7700",
    token="shoal_id_secret.f",
    cluster="1a2b3c4d",
    order="o12",
    supply="big",
    nodes=("big-1", "big-2"),
    python="/venv/bin/python",
    folder="/tmp",
    checkpoints="/home/ann/.shoal/checkpoints",
    labels={"pool": "big"},
    taints=("training",),
)
# Of srun on Slurm 22.05, on the second node.
ENVIRON = {
    "SLURMD_NODENAME": "gpu07",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_MEM_PER_NODE": "1000",
    "SLURM_JOB_GPUS": "2,5",
    "SLURM_STEP_GPUS": "2,5",
    "CUDA_VISIBLE_DEVICES": "2,5",
    "SLURM_TOPOLOGY_ADDR": "core.leaf-3.gpu07",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    END: "1794827504",
}
NOW_S = 1794827000.5
NODES = """\
NodeName=gpu06 Arch=x86_64 CPUTot=64 ActiveFeatures=ib RealMemory=1 State=MIXED OS=Linux 6.1 #1 SMP
NodeName=gpu07 Arch=x86_64 CPUTot=64 AvailableFeatures=ib,h100,x ActiveFeatures=ib,h100,-odd- \
Gres=gpu:h100:8 OS=Linux 6.1 #1 SMP  RealMemory=512000 State=MIXED Comment=a b=c
"""
NODE = node_named(NODES, "gpu07")


def test_a_machine_joins_with_what_the_allocation_has_there() -> None:
    argv = join_argv(TOLD, ENVIRON, NODE, "/tmp/shoal-x", NOW_S)
    command = "/venv/bin/python -m shoal.main join https://head:7700 --foreground"
    assert " ".join(argv[:6]) == command
    rest = argv[6:]
    said = [(rest[at], rest[at + 1]) for at in range(0, len(rest), 2)]
    assert said == [
        ("--home", "/tmp/shoal-x"),
        ("--name", "big-2"),
        ("--origin", "big"),
        ("--order", "o12"),
        ("--gpus", "2"),
        ("--cpus", "4"),
        ("--memory", "1000M"),
        ("--place", "core/leaf-3"),
        ("--label", "slurm.node=gpu07"),
        ("--label", "slurm.job=4711"),
        ("--label", "slurm.partition=main"),
        ("--label", "pool=big"),
        ("--label", "slurm.feature/ib=yes"),
        ("--label", "slurm.feature/h100=yes"),
        ("--taint", "training"),
        ("--ends-at", "1794827504"),
    ]


def test_the_token_is_not_on_a_command_line() -> None:
    assert not any("secret" in word for word in join_argv(TOLD, ENVIRON, NODE, "/tmp/x", NOW_S))


def test_an_allocation_without_a_limit_has_no_end() -> None:
    for end in ("NONE", "", str(int(NOW_S) + 365 * 86_400)):
        assert "--ends-at" not in join_argv(TOLD, ENVIRON | {END: end}, NODE, "/tmp/x", NOW_S)


def test_the_memory_is_the_allocations_and_a_whole_machines_what_slurm_says() -> None:
    assert memory_of(ENVIRON, NODE) == 1000
    assert memory_of({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "8"}, NODE) == 800
    assert memory_of({}, NODE) == 512_000
    assert memory_of({"SLURM_MEM_PER_NODE": "0"}, {}) == 0


def test_gpus_are_those_that_slurm_gave() -> None:
    assert gpus_of(ENVIRON) == ["2", "5"]
    assert gpus_of({}) == [] and gpus_of({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == []


def test_a_flat_network_has_no_places() -> None:
    flat = {"SLURM_TOPOLOGY_ADDR": "gpu07", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert place_of(flat) == "" and place_of({}) == ""


def test_a_supplys_own_label_wins_over_slurms() -> None:
    told = msgspec.structs.replace(TOLD, labels={"slurm.partition": "ours"})
    assert labels_of(told, ENVIRON, NODE)["slurm.partition"] == "ours"


def test_the_earliest_end_that_is_known_counts() -> None:
    planned = '{"at": 5000, "why": "time limit of Slurm job 7"}'
    assert newest_end("", "") is None
    assert newest_end("{half", "") is None
    assert newest_end(planned, "") == EndNote(5000, "time limit of Slurm job 7")
    noticed = newest_end(planned, "1000\n")
    assert noticed is not None and noticed.at == 1000 + NOTICE_S and "notice" in noticed.why
    assert newest_end(planned, "9000\n") == newest_end(planned, "")
