"""A job file, in YAML, TOML or JSON: read, its field names checked, turned into a JobSpec."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable
from typing import Any

from shoal.cli import units
from shoal.cli.jobfields import FIELDS, BadJob, to_spec
from shoal.model.job import JobSpec

ENDINGS = (".yaml", ".yml", ".toml", ".json")
TEXT_BYTES_MAX = 4 * 1024 * 1024  # room for the largest command and environment


def parse(text: str, ending: str) -> JobSpec:
    """The whole way, for a file that needs nothing added: text in, JobSpec out."""
    return to_spec(read_fields(text, ending))


def read_fields(text: str, ending: str) -> dict[str, Any]:
    """The file's fields as written, their names checked; `ending` tells the format."""
    if not text.strip():
        raise BadJob(
            "", "the file is empty; it needs at least a line like: command: python train.py"
        )
    try:
        data = _READERS[ending](text)
    except RecursionError:
        raise BadJob("", "the file is nested too deeply; a job file is flat") from None
    if not isinstance(data, dict):
        message = "the file must hold fields with values, e.g. command: python train.py"
        raise BadJob("", message)
    for name in data:
        if name not in FIELDS:
            raise _unknown_field(name)
    return data


# -- formats ------------------------------------------------------------------------------


def _read_yaml(text: str) -> Any:
    import yaml

    from shoal.cli.yamltext import load

    try:
        return load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = error.problem or "it cannot be read"
        if "\\t" in problem:
            problem = "a tab begins a word; indent with spaces"
        raise BadJob("", f"not YAML{_at(mark.line if mark else None)}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadJob("", f"not YAML: {_first_line(error)}") from None


def _read_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise BadJob("", f"not TOML: {_first_line(error)}") from None


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BadJob("", f"not a job: {units.quoted(name)} is given twice")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise BadJob("", f"not JSON{_at(error.lineno - 1)}: {error.msg}") from None
    except BadJob:
        raise
    except ValueError as error:  # e.g. a number with ten thousand figures
        raise BadJob("", f"not JSON: {_first_line(error)}") from None


_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}


def _at(line: int | None) -> str:
    return "" if line is None else f", line {line + 1}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["it cannot be read"])[0][:200]


def _unknown_field(name: Any) -> BadJob:
    close = difflib.get_close_matches(str(name).replace("-", "_").lower(), FIELDS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"a job has {', '.join(FIELDS)}"
    return BadJob("", f"there is no field {units.quoted(str(name))}; {hint}")
