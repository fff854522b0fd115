"""Volumes as people write them: SOURCE:NAME[:ro]."""

from __future__ import annotations

import re
from typing import Any

from shoal.forms import readers, units
from shoal.forms.failure import BadField


def volumes(field: str, value: Any) -> tuple[str, ...]:
    from shoal.model.volume import VOLUME_PATTERN, VOLUMES_MAX, volumes_problem

    found = tuple(
        readers.text(field, one) for one in (value if isinstance(value, list | tuple) else [value])
    )
    for one in found:
        if not re.fullmatch(VOLUME_PATTERN, one):
            problem = "is not SOURCE:NAME or SOURCE:NAME:ro, such as /data/imagenet:data:ro"
            raise BadField(field, f"{units.quoted(one)} {problem}")
    if len(found) > VOLUMES_MAX:
        raise BadField(field, f"names more than {VOLUMES_MAX} volumes")
    if wrong := volumes_problem(found):
        raise BadField(field, wrong)
    return found
