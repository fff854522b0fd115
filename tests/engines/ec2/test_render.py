"""What is sent to EC2 and what its answers mean, without an EC2."""

from __future__ import annotations

import base64
import json
import re
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import yaml

from shoal.engines.ec2 import read, render, supplier
from shoal.engines.ec2.options import Options
from shoal.engines.ec2.options import read as read_options
from shoal.engines.ec2.read import Instance
from shoal.engines.ec2.render import Candidate, Settings
from shoal.forms.supply import supplies
from shoal.model.supply import OrderPhase, Provision, Supply
from shoal.ports import SupplyError

TOKEN = "shoal_ord000000000001_" + "s" * 43 + ".f00d"
EVIL = "$(touch /tmp/evil); `id` 'x' \"y\"\nshutdown"


def options(**fields: object) -> Options:
    return msgspec.convert({"image": "ami-1", "types": ["g5.xlarge"], **fields}, Options)


def order(**fields: object) -> Provision:
    one = msgspec.convert({"name": "gpu", "engine": "ec2", "gpus": 1, **fields}, Supply)
    return Provision(order="o1", supply=one, nodes=("gpu-1",), why=EVIL)


def instance(id_: str, state: str, reason: str = "", reservation: str = "r-1") -> Instance:
    return Instance(
        id=id_,
        order="o1",
        reservation=reservation,
        launched=datetime(2026, 11, 19, tzinfo=UTC),
        state=state,
        type="g5.xlarge",
        zone="us-east-1a",
        reason=reason,
    )


def test_user_data_has_the_settings_as_base64_and_nothing_that_a_tenant_wrote() -> None:
    text = render.user_data(order(labels={"pool": "a"}), options(), "https://head:7700", TOKEN)
    assert text.startswith("#!/bin/sh\n") and "evil" not in text and TOKEN not in text
    (told,) = re.findall(r"^echo (\S+) \| base64 -d \| python3 -m", text, re.MULTILINE)
    found = msgspec.json.decode(base64.b64decode(told), type=Settings)
    assert found.token == TOKEN and found.nodes == ("gpu-1",) and found.labels == {"pool": "a"}
    assert "evil" not in base64.b64decode(told).decode()
    assert text.endswith("\nend\n")


def test_what_the_policy_says_is_quoted() -> None:
    text = render.user_data(order(), options(setup=EVIL, python="/opt/a b/python"), "u", TOKEN)
    assert "evil" not in text and "'/opt/a b/python' -m shoal" in text
    (setup,) = re.findall(r"^echo (\S+) \| base64 -d \| sh -eu \|\| end$", text, re.MULTILINE)
    assert base64.b64decode(setup).decode() == EVIL


def test_a_machine_whose_time_is_limited_switches_itself_off() -> None:
    text = render.user_data(order(lasts_ms=5_400_000), options(), "u", TOKEN)
    assert "date +%s) + 5400" in text and "shutdown -P +90" in text


def test_user_data_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        SupplyError, match=r"supply\.gpu\.setup: user data has .* put it into the i"
    ):
        render.user_data(order(labels={"a" * 60: "b" * 60}), options(setup="x" * 12_000), "u", "t")


def test_candidates_come_in_the_order_of_the_supply() -> None:
    both = options(types=["a.1", "b.1"], zones=["z1", "z2"])
    assert [str(one) for one in render.candidates(both, {})] == [
        *("a.1 in z1", "a.1 in z2", "b.1 in z1", "b.1 in z2"),
    ]
    assert render.candidates(options(), {}) == [Candidate("g5.xlarge")]
    nets = options(subnets=["subnet-1"])
    assert render.candidates(nets, {"subnet-1": "z1"}) == [Candidate("g5.xlarge", "z1", "subnet-1")]
    known, unknown = Candidate("a", "z1", "subnet-1"), Candidate("a", "", "subnet-1")
    assert render.client_token("c", "o1", known) == render.client_token("c", "o1", unknown)


def test_a_price_that_is_not_known_is_tried_last() -> None:
    prices = {("a", "z1"): 30, ("a", "z2"): 10, ("b", "z1"): 20}
    wanted = [Candidate("a", "z1"), Candidate("c"), Candidate("b", "z1"), Candidate("a")]
    found = render.affordable(wanted, prices, 25)
    assert found == [Candidate("a"), Candidate("b", "z1"), Candidate("c")]


ENDS = [
    ("Server.SpotInstanceTermination", "EC2 took the spot instance back", True),
    ("Client.UserInitiatedShutdown", "somebody terminated the instance", True),
    ("Client.InstanceInitiatedShutdown", "the machine switched itself off", False),
    ("Server.InternalError", "Server.InternalError", True),
    ("", "the instance has ended", True),
]


@pytest.mark.parametrize(("code", "why", "failed"), ENDS)
def test_an_end_says_why(code: str, why: str, failed: bool) -> None:
    one = read.status("o1", [instance("i-1", "terminated", code)])
    assert (one.phase, one.reason, one.failed) == (OrderPhase.ENDED, why, failed)


def test_an_order_lives_while_one_of_its_instances_does() -> None:
    gone, here = instance("i-1", "terminated", "x"), instance("i-2", "running")
    assert read.status("o1", [gone, here]).phase is OrderPhase.RUNNING
    assert read.status("o1", [here, instance("i-3", "pending")]).phase is OrderPhase.PENDING
    assert read.surplus([gone, here]) == []
    assert read.surplus([here, instance("i-9", "running", reservation="r-2")]) == ["i-9"]
    assert read.surplus([gone]) == []


def test_an_instance_that_shuts_down_is_not_over() -> None:
    """Its jobs may still run, so they must not start elsewhere yet."""
    one = read.status("o1", [instance("i-1", "shutting-down", "Server.SpotInstanceTermination")])
    assert (one.phase, one.reason) == (OrderPhase.RUNNING, "an instance shuts down")


def test_instances_of_others_are_left_out() -> None:
    def page(*tags: tuple[str, str]) -> dict[str, object]:
        one = {"InstanceId": "i-1", "LaunchTime": datetime.now(UTC), "InstanceType": "a.1"}
        one |= {"State": {"Name": "running"}, "Tags": [{"Key": k, "Value": v} for k, v in tags]}
        return {"Reservations": [{"ReservationId": "r-1", "Instances": [one]}]}

    ours = page(("shoal-cluster", "c"), ("shoal-order", "o1"))
    others = page(("shoal-cluster", "d"), ("shoal-order", "o1")), page(("shoal-cluster", "c"))
    odd = page(("shoal-cluster", "c"), ("shoal-order", "o1; rm"))
    assert [one.order for one in read.instances([ours, *others, odd, page()], "c")] == ["o1"]


def test_of_several_prices_the_newest_counts() -> None:
    def at(hour: int, price: str) -> dict[str, object]:
        when = datetime(2026, 11, 19, hour, tzinfo=UTC)
        place = {"InstanceType": "a", "AvailabilityZone": "z"}
        return {**place, "SpotPrice": price, "Timestamp": when}

    assert read.spot_prices([at(1, "0.5"), at(3, "0.25"), at(2, "9")]) == {("a", "z"): 250_000}


# -- what the page says ----------------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "ec2.md").read_text()


def test_the_rights_of_the_page_are_those_that_we_use() -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    listed = [one["Action"] for one in json.loads(text)["Statement"]]
    rights = {right for one in listed for right in ([one] if isinstance(one, str) else one)}
    source = Path(str(supplier.__file__)).read_text()
    calls = re.findall(r"ec2\.([a-z_]+)\(|get_paginator\(\"(\w+)\"\)", source)
    used = {one or two for one, two in calls} - {"get_paginator"}
    names = {f"ec2:{''.join(word.title() for word in one.split('_'))}" for one in used}
    assert rights == names | {
        "ec2:DescribeInstances",
        "ec2:CreateTags",
    }  # as a part of RunInstances


def test_the_policy_of_the_page_is_one() -> None:
    (text,) = re.findall(
        r"^    # elastic\.yaml\n(.*?)^    shoal policy set", PAGE, re.M | re.DOTALL
    )
    rows = supplies(yaml.safe_load(textwrap.dedent(text))["supply"])
    found = [read_options(msgspec.convert(row, Supply)) for row in rows]
    assert [one.market for one in found] == ["spot", "on-demand"]
    assert found[0].types == ("g6.xlarge", "g5.xlarge") and found[0].zones[1] == "us-east-1b"
