"""What EC2 says: instances as orders, spot prices, and its refusals in one line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from shoal.engines.ec2.options import field
from shoal.engines.ec2.render import CLUSTER, MILLIONTHS, order_in
from shoal.model.supply import OrderPhase, OrderStatus, Supply

OVER = "terminated"  # before that, jobs may still run: a machine takes minutes to shut down
# One that is stopped still costs its disk. Its node is silent, so the order is given back.
LEAVING = {"shutting-down": "shuts down", "stopping": "was stopped", "stopped": "was stopped"}
# Reasons of an end that say nothing against asking again: it switched itself off, as a node that
# has left or whose time is over does.
OWN_END = "Client.InstanceInitiatedShutdown"
WORDS_OF_ENDS = {
    "Server.SpotInstanceTermination": "EC2 took the spot instance back",
    "Server.SpotInstanceShutdown": "EC2 took the spot instance back",
    "Client.UserInitiatedShutdown": "somebody terminated the instance",
    OWN_END: "the machine switched itself off",
    "Server.InsufficientInstanceCapacity": "EC2 had no room for it",
    "Client.VolumeLimitExceeded": "the quota of volumes is used up",
}
# Another type or zone may do.
NO_ROOM = frozenset(
    (
        *("InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity"),
        *("InsufficientFreeAddressesInSubnet", "SpotMaxPriceTooLow", "Unsupported"),
        *("InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"),
    )
)
# It was not carried out, or nobody knows: it is asked again.
NO_ANSWER = frozenset(
    (
        *("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"),
        *("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"),
    )
)
# How a refusal's code begins, and the word of the supply that it is about.
SUBJECTS = (
    ("InvalidAMI", "image"),
    ("InvalidSubnet", "subnets"),
    ("InvalidGroup", "security_groups"),
    ("InvalidSecurityGroup", "security_groups"),
    ("InvalidBlockDevice", "disk"),
    ("InvalidInstanceType", "types"),
    ("InvalidTag", "tags"),
)
CREDENTIALS = ("AuthFailure", "InvalidClientTokenId", "ExpiredToken", "RequestExpired")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """`reservation`: instances of one request have the same."""

    id: str
    order: str
    reservation: str
    launched: datetime
    state: str
    type: str
    zone: str
    reason: str = ""  # a code, of one that has ended

    @property
    def over(self) -> bool:
        return self.state == OVER


def instances(pages: Iterable[Mapping[str, Any]], cluster: str) -> list[Instance]:
    """Those of this cluster's orders, whatever else was listed."""
    found = []
    for page in pages:
        for reservation in page["Reservations"]:
            for one in reservation["Instances"]:
                tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags", [])}
                order = order_in(tags)
                if tags.get(CLUSTER) == cluster and order:
                    found.append(_instance(one, order, reservation["ReservationId"]))
    return found


def _instance(one: Mapping[str, Any], order: str, reservation: str) -> Instance:
    return Instance(
        id=one["InstanceId"],
        order=order,
        reservation=reservation,
        launched=one["LaunchTime"],
        state=one["State"]["Name"],
        type=one["InstanceType"],
        zone=one.get("Placement", {}).get("AvailabilityZone", ""),
        reason=one.get("StateReason", {}).get("Code", ""),
    )


def by_order(found: Iterable[Instance]) -> dict[str, list[Instance]]:
    orders: dict[str, list[Instance]] = {}
    for one in found:
        orders.setdefault(one.order, []).append(one)
    return orders


def surplus(found: Sequence[Instance]) -> list[str]:
    """Living instances of all requests but the first, of one order: a controller died before it
    had the answer of another request, or that answer was lost."""
    living = [one for one in found if not one.over]
    if not living:
        return []
    kept = min(living, key=_age).reservation
    return [one.id for one in living if one.reservation != kept]


def status(order: str, found: Sequence[Instance]) -> OrderStatus:
    """An order lives while one of its instances does."""
    living = [one for one in found if not one.over]
    shown = min(living or found, key=_age)
    if not living:
        failed = shown.reason != OWN_END
        why = WORDS_OF_ENDS.get(shown.reason, shown.reason or "the instance has ended")
        return OrderStatus(
            order=order, phase=OrderPhase.ENDED, reason=why, failed=failed, handle=shown.id
        )
    pending = any(one.state == "pending" for one in living)
    leaving = next((LEAVING[one.state] for one in living if one.state in LEAVING), "")
    return OrderStatus(
        order=order,
        phase=OrderPhase.PENDING if pending else OrderPhase.RUNNING,
        reason=f"an instance {leaving}" if leaving else f"{shown.type} in {shown.zone}",
        handle=shown.id,
    )


def _age(one: Instance) -> tuple[datetime, str, str]:
    """EC2 knows times in seconds."""
    return one.launched, one.reservation, one.id


def spot_prices(history: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """The newest of each type and zone, in millionths per hour."""
    newest: dict[tuple[str, str], tuple[datetime, int]] = {}
    for one in history:
        key = (one["InstanceType"], one["AvailabilityZone"])
        price = int(Decimal(one["SpotPrice"]) * MILLIONTHS)
        if key not in newest or newest[key][0] < one["Timestamp"]:
            newest[key] = (one["Timestamp"], price)
    return {key: price for key, (_, price) in newest.items()}


def refusal(code: str, message: str, supply: Supply | None = None) -> str:
    """One line: the word of the supply that it is about, what is wrong, what helps."""
    message = " ".join(message.partition("Encoded authorization failure")[0].split()).rstrip(".")
    if code in CREDENTIALS:
        return f"AWS does not accept the controller's credentials ({code}): {message}"
    if code == "UnauthorizedOperation":
        return f"no permission (docs/ec2.md lists those that are needed): {message}"
    word = next((word for start, word in SUBJECTS if code.startswith(start)), "")
    if supply is not None and word:
        return f"{field(supply, word)}: {message} ({code})"
    return f"EC2 refuses: {message} ({code})"
