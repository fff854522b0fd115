"""What sbatch is asked, to the letter, as the golden files have it. After a change that is meant,
write them again with `SHOAL_WRITE_GOLDEN=1` and read the difference."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.engines.slurm.render import (
    Place,
    comment,
    drain,
    environment,
    order_of,
    sbatch,
    script,
    settings,
)
from shoal.model.supply import Provision, Supply
from shoal.ports import SupplyError

GOLDEN = Path(__file__).parent / "golden"
PLACE = Place(
    cluster="1a2b3c4d",
    folder="/home/ann/.shoal/slurm",
    url="https://head:7700",
    python="/home/ann/venv/bin/python",
    path="/opt/slurm/bin:/usr/bin:/bin",
)
ORDERS = {
    "by_gpus": Provision(
        order="o7",
        supply=Supply(
            name="h100",
            engine="slurm",
            gpus=2,
            cpu_milli=15_500,
            memory_mb=128_000,
            lasts_ms=4 * 3_600_000,
            options={"partition": "gpu", "account": "physics", "qos": "normal"},
        ),
        nodes=("h100-1",),
        why="j12 waits for 2 GPUs",
    ),
    "whole_nodes": Provision(
        order="o12",
        supply=Supply(
            name="big",
            engine="slurm",
            gpus=8,
            gpu_model="H100",
            gpu_memory_mb=81_559,
            cpu_milli=128_000,
            memory_mb=2_000_000,
            lot=4,
            most=8,
            labels={"pool": "big"},
            taints=("training",),
            options={
                "whole": "yes",
                "gres": "gpu:h100:8",
                "constraint": "ib&(rack1|rack2)",
                "exclude": "gpu[07,11]",
                "python": "/opt/shoal py/bin/python",
                "folder": "/local/scratch",
            },
        ),
        nodes=("big-1", "big-2", "big-3", "big-4"),
        why="2 jobs wait: 'quotes', \"more\", $(touch /tmp/x)\nand a line",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_rendered_as_its_golden_file_has_it(name: str) -> None:
    command = ORDERS[name]
    parts = [
        "\n".join(sbatch(command, PLACE)),
        script(command, PLACE),
        settings(command, PLACE, "shoal_id_secret.fingerprint").decode(),
    ]
    text = "\n----\n".join(parts)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SHOAL_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ORDERS)
def test_a_shell_can_read_the_script(name: str) -> None:
    done = subprocess.run(["sh", "-n"], input=script(ORDERS[name], PLACE), text=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", ORDERS)
def test_the_token_is_in_no_argument_and_in_no_script(name: str) -> None:
    secret = "shoal_id_secret"
    command = ORDERS[name]
    assert secret.encode() in settings(command, PLACE, secret)
    assert secret not in script(command, PLACE) + "".join(sbatch(command, PLACE))


def test_a_comment_is_one_line_of_plain_characters() -> None:
    text = comment(ORDERS["whole_nodes"], PLACE)
    assert text.isascii() and text.isprintable() and not set("'\"\\") & set(text)
    assert "cluster 1a2b3c4d at https://head:7700, order o12 of supply big" in text


def test_only_names_of_this_clusters_orders_are_ours() -> None:
    assert order_of("1a2b3c4d", "shoal-1a2b3c4d-o12") == "o12"
    strangers = ["shoal-1a2b3c4e-o12", "shoal-1a2b3c4d-o", "shoal-1a2b3c4d-o12x", "o12", "train"]
    assert [order_of("1a2b3c4d", name) for name in strangers] == [""] * len(strangers)


def test_nothing_of_a_users_or_a_jobs_slurm_variables_reaches_an_order() -> None:
    ours = {"PATH": "/bin", "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "7", "SECRET": "s"}
    assert environment(ours) == {"PATH": "/bin", "LANG": "C.UTF-8"}
    assert environment({"SLURM_CONF": "/etc/s.conf"})["SLURM_CONF"] == "/etc/s.conf"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue": "gpu"}, "queue"),
        ({"partition": "gpu --uid=0"}, "partition"),
        ({"constraint": "a b"}, "constraint"),
        ({"whole": "maybe"}, "whole"),
        ({"python": "python3"}, "python"),
    ],
)
def test_an_option_that_sbatch_would_not_understand_is_refused_by_name(
    options: dict[str, str], named: str
) -> None:
    supply = Supply(name="s", engine="slurm", options=options)
    with pytest.raises(SupplyError, match=f"^{named}: "):
        sbatch(Provision(order="o1", supply=supply, nodes=("s-1",)), PLACE)


def test_a_reason_to_drain_a_machine_is_one_argument() -> None:
    argv = drain("n3", "GPU 2 failed\nState=RESUME")
    assert argv[:4] == ["scontrol", "update", "NodeName=n3", "State=DRAIN"]
    assert argv[4] == "Reason=Shoal: GPU 2 failed State=RESUME"
