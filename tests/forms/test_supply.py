"""Supplies in a policy file: friendly words, errors that name the field, written back as read."""

from __future__ import annotations

import msgspec
import pytest

from shoal.forms import policy as policies
from shoal.forms.failure import BadField
from shoal.forms.supply import from_words, price_text, supplies
from shoal.model.policy import Policy
from shoal.model.supply import Supply

FILE = """
base: fair
supply:
  - {engine: slurm, partition: gpu, gpus: 8, memory: 64G, cpus: 32, most: 16, lot: 2,
     idle: 10m, time: 1d, price: 2.50, ceiling: 40, whole: true, labels: {pool: a100}}
  - {name: spot, engine: kubernetes, namespace: lab, image: "lab/shoal:1", gpus: 1,
     gpu-resource: amd.com/gpu, most: 4, tolerations: [spot, big],
     pod: {metadata: {labels: {team: vision}}}}
"""


def one(text: str) -> Supply:
    (found,) = policies.parse(f"supply: [{text}]", ".yaml").supply
    return found


def test_a_file_names_amounts_as_people_do() -> None:
    slurm, spot = policies.parse(FILE, ".yaml").supply
    assert slurm == Supply(
        name="slurm",
        engine="slurm",
        gpus=8,
        memory_mb=65_536,
        cpu_milli=32_000,
        most=16,
        lot=2,
        idle_ms=600_000,
        lasts_ms=86_400_000,
        price=2_500_000,
        ceiling=40_000_000,
        labels={"pool": "a100"},
        options={"partition": "gpu", "whole": "yes"},
    )
    assert (spot.name, spot.most) == ("spot", 4)
    assert spot.options == {
        "namespace": "lab",
        "image": "lab/shoal:1",
        "gpu_resource": "amd.com/gpu",
        "tolerations": "spot,big",
        "pod": '{"metadata": {"labels": {"team": "vision"}}}',
    }


def test_what_is_shown_can_be_read_again() -> None:
    read = policies.parse(FILE, ".yaml")
    assert policies.parse(policies.to_text(read), ".yaml").supply == read.supply
    shown = msgspec.json.encode(read).decode()
    assert msgspec.json.decode(shown, type=Policy).supply == read.supply
    again = policies.parse(shown, ".json")
    assert again.supply == read.supply


def test_differences_between_two_policies_name_the_supply() -> None:
    before, after = (Policy(supply=(one(f"{{engine: slurm, most: {n}}}"),)) for n in (2, 3))
    ((field, old, new),) = policies.differences(before, after)
    assert (field, old, new) == (
        "supply.slurm",
        "{engine: slurm, most: 2}",
        "{engine: slurm, most: 3}",
    )


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("{partition: gpu}", "supply.engine", "must be one of ec2, kubernetes, ray, slurm"),
        ("{engine: [pbs]}", "supply.engine", "must be one of"),
        ("{engine: slurm, parttion: gpu}", "supply.slurm", "did you mean 'partition'?"),
        ("{engine: slurm, zone: b}", "supply.slurm", "slurm also has partition"),
        ("{engine: slurm, idle: 10}", "supply.slurm.idle", "10 of what"),
        ("{engine: slurm, memory: lots}", "supply.slurm.memory", "not an amount of memory"),
        ("{engine: slurm, price: cheap}", "supply.slurm.price", "price per hour"),
        ("{engine: slurm, gpus: 300}", "supply.slurm.gpus", "from 0 to 256"),
        ("{engine: slurm, most: 2, lot: 0}", "supply.slurm.lot", "from 1"),
        ("{name: 'a b', engine: slurm}", "supply.a b.name", ""),
        ("{engine: slurm}, {engine: slurm}", "supply", "two are named 'slurm'"),
        ("{engine: slurm, labels: pool=a}", "supply.slurm.labels", "must be a table, e.g. {pool"),
        ("7", "supply", "must be tables"),
    ],
)
def test_an_error_names_the_field(text: str, field: str, message: str) -> None:
    with pytest.raises(BadField) as caught:
        policies.parse(f"supply: [{text}]", ".yaml")
    assert caught.value.field == field
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{engine: slurm, least: 3, most: 2}", "least (3) is more than most (2)"),
        ("{engine: slurm, most: 3, lot: 2}", "multiples of lot (2)"),
        ("{engine: slurm, least: 2, most: 2, price: 3, ceiling: 5}", "more per hour than"),
    ],
)
def test_a_supply_that_contradicts_itself_is_refused(text: str, message: str) -> None:
    found = policies.parse(f"supply: [{text}]", ".yaml")
    with pytest.raises(BadField) as caught:
        policies.check(found, load=False)
    assert message in str(caught.value)


def test_a_command_line_uses_the_same_words() -> None:
    (row,) = supplies([from_words("engine=slurm,partition=gpu,gpus=8,most=16,idle=5m")])
    found = msgspec.convert(row, Supply)
    assert (found.gpus, found.most, found.idle_ms) == (8, 16, 300_000)
    assert found.options == {"partition": "gpu"}


def test_prices_are_shown_as_money() -> None:
    assert [price_text(n) for n in (0, 2_500_000, 125_000)] == ["0.00", "2.50", "0.125"]


def test_an_engine_that_only_the_head_has_is_left_to_it() -> None:
    found = policies.parse("supply: [{engine: pbs, queue: gpu, gpus: 8, most: 2}]", ".yaml")
    assert (found.supply[0].gpus, found.supply[0].options) == (8, {"queue": "gpu"})
    policies.check(found, load=False)
    with pytest.raises(
        BadField, match=r"no supplier 'pbs'; there are ec2, kubernetes, ray, slurm$"
    ):
        policies.check(found, load=True)


def test_words_that_reach_the_head_unread_are_looked_at_there() -> None:
    found = Policy(supply=(Supply(name="a", engine="slurm", options={"queue": "gpu"}),))
    with pytest.raises(BadField, match="slurm has no such word; it has partition") as caught:
        policies.check(found, load=True)
    assert caught.value.field == "supply.a.queue"
