"""EC2 as a supplier of nodes: one order is one request for instances, all of them or none.

It keeps no facts: EC2 knows the orders by tags. What it remembers can be asked for again: prices,
images, and which types were not to be had a moment ago.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from shoal.engines.ec2 import read, render
from shoal.engines.ec2.options import Options, field, region_of
from shoal.engines.ec2.options import read as options_of
from shoal.engines.ec2.render import Candidate
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderStatus, Provision, Release, Supply, SupplyReport
from shoal.ports import SupplyContext, SupplyError

T = TypeVar("T")

# One attempt: what is not answered is asked for again by the next step, with the same token. boto3
# would also ask again where there is no room, which EC2 says with status 500.
CONNECT_S, ANSWER_S = 5, 25
PRICES_S = 300.0  # how long spot prices are used
REFUSED_S = 60.0  # how long a candidate without room is not asked for again


class Ec2Supplier:
    engine = "ec2"

    def __init__(self, context: SupplyContext) -> None:
        self._context = context
        self._regions: dict[str, Region] = {}
        self._unanswered = ""  # something was sent, and nobody knows what became of it

    async def look(self) -> SupplyReport:
        if self._unanswered:
            text, self._unanswered = self._unanswered, ""
            raise SupplyError(text)
        found: list[OrderStatus] = []
        for region in self._all():
            orders = read.by_order(await asyncio.to_thread(region.instances))
            twice = [one for mine in orders.values() for one in read.surplus(mine)]
            await asyncio.to_thread(region.end, twice)
            found += [read.status(order, mine) for order, mine in orders.items()]
        return SupplyReport(engine=self.engine, orders=tuple(found))

    async def provision(self, command: Provision) -> None:
        options = options_of(command.supply)
        assert self._context.order_token is not None, "the controller makes them"
        token = await self._context.order_token(command.order)
        data = render.user_data(command, options, self._context.join_url, token)
        region = self._region(options.region)
        try:
            await asyncio.to_thread(region.provide, command, options, data)
        except NoAnswer as error:  # not a refusal: the next look shows whether there are instances
            self._unanswered = str(error)

    async def release(self, command: Release) -> None:
        for region in self._all():
            mine = await asyncio.to_thread(region.instances, command.order)
            await asyncio.to_thread(region.end, [one.id for one in mine if not one.over])

    async def drain(self, node: NodeSpec, why: str) -> None:
        """EC2 has no word for a sick machine, other than ending it, which the order does."""

    async def close(self) -> None:
        """Connections close by themselves."""

    def _all(self) -> list[Region]:
        """Those of the supplies, and of earlier ones that may have left something."""
        for one in self._context.supplies():
            if one.engine == self.engine:
                self._region(region_of(one))
        return list(self._regions.values())

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            self._regions[name] = Region(name, self._context.cluster)
        return self._regions[name]


class Region:
    """One region of EC2. Its methods block, so they are for threads."""

    def __init__(self, name: str, cluster: str) -> None:
        self._name = name
        self._cluster = cluster
        self._client: Any = None
        self._images: dict[str, Mapping[str, Any]] = {}
        self._zones: dict[str, str] = {}  # of subnets
        self._prices: dict[tuple[str, ...], tuple[float, dict[tuple[str, str], int]]] = {}
        self._refused: dict[tuple[str, Candidate], tuple[float, str]] = {}  # market, candidate

    def instances(self, order: str = "") -> list[read.Instance]:
        pages = self._ask(
            lambda ec2: list(
                ec2.get_paginator("describe_instances").paginate(
                    Filters=render.filters(self._cluster, order)
                )
            )
        )
        return read.instances(pages, self._cluster)

    def end(self, ids: list[str]) -> None:
        if ids:
            self._ask(lambda ec2: ec2.terminate_instances(InstanceIds=ids))

    def provide(self, command: Provision, options: Options, user_data: str) -> None:
        """Asks for one candidate after the other, until one is to be had. An order that EC2 shows
        already, or whose request it has carried out, makes nothing new."""
        supply = command.supply
        if self.instances(command.order):
            return
        disks = render.disks_of(self._image(options.image, supply), options.disk)
        refusals: dict[str, None] = {}
        for candidate in self._candidates(supply, options):
            until, why = self._refused.get((options.market, candidate), (0.0, ""))
            if time.monotonic() >= until:
                asked = render.request(self._cluster, command, options, candidate, disks, user_data)
                why = self._run(asked, supply)
                if not why:
                    return
                self._refused[options.market, candidate] = (time.monotonic() + REFUSED_S, why)
            refusals[f"{candidate}: {why}"] = None
        what = "; ".join(refusals) or f"no spot instance costs {_price(supply)} or less now"
        word = "types" if refusals else "price"
        raise SupplyError(f"{field(supply, word)}: {what}")

    def _run(self, asked: dict[str, Any], supply: Supply) -> str:
        """Why there is no room; empty: it was carried out."""
        try:
            self._ask(lambda ec2: ec2.run_instances(**asked), supply)
        except Refusal as error:
            if error.code == "IdempotentParameterMismatch":  # with another address of the head, say
                return ""
            if error.code in read.NO_ROOM:
                return error.code
            raise
        return ""

    def _candidates(self, supply: Supply, options: Options) -> list[Candidate]:
        unknown = [one for one in options.subnets if one not in self._zones]
        if options.spot and unknown:
            found = self._ask(lambda ec2: ec2.describe_subnets(SubnetIds=unknown), supply)
            self._zones |= {one["SubnetId"]: one["AvailabilityZone"] for one in found["Subnets"]}
        wanted = render.candidates(options, self._zones)
        if not options.spot:
            return wanted
        return render.affordable(wanted, self._prices_of(options.types), supply.price)

    def _prices_of(self, types: tuple[str, ...]) -> dict[tuple[str, str], int]:
        at, prices = self._prices.get(types, (0.0, {}))
        if not prices or time.monotonic() - at > PRICES_S:
            answer = self._ask(
                lambda ec2: ec2.describe_spot_price_history(
                    InstanceTypes=list(types),
                    ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
                    StartTime=datetime.now(UTC),
                )
            )
            prices = read.spot_prices(answer["SpotPriceHistory"])
            self._prices[types] = (time.monotonic(), prices)
        return prices

    def _image(self, image: str, supply: Supply) -> Mapping[str, Any]:
        if image not in self._images:
            found = self._ask(lambda ec2: ec2.describe_images(ImageIds=[image]), supply)["Images"]
            if not found:
                where = self._name or "this region"
                raise SupplyError(f"{field(supply, 'image')}: there is no {image} in {where}")
            self._images[image] = found[0]
        return self._images[image]

    def _ask(self, call: Callable[[Any], T], supply: Supply | None = None) -> T:
        """`Refusal` if the answer is no, `NoAnswer` if there is none."""
        from botocore import exceptions

        try:
            return call(self._connected())
        except exceptions.ClientError as error:
            said, status = error.response["Error"], error.response["ResponseMetadata"]
            code, message = str(said.get("Code", "")), str(said.get("Message", ""))
            if code not in read.NO_ROOM and (
                status.get("HTTPStatusCode", 0) >= 500 or code in read.NO_ANSWER
            ):
                raise NoAnswer(f"EC2 is busy or does not answer ({code})") from None
            raise Refusal(read.refusal(code, message, supply), code) from None
        except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
            raise NoAnswer(f"EC2 does not answer: {error}") from None
        except exceptions.NoRegionError:
            raise SupplyError("region: is missing; write e.g. region: us-east-1") from None
        except exceptions.NoCredentialsError:
            text = "the controller has no AWS credentials: give its machine a role, or set up"
            raise SupplyError(f"{text} ~/.aws/credentials for its user") from None
        except exceptions.BotoCoreError as error:
            raise SupplyError(f"boto3: {error}") from None

    def _connected(self) -> Any:
        if self._client is None:
            import boto3
            from botocore.config import Config

            once = {"total_max_attempts": 1}
            config = Config(connect_timeout=CONNECT_S, read_timeout=ANSWER_S, retries=once)
            session = boto3.session.Session()  # the default one is not for threads
            self._client = session.client("ec2", region_name=self._name or None, config=config)
        return self._client


class Refusal(SupplyError):
    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class NoAnswer(SupplyError):
    """Throttled, out of reach, or broken there: it may have been carried out."""


def _price(supply: Supply) -> str:
    return f"{supply.price / render.MILLIONTHS:.2f} an hour"
