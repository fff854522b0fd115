"""What a Ray is asked for, to the letter; and what is refused before it is asked.

After a change on purpose: SHOAL_GOLDEN=write python -m pytest tests/engines/ray/test_render.py
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from shoal.engines.ray.render import ask, where, whole_of
from shoal.model.supply import Provision, Supply
from shoal.ports import SupplyContext, SupplyError

GOLDEN = Path(__file__).parent / "golden"
CONTEXT = SupplyContext(
    cluster="abcdef12",
    home=Path("/home/ada/.shoal"),
    join_url="https://head:7700",
    join_token="shoal_id_secret.AA:BB",
    python="/usr/bin/python3",
)
SUPPLIES = {
    "gpus": Supply(
        name="Gpu_Pool",
        engine="ray",
        gpus=8,
        gpu_model="H100",
        gpu_memory_mb=81_920,
        cpu_milli=64_500,
        memory_mb=500_000,
        labels={"pool": "h100"},
        taints=("research",),
        options={
            "address": "10.0.0.1:6379",
            "python": "/opt/shoal/bin/python",
            "folder": "/scratch/shoal/",
        },
    ),
    "whole": Supply(name="all", engine="ray", options={"address": "head:6379"}),
}


@pytest.mark.parametrize("name", SUPPLIES)
def test_an_order_is_asked_for_as_its_golden_file_says(name: str) -> None:
    asked = ask(CONTEXT, Provision(order="o7", supply=SUPPLIES[name], nodes=("gpu-1",)))
    text = msgspec.json.format(msgspec.json.encode(asked), indent=2).decode() + "\n"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        (GOLDEN / f"{name}.json").write_text(text)
    assert text == (GOLDEN / f"{name}.json").read_text()


def test_a_whole_node_is_asked_for_with_all_that_it_has() -> None:
    asked = ask(CONTEXT, Provision(order="o7", supply=SUPPLIES["whole"], nodes=("n",)))
    found = whole_of(asked, {"CPU": 16.0, "GPU": 2.0, "memory": 1e9})
    assert (found.cpus, found.gpus, found.whole) == (16, 2, False)
    assert found.plan.arguments[-4:] == ("--gpus", "2", "--cpus", "16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {}}, "supply pool: address is missing: write HOST:PORT"),
        ({"options": {"address": "ray://h:1"}}, "address 'ray://h:1' is not HOST:PORT"),
        ({"options": {"adress": "h:1"}}, "Ray has no option 'adress'; there are address, "),
        ({"options": {"address": "h:1", "whole": "8"}}, "whole must be yes or no"),
        ({"options": {"address": "h:1"}, "lot": 2}, "lot must be 1, because Ray brings single"),
    ],
)
def test_a_supply_that_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    supply = msgspec.structs.replace(Supply(name="pool", engine="ray"), **changes)
    with pytest.raises(SupplyError) as refused:
        where(supply)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
