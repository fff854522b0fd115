"""The supplier against Moto: what it orders, finds again and ends, and what it says when EC2
refuses, is busy, or when a controller dies between an order and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shoal.engines.ec2 import options
from shoal.engines.ec2.options import SUPPLIER
from shoal.model.supply import OrderPhase, OrderStatus, Provision, Release, Supply
from shoal.ports import Supplier, SupplyContext, SupplyError

if TYPE_CHECKING:
    from tests.engines.ec2.cloud import Cloud

CLUSTER, IMAGE = "1a2b3c4d", "ami-12c6146b"
A, B = "us-east-1a", "us-east-1b"
TOKEN = "shoal_ord000000000001_" + "s" * 43 + ".f00d"


def supply(**fields: Any) -> Supply:
    words = {"region": "us-east-1", "image": IMAGE, "types": "g4dn.xlarge,g5.xlarge"}
    words |= {
        word: fields.pop(word) for word in list(fields) if word not in Supply.__struct_fields__
    }
    said = {word: text for word, text in words.items() if text}
    return Supply(**{"name": "gpu", "engine": "ec2", "gpus": 1, "most": 9, **fields}, options=said)


class Bed:
    """A supplier, as a controller has it."""

    def __init__(self, one: Supply, cluster: str = CLUSTER) -> None:
        self.supply = one
        self.tokens: list[str] = []
        self.supplier: Supplier = SUPPLIER.build(
            SupplyContext(
                cluster=cluster,
                home=Path("/nowhere"),
                join_url="https://head:7700",
                join_token="shoal_0_thestandingtoken.f00d",
                python="python3",
                supplies=lambda: (self.supply,),
                order_token=self._token,
            )
        )

    async def _token(self, order: str) -> str:
        self.tokens.append(order)
        return TOKEN

    async def provision(self, order: str = "o1", why: str = "a job waits") -> None:
        nodes = tuple(f"gpu-{number}" for number in range(1, self.supply.lot + 1))
        await self.supplier.provision(
            Provision(order=order, supply=self.supply, nodes=nodes, why=why)
        )

    async def release(self, order: str = "o1") -> None:
        await self.supplier.release(Release(order=order, engine="ec2"))

    async def orders(self) -> dict[str, OrderStatus]:
        return {one.order: one for one in (await self.supplier.look()).orders}


def play(one: Supply, scene: Callable[[Bed], Awaitable[None]], cluster: str = CLUSTER) -> None:
    async def run() -> None:
        await scene(Bed(one, cluster))

    asyncio.run(run())


def refused(ec2: Cloud, one: Supply) -> str:
    async def scene(bed: Bed) -> None:
        with pytest.raises(SupplyError) as caught:
            await bed.provision("o7")
        said.append(str(caught.value))

    said: list[str] = []
    play(one, scene)
    return said[0]


def test_an_order_becomes_instances_and_is_seen_and_ended(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        assert await bed.orders() == {}
        await bed.provision()
        await bed.provision()  # said again: it changes nothing
        one = (await bed.orders())["o1"]
        assert one.phase in (OrderPhase.PENDING, OrderPhase.RUNNING)
        assert one.reason == f"g4dn.xlarge in {A}"
        assert one.handle in {each["InstanceId"] for each in ec2.instances()}
        await bed.release()
        await bed.release()
        ended = (await bed.orders())["o1"]
        assert (
            ended.phase is OrderPhase.ENDED and ended.reason == "somebody terminated the instance"
        )

    play(supply(lot=2, disk="30"), scene)
    assert ec2.instances() == []
    assert len(ec2.instances("terminated")) == 2
    assert ec2.client().describe_volumes()["Volumes"] == []
    assert len(ec2.of("RunInstances")) == 1


def test_the_request_is_what_the_supply_says(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision(why="j1 ${evil} `id` would fit there")

    play(supply(market="spot", price=1_500_000, zones=A, tags="team=vision", disk="50"), scene)
    (asked,) = ec2.of("RunInstances")
    assert asked["InstanceMarketOptions.SpotOptions.MaxPrice"] == "1.5"
    assert asked["MetadataOptions.HttpTokens"] == "required"
    assert asked["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert asked["BlockDeviceMapping.1.Ebs.VolumeSize"] == "50"
    (one,) = ec2.instances()
    tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
    assert tags == {
        "Name": "shoal-1a2b3c4d-o1",
        "shoal-cluster": CLUSTER,
        "shoal-order": "o1",
        "shoal-supply": "gpu",
        "team": "vision",
    }
    assert not any("evil" in value for value in asked.values())
    assert "thestandingtoken" not in ec2.user_data(one["InstanceId"])


def test_another_type_and_zone_are_asked_where_there_is_no_room(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        assert (await bed.orders())["o1"].reason == f"g5.xlarge in {B}"
        await bed.provision("o2")  # what had no room a moment ago is not asked again

    ec2.full = {("g4dn.xlarge", ""), ("g5.xlarge", A)}
    play(supply(zones=f"{A},{B}"), scene)
    asked = [
        (one["InstanceType"], one["Placement.AvailabilityZone"]) for one in ec2.of("RunInstances")
    ]
    first = [("g4dn.xlarge", A), ("g4dn.xlarge", B), ("g5.xlarge", A), ("g5.xlarge", B)]
    assert asked == [*first, ("g5.xlarge", B)]


def test_without_room_anywhere_the_refusal_names_what_was_tried(ec2: Cloud) -> None:
    ec2.full = {("g4dn.xlarge", ""), ("g5.xlarge", "")}
    said = refused(ec2, supply(zones=A))
    assert said == (
        f"supply.gpu.types: g4dn.xlarge in {A}: InsufficientInstanceCapacity; "
        f"g5.xlarge in {A}: InsufficientInstanceCapacity"
    )


def test_the_cheapest_spot_instance_comes_first_and_none_above_the_price(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        assert (await bed.orders())["o1"].reason == f"g5.xlarge in {B}"

    ec2.prices = {("g4dn.xlarge", A): "0.9", ("g4dn.xlarge", B): "0.5", ("g5.xlarge", B): "0.4"}
    one = supply(market="spot", zones=f"{A},{B}", price=800_000)
    play(one, scene)
    ec2.prices = dict.fromkeys(ec2.prices, "2.5")
    one = supply(market="spot", zones=B, price=800_000)
    assert refused(ec2, one) == "supply.gpu.price: no spot instance costs 0.80 an hour or less now"


def test_a_controller_that_dies_before_the_answer_leaves_one_order(ec2: Cloud) -> None:
    async def before(bed: Bed) -> None:
        await bed.provision()  # no answer came
        with pytest.raises(SupplyError, match="EC2 does not answer"):
            await bed.supplier.look()

    async def after(bed: Bed) -> None:
        ec2.hidden["DescribeInstances"] = 1  # EC2 shows new instances after a while
        await bed.provision()
        assert list(await bed.orders()) == ["o1"]

    ec2.lost["RunInstances"] = 1
    play(supply(), before)
    assert len(ec2.instances()) == 1
    play(supply(), after)
    assert len(ec2.instances()) == 1 and len(ec2.of("RunInstances")) == 2


def test_what_was_launched_twice_is_ended_but_for_one(ec2: Cloud) -> None:
    """The type that had no room has some when the next controller asks."""

    async def before(bed: Bed) -> None:
        await bed.provision()

    async def after(bed: Bed) -> None:
        ec2.hidden["DescribeInstances"] = 1
        await bed.provision()
        assert len(ec2.instances()) == 2
        shown = (await bed.orders())["o1"].handle
        assert [one["InstanceId"] for one in ec2.instances()] == [shown]

    ec2.full = {("g4dn.xlarge", "")}
    play(supply(), before)
    ec2.full = set()
    play(supply(), after)


def test_throttling_is_no_refusal(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        with pytest.raises(SupplyError, match=r"EC2 is busy .* \(RequestLimitExceeded\)"):
            await bed.supplier.look()
        assert await bed.orders() == {}
        await bed.provision()
        assert list(await bed.orders()) == ["o1"]
        ec2.throttled["DescribeInstances"] = 1
        with pytest.raises(SupplyError, match="RequestLimitExceeded"):
            await bed.supplier.look()

    ec2.throttled["RunInstances"] = 1
    play(supply(), scene)
    assert len(ec2.instances()) == 1


def test_machines_of_others_are_neither_seen_nor_touched(ec2: Cloud) -> None:
    async def theirs(bed: Bed) -> None:
        await bed.provision()

    async def scene(bed: Bed) -> None:
        assert await bed.orders() == {}
        await bed.release("o1")

    ec2.client().run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1)
    play(supply(), theirs, cluster="ffffffff")
    play(supply(), scene)
    assert len(ec2.instances()) == 2


def test_an_instance_that_was_stopped_is_still_ours_to_end(ec2: Cloud) -> None:
    async def scene(bed: Bed) -> None:
        await bed.provision()
        ec2.client().stop_instances(InstanceIds=[ec2.instances()[0]["InstanceId"]])
        one = (await bed.orders())["o1"]
        assert one.phase is OrderPhase.RUNNING and one.reason == "an instance was stopped"
        await bed.release()

    play(supply(), scene)
    assert ec2.instances() == []


WRONG = [
    ({"image": ""}, "supply.gpu.image: is missing; write e.g. image: ami-0123456789abcdef0"),
    ({"types": "g5;xlarge"}, "supply.gpu.types: 'g5;xlarge' is wrong; write e.g. g6.xlarge,g5.xl"),
    ({"tags": "aws:x=1"}, "supply.gpu.tags: 'aws:x=1' is wrong; write e.g. team=vision"),
    ({"tags": "shoal-order=o9"}, "supply.gpu.tags: 'shoal-order=o9' is wrong"),
    ({"flavor": "x"}, "supply.gpu.flavor: EC2 has no such word; it has region, image, types"),
    ({"zones": A, "subnets": "subnet-0a1b2c3d"}, "supply.gpu.zones: a subnet is in one zone"),
    ({"ceiling": 5}, "supply.gpu.price: is missing; a ceiling counts in prices"),
    ({"image": "ami-00000000"}, "supply.gpu.image: The image id '[ami-00000000]' does not exist"),
    ({"subnets": "subnet-00000000"}, "supply.gpu.subnets: "),
    ({"security_groups": "sg-00000000"}, "supply.gpu.security_groups: "),
]


@pytest.mark.parametrize(("words", "line"), WRONG)
def test_a_word_that_is_wrong_is_named(ec2: Cloud, words: dict[str, Any], line: str) -> None:
    assert refused(ec2, supply(**words)).startswith(line)


def test_what_we_may_not_do_is_said_in_one_line(ec2: Cloud) -> None:
    text = "You are not authorized: ec2:RunInstances. Encoded authorization failure message: AAAA"
    ec2.refusal = ("UnauthorizedOperation", text)
    assert refused(ec2, supply()) == (
        "no permission (docs/ec2.md lists those that are needed): "
        "You are not authorized: ec2:RunInstances"
    )


def test_without_boto3_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(SupplyError, match=r"install it with: pip install 'shoal\[ec2\]'"):
        Bed(supply())
