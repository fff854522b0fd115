"""Files that people write, in YAML, TOML or JSON: from a path to a table of plain values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.forms import units
from shoal.forms.failure import Failure

TEXT_BYTES_MAX = 4 * 1024 * 1024  # room for the largest command and environment


class BadData(ValueError):
    """The text is no table in this format; where it breaks, and why."""


def read_text(path: Path, what: str) -> str:
    """`what` names the kind of file, as in 'job file'."""
    if path.is_dir():
        raise Failure(f"{path}: is a directory, not a {what}")
    if not path.exists():
        raise Failure(f"{path}: there is no such file")
    if not path.is_file():
        raise Failure(f"{path}: is not a regular file")
    if path.stat().st_size > TEXT_BYTES_MAX:
        raise Failure(f"{path}: is larger than {TEXT_BYTES_MAX // 1024**2} MiB; that is no {what}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Failure(f"{path}: is not text (UTF-8)") from None


def load(text: str, ending: str) -> dict[Any, Any]:
    """`ending` tells the format, as in '.yaml'."""
    try:
        data = _READERS[ending](text)
    except RecursionError:
        raise BadData("the file is nested too deeply") from None
    if not isinstance(data, dict):
        raise BadData("the file must hold fields with values, e.g. name: mine")
    return data


def _read_yaml(text: str) -> Any:
    import yaml

    from shoal.forms.yamltext import load

    try:
        return load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = error.problem or "it cannot be read"
        if "\\t" in problem:
            problem = "a tab begins a word; indent with spaces"
        raise BadData(f"not YAML{_at(mark.line if mark else None)}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadData(f"not YAML: {_first_line(error)}") from None


def _read_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise BadData(f"not TOML: {_first_line(error)}") from None


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BadData(f"{units.quoted(name)} is given twice")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise BadData(f"not JSON{_at(error.lineno - 1)}: {error.msg}") from None
    except BadData:
        raise
    except ValueError as error:  # e.g. a number with ten thousand figures
        raise BadData(f"not JSON: {_first_line(error)}") from None


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


def is_job_file(word: str) -> bool:
    return word.lower().endswith((".yaml", ".yml", ".toml", ".json"))
