"""What we ask of EC2, exactly: the request for an order's instances, and the user data with which
they join. Pure.

Nothing that a tenant wrote goes there: not into tags, nor into user data. What the policy's author
wrote is checked by `options`, and goes into user data as base64.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from shoal.engines.ec2.options import Options, field
from shoal.model.supply import ORDER_PATTERN, Provision
from shoal.ports import SupplyError

CLUSTER, ORDER, SUPPLY = "shoal-cluster", "shoal-order", "shoal-supply"
TAGGED = ("instance", "volume", "network-interface")
USER_DATA_BYTES_MAX = 16 * 1024  # EC2's own bound
MILLIONTHS = 1_000_000
UNKNOWN = 1 << 60  # a price, more than any


class Candidate(NamedTuple):
    """One way to get the machines of an order: a type, and where. Without a zone and a subnet, EC2
    chooses a zone of the default VPC."""

    type: str
    zone: str = ""
    subnet: str = ""

    def __str__(self) -> str:
        place = self.zone or self.subnet
        return f"{self.type} in {place}" if place else self.type


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the machines of an order are told."""

    url: str
    token: str  # for this order alone, and each machine once
    order: str
    supply: str
    nodes: tuple[str, ...]  # what the nodes are called, in the order of the launch index
    folder: str
    gpus: int = 0
    gpu_model: str = ""
    gpu_memory_mb: int = 0
    labels: dict[str, str] = {}
    taints: tuple[str, ...] = ()
    checkpoints: str = ""
    has_role: bool = False


def candidates(options: Options, zones: Mapping[str, str]) -> list[Candidate]:
    """In the order of the supply: another zone of the first type comes before another type.
    `zones`: those of the subnets."""
    places = [("", zone) for zone in options.zones]
    places = places or [(subnet, zones.get(subnet, "")) for subnet in options.subnets]
    return [
        Candidate(kind, zone, subnet)
        for kind in options.types
        for subnet, zone in places or [("", "")]
    ]


def affordable(
    found: Iterable[Candidate], prices: Mapping[tuple[str, str], int], price: int
) -> list[Candidate]:
    """The cheapest first, by what spot instances cost now; without those above `price`. The price
    of a candidate that EC2 does not list is not known, and it is tried last."""

    def cost(one: Candidate) -> int:
        there = {zone: cost for (kind, zone), cost in prices.items() if kind == one.type}
        if one.zone:
            return there.get(one.zone, UNKNOWN)
        return min(there.values(), default=UNKNOWN)

    known = sorted(found, key=cost)
    return [one for one in known if not price or cost(one) <= price or cost(one) == UNKNOWN]


def client_token(cluster: str, order: str, candidate: Candidate) -> str:
    """A request that is sent again with the same token makes nothing new."""
    where = candidate.subnet or candidate.zone
    mark = hashlib.sha256(f"{candidate.type} {where}".encode()).hexdigest()[:16]
    return f"shoal-{cluster}-{order}-{mark}"


def request(
    cluster: str,
    command: Provision,
    options: Options,
    candidate: Candidate,
    disks: list[dict[str, Any]],
    user_data: str,
) -> dict[str, Any]:
    """The arguments of RunInstances: all machines of the lot, or none."""
    supply = command.supply
    made: dict[str, Any] = {}
    kinds = list(TAGGED)
    if options.spot:
        kinds.append("spot-instances-request")
        # EC2 ends an instance before it costs more, so the price of the supply is a bound.
        most = {"MaxPrice": _price_text(supply.price)} if supply.price else {}
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        made["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": {**spot, **most}}
    if candidate.subnet:
        made["SubnetId"] = candidate.subnet
    elif candidate.zone:
        made["Placement"] = {"AvailabilityZone": candidate.zone}
    if options.security_groups:
        made["SecurityGroupIds"] = list(options.security_groups)
    if options.profile:
        made["IamInstanceProfile"] = {"Name": options.profile}
    if disks:
        made["BlockDeviceMappings"] = disks
    tags = tags_of(cluster, command, options)
    return {
        "ClientToken": client_token(cluster, command.order, candidate),
        "ImageId": options.image,
        "InstanceType": candidate.type,
        "MinCount": supply.lot,
        "MaxCount": supply.lot,
        "UserData": user_data,
        # A machine that switches itself off is gone, and costs nothing.
        "InstanceInitiatedShutdownBehavior": "terminate",
        # Version 2 answers no proxy and no redirect, and one hop leads into no container.
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
        },
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
        **made,
    }


def tags_of(cluster: str, command: Provision, options: Options) -> list[dict[str, str]]:
    """By the first two, everything of ours is found again, and nothing else."""
    found = dict(tag.split("=", 1) for tag in options.tags)
    found |= {CLUSTER: cluster, ORDER: command.order, SUPPLY: command.supply.name}
    found.setdefault("Name", f"shoal-{cluster}-{command.order}")
    return [{"Key": key, "Value": value} for key, value in found.items()]


def filters(cluster: str, order: str = "") -> list[dict[str, Any]]:
    found = [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}]
    return [*found, {"Name": f"tag:{ORDER}", "Values": [order]}] if order else found


def order_in(tags: Mapping[str, str]) -> str:
    order = tags.get(ORDER, "")
    return order if re.match(ORDER_PATTERN, order) else ""


def disks_of(image: Mapping[str, Any], disk_gb: int) -> list[dict[str, Any]]:
    """Every volume of the image goes with its instance, whatever the image says."""
    found = []
    for mapping in image.get("BlockDeviceMappings", []):
        if "Ebs" in mapping:
            root = mapping["DeviceName"] == image.get("RootDeviceName")
            size = disk_gb if disk_gb and root else mapping["Ebs"].get("VolumeSize")
            ebs = {"DeleteOnTermination": True, **({"VolumeSize": size} if size else {})}
            found.append({"DeviceName": mapping["DeviceName"], "Ebs": ebs})
    return found


def settings(command: Provision, options: Options, url: str, token: str) -> Settings:
    supply = command.supply
    return Settings(
        url=url,
        token=token,
        order=command.order,
        supply=supply.name,
        nodes=command.nodes,
        folder=options.folder,
        gpus=supply.gpus,
        gpu_model=supply.gpu_model,
        gpu_memory_mb=supply.gpu_memory_mb,
        labels=supply.labels,
        taints=supply.taints,
        checkpoints=options.checkpoints,
        has_role=bool(options.profile),
    )


def user_data(command: Provision, options: Options, url: str, token: str) -> str:
    told = msgspec.json.encode(settings(command, options, url, token))
    lasts_s = -(-command.supply.lasts_ms // 1000)
    setup = _base64(options.setup.encode())
    setup = f"echo {setup} | base64 -d | sh -eu || end" if setup else ""
    text = SCRIPT.format(
        setup=setup,
        settings=_base64(told),
        python=shlex.quote(options.python),
        seconds=lasts_s,
        minutes=-(-lasts_s // 60),
    )
    if len(text) > USER_DATA_BYTES_MAX:
        message = f"user data has {len(text)} bytes, and EC2 takes {USER_DATA_BYTES_MAX}"
        raise SupplyError(f"{field(command.supply, 'setup')}: {message}; put it into the image")
    return text


SCRIPT = """\
#!/bin/sh
# Makes this machine a node of a Shoal cluster. The machine is switched off, and so terminated, when
# the node ends, if it cannot join, and when its time is over.
umask 077
export HOME="${{HOME:-/root}}"
if [ "$1" != node ] && [ -d /run/systemd/system ]; then
    exec systemd-run --unit=shoal-node --property=Delegate=yes --property=KillMode=mixed \\
        --property=TimeoutStopSec=100 /bin/sh "$0" node
fi
end() {{
    shutdown -P now
    exit
}}
ends=0
if [ {seconds} -gt 0 ]; then
    ends=$(($(date +%s) + {seconds}))
    shutdown -P +{minutes}
fi
{setup}
echo {settings} | base64 -d | {python} -m shoal.engines.ec2.machine "$ends" &
agent=$!
trap 'kill -TERM "$agent"' TERM
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent"
done
end
"""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _price_text(millionths: int) -> str:
    return f"{Decimal(millionths) / MILLIONTHS:f}"
