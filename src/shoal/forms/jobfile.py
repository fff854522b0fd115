"""A job file, in YAML, TOML or JSON: read, its field names checked, turned into a JobSpec."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from shoal.forms import datafile, units
from shoal.forms.jobfields import FIELDS, BadJob, to_spec
from shoal.model.job import JobSpec


def parse(text: str, ending: str) -> JobSpec:
    """The whole way, for a file that needs nothing added: text in, JobSpec out."""
    return to_spec(read_fields(text, ending))


def read_fields(
    text: str, ending: str, known: Collection[str] = FIELDS, what: str = "job"
) -> dict[str, Any]:
    """The file's fields as written, their names checked; `ending` tells the format."""
    if not text.strip():
        message = "the file is empty; it needs at least a line like: command: python train.py"
        raise BadJob("", message)
    try:
        data = datafile.load(text, ending)
    except datafile.BadData as error:
        raise BadJob("", str(error)) from None
    for name in data:
        if name not in known:
            raise _unknown_field(name, known, what)
    return data


def _unknown_field(name: Any, known: Collection[str], what: str) -> BadJob:
    close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"a {what} has {', '.join(known)}"
    return BadJob("", f"there is no field {units.quoted(str(name))}; {hint}")
