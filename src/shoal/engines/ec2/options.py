"""What a supply says about EC2: the words under `options`, read and checked. Pure."""

from __future__ import annotations

import re
from importlib.util import find_spec

import msgspec

from shoal.model.supply import Supply
from shoal.ports import Supplier, SupplierKind, SupplyContext, SupplyError

INSTALL = "pip install 'shoal[ec2]'"
ON_DEMAND, SPOT = "on-demand", "spot"
FOLDER = "/var/lib/shoal"
# A word of a supply, what one of its values looks like, and an example of it.
WORDS: dict[str, tuple[str, str]] = {
    "region": (r"[a-z]{2}(-[a-z]+){1,3}-[0-9]", "us-east-1"),
    "image": (r"ami-[0-9a-f]{8,17}", "ami-0123456789abcdef0"),
    "types": (r"[a-z0-9-]{2,30}\.[a-z0-9-]{2,20}", "g6.xlarge,g5.xlarge"),
    "market": (f"{ON_DEMAND}|{SPOT}", SPOT),
    "zones": (r"[a-z]{2}-[a-z0-9-]{4,40}", "us-east-1a,us-east-1b"),
    "subnets": (r"subnet-[0-9a-f]{8,17}", "subnet-0a1b2c3d4e5f60718"),
    "security_groups": (r"sg-[0-9a-f]{8,17}", "sg-0a1b2c3d4e5f60718"),
    "profile": (r"[A-Za-z0-9+=,.@_-]{1,128}", "shoal-node"),
    "disk": (r"[1-9][0-9]{0,4}", "200"),
    "tags": (r"(?!aws:|shoal)[A-Za-z0-9 _.:/+@-]{1,128}=[A-Za-z0-9 _.:/+@-]{0,256}", "team=vision"),
    "python": (r"/[^\0\n]{1,500}", "/opt/shoal/bin/python"),
    "folder": (r"/[^\0\n]{1,500}", FOLDER),
    "checkpoints": (r"[^\0\n]{1,500}", "s3://bucket/checkpoints"),
    "setup": (r"(?s)[^\0]{1,8000}", "pip install shoal"),
}
LISTS = ("types", "zones", "subnets", "security_groups", "tags")
NEEDED = ("image", "types")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one supply. A node is on the first of `types` that is to be had in one of the
    zones or subnets."""

    image: str
    types: tuple[str, ...]
    region: str = ""  # empty: what the AWS configuration of the controller says
    market: str = ON_DEMAND
    zones: tuple[str, ...] = ()  # of the default VPC
    subnets: tuple[str, ...] = ()  # instead of zones
    security_groups: tuple[str, ...] = ()
    profile: str = ""  # an instance profile: the role that jobs of the operator have there
    disk: int = 0  # GB of the root volume; 0: as the image says
    tags: tuple[str, ...] = ()
    python: str = "python3"  # with Shoal, on the image
    folder: str = FOLDER
    checkpoints: str = ""
    setup: str = ""  # a shell script that runs as root before

    @property
    def spot(self) -> bool:
        return self.market == SPOT


def _build(context: SupplyContext) -> Supplier:
    """boto3 takes half a second to load, which the controller's loop must not wait for."""
    if find_spec("boto3") is None:
        raise SupplyError(f"boto3 is not installed here; install it with: {INSTALL}")
    from shoal.engines.ec2.supplier import Ec2Supplier

    return Ec2Supplier(context)


SUPPLIER = SupplierKind("EC2", WORDS, _build, install=INSTALL)


def field(supply: Supply, word: str) -> str:
    """How an error names a field, so that people find it in their policy."""
    return f"supply.{supply.name}.{word}"


def region_of(supply: Supply) -> str:
    """Which is known even if another word is wrong."""
    region = supply.options.get("region", "")
    return region if re.fullmatch(WORDS["region"][0], region) else ""


def read(supply: Supply) -> Options:
    """Its words, all of them known and well-formed."""
    found: dict[str, str | int | tuple[str, ...]] = {}
    for word, text in supply.options.items():
        if word not in WORDS:
            known = ", ".join(WORDS)
            raise SupplyError(f"{field(supply, word)}: EC2 has no such word; it has {known}")
        pattern, example = WORDS[word]
        values = tuple(text.split(",")) if word in LISTS else (text,)
        for value in values:
            if not re.fullmatch(pattern, value):
                line = " ".join(value.split())[:60]
                raise SupplyError(f"{field(supply, word)}: '{line}' is wrong; write e.g. {example}")
        found[word] = values if word in LISTS else int(text) if word == "disk" else text
    for word in NEEDED:
        if word not in found:
            example = WORDS[word][1]
            raise SupplyError(f"{field(supply, word)}: is missing; write e.g. {word}: {example}")
    if "zones" in found and "subnets" in found:
        raise SupplyError(f"{field(supply, 'zones')}: a subnet is in one zone; give one of them")
    if supply.ceiling and not supply.price:
        raise SupplyError(f"{field(supply, 'price')}: is missing; a ceiling counts in prices")
    return msgspec.convert(found, Options)
