"""One EC2 for all tests of this folder, emptied before each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.needs import need

if TYPE_CHECKING:
    from tests.engines.ec2.cloud import Cloud


def need_moto() -> None:
    for package in ("boto3", "moto", "flask", "flask_cors"):
        need(package)


@pytest.fixture(scope="session")
def region() -> Iterator[Cloud]:
    need_moto()
    from tests.engines.ec2.cloud import cloud

    with cloud() as made:
        yield made


@pytest.fixture
def ec2(region: Cloud) -> Cloud:
    region.clear()
    return region
