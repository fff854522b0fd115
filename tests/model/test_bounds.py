"""Whatever comes from outside has bounds: no number, text or list may be as large as it likes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec.inspect as inspect
import pytest

from shoal.model.job import JobSpec
from shoal.model.ledger import PriceList
from shoal.model.policy import Policy
from shoal.model.service import ServiceSpec

# What is bounded elsewhere: in all (core/phases/admit.py), or by a list of what is known.
ELSEWHERE = {"JobSpec.env"}


def unbounded(kind: inspect.Type, where: str, seen: set[type]) -> Iterator[str]:
    match kind:
        case inspect.StructType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    name = f"{kind.cls.__name__}.{field.encode_name}"
                    yield from unbounded(field.type, name, seen)
        case inspect.IntType() | inspect.FloatType():
            if kind.le is None and kind.lt is None:
                yield where
        case inspect.StrType():
            if kind.max_length is None:
                yield where
        case inspect.ListType() | inspect.VarTupleType():
            if kind.max_length is None:
                yield where
            yield from unbounded(kind.item_type, f"{where}[]", seen)
        case inspect.DictType():
            if kind.max_length is None:
                yield where
            yield from unbounded(kind.key_type, f"{where}: a key", seen)
            yield from unbounded(kind.value_type, f"{where}: a value", seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, where, seen)


@pytest.mark.parametrize("cls", [JobSpec, Policy, PriceList, ServiceSpec], ids=lambda c: c.__name__)
def test_everything_that_users_send_is_bounded(cls: type) -> None:
    found = set(unbounded(inspect.type_info(cls), cls.__name__, set()))
    assert found - ELSEWHERE == set()
