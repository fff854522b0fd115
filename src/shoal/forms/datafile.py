"""Files that people write, in YAML, TOML or JSON: from a path to a table of plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.forms import units
from shoal.forms.failure import REFUSED, USAGE, BadField, Failure

if TYPE_CHECKING:
    from pathlib import Path

Content = TypeVar("Content")

TEXT_BYTES_MAX = 4 * 1024 * 1024  # room for the largest command and environment
ENDINGS = (".yaml", ".yml", ".toml", ".json")


def is_job_file(word: str) -> bool:
    """By its name: `shoal run job.yaml` means the file."""
    return word.lower().endswith(ENDINGS)


def read_text(path: Path, what: str) -> str:
    """`what` names the kind of file, as in 'job file'."""
    if path.is_dir():
        raise Failure(f"{path}: is a directory, not a {what}")
    if not path.exists():
        raise Failure(f"{path}: there is no such file")
    if not path.is_file():
        raise Failure(f"{path}: is not a regular file")
    if path.stat().st_size > TEXT_BYTES_MAX:
        limit = f"{TEXT_BYTES_MAX // 1024**2} MiB"
        raise Failure(f"{path}: is larger than {limit}, so it is not a {what}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Failure(f"{path}: is not text (UTF-8)") from None


def read_named(word: str, what: str, parse: Callable[[str, str], Content]) -> Content:
    """What the file of this name holds. `parse` gets its text and its ending."""
    from pathlib import Path

    if not is_job_file(word):
        fix = "name a .yaml, .toml or .json file"
        raise Failure(f"{units.quoted(word)} is not a {what}; {fix}", USAGE)
    path = Path(word)
    text = read_text(path, what)
    try:
        return parse(text, path.suffix.lower())
    except ValueError as error:
        raise Failure(f"{path}: {error}", REFUSED) from None


def load(text: str, ending: str, example: str = "name: mine") -> dict[Any, Any]:
    """`ending` names the format, as in '.yaml'; `example` is a line that the file could have."""
    if not text.strip():
        raise BadField("", f"the file is empty; it needs at least a line like: {example}")
    try:
        data = _READERS[ending](text)
    except RecursionError:
        raise BadField("", "the file is nested too deeply") from None
    if not isinstance(data, dict):
        raise BadField("", f"the file must hold fields with values, e.g. {example}")
    return data


def check_names(data: dict[Any, Any], known: Collection[str], has: str, where: str = "") -> None:
    """Refuses a field that does not exist; `has` names those that do, if none is similar."""
    for name in data:
        if name not in known:
            raise unknown(name, known, has, where)


def unknown(name: Any, known: Collection[str], has: str, where: str = "") -> BadField:
    import difflib

    from shoal.forms.units import quoted

    close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else has
    return BadField(where, f"there is no field {quoted(str(name))}; {hint}")


def invalid(error: Exception, name: Callable[[str], str] = str) -> BadField:
    """What a struct says of a value; `name` gives the field that people know by its path."""
    message, _, path = str(error).partition(" - at `$.")
    field = name(path.rstrip("`").replace("[...]", ""))
    return BadField(field, message[:1].lower() + message[1:].replace("`", ""))


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
        raise BadField("", f"not YAML{_at(mark.line if mark else None)}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadField("", f"not YAML: {_first_line(error)}") from None


def _read_toml(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise BadField("", f"not TOML: {_first_line(error)}") from None


def _read_json(text: str) -> Any:
    import json

    from shoal.forms.units import quoted

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BadField("", f"{quoted(name)} is given twice")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise BadField("", f"not JSON{_at(error.lineno - 1)}: {error.msg}") from None
    except BadField:
        raise
    except ValueError as error:  # e.g. a number with ten thousand digits
        raise BadField("", f"not JSON: {_first_line(error)}") from None


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
