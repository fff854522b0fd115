"""From a JobSpec back to what people would have written: the fields of a job file, the lines of a
form, and the command line of `shoal run`. Read again, each of them makes the same spec."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import yaml

from shoal.forms import units
from shoal.forms.datafile import is_job_file
from shoal.forms.failure import BadField
from shoal.forms.fields import JOB, Field
from shoal.forms.job import SWEEP, to_spec
from shoal.forms.request import CARRIED
from shoal.forms.requirements import checked_requirements
from shoal.model.job import JobSpec
from shoal.model.sweep import IndexRange, Sweep

REQUIREMENTS_FILE = "requirements.txt"
PLAIN = JobSpec(command=("true",))

# -- fields, as a job file has them --------------------------------------------------------


def to_fields(spec: JobSpec) -> dict[str, Any]:
    """Only what differs from the defaults. `requirements` is the list itself, not a file."""
    found: dict[str, Any] = {"command": shlex.join(spec.command)}
    for name, field in JOB.items():
        if field.targets and (value := _written(spec, name, field)) is not None:
            found[name] = value
    return found


def _written(spec: JobSpec, name: str, field: Field) -> Any:
    """None: it need not be said."""
    match name:
        case "command" | "nodes" | "procs_per_node":  # members and per_node say what these made
            return None
        case "members":
            most = f"..{spec.members_max}" if spec.members_max else ""
            return f"{spec.members}{most}" if most or spec.members > 1 else None
        case "gpus":
            return _gpus(spec)
        case "gpu_memory":
            whole = spec.gpu_milli or not spec.gpus  # else it is what `gpus` says
            return memory_exact(spec.gpu_memory_mb) if spec.gpu_memory_mb and whole else None
        case "begin":
            return _moment(spec.begin_ms) if spec.begin_ms else None
    target = field.targets.split()[0]
    if target.startswith(SWEEP):
        return _sweep(spec.sweep, name) if spec.sweep is not None else None
    value = getattr(spec, target)
    return None if value == getattr(PLAIN, target) else _text(target, value)


def _text(target: str, value: Any) -> Any:
    if target.endswith("_ms"):
        return units.duration_exact(value)
    if target.endswith("_mb"):
        return memory_exact(value)
    if target == "cpu_milli":
        return _thousandths(value)
    return list(value) if isinstance(value, tuple) else msgspec.to_builtins(value)


def _gpus(spec: JobSpec) -> str | int | None:
    if spec.gpus == 1 and spec.gpu_milli == 0:
        return memory_exact(spec.gpu_memory_mb)
    if spec.gpus == 1 and spec.gpu_milli < 1000:
        return _thousandths(spec.gpu_milli)
    return spec.gpus or None


def _sweep(sweep: Sweep, name: str) -> Any:
    if name == "grid":
        return {key: list(values) for key, values in sweep.grid.items()} or None
    if name == "list":
        return [dict(row) for row in sweep.rows] or None
    at_most = f"%{sweep.at_most}" if sweep.at_most else ""
    return ",".join(map(_range, sweep.ranges)) + at_most or None


def _range(one: IndexRange) -> str:
    if one.first == one.last and one.step == 1:
        return str(one.first)
    return f"{one.first}-{one.last}" + (f":{one.step}" if one.step > 1 else "")


def memory_exact(mb: int) -> str:
    for unit in ("t", "g"):
        if mb and mb % units.MEGABYTES[unit] == 0:
            return f"{mb // units.MEGABYTES[unit]}{unit.upper()}"
    return f"{mb}M"


def _thousandths(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


LINE_ENDS = "\x85\u2028\u2029"  # to YAML, besides \\n


def to_file(fields: Mapping[str, Any]) -> str:
    """The text of a job file."""
    told = dict(fields)
    text: str = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=1000)
    if any(letter in text for letter in LINE_ENDS):  # YAML would fold them
        text = yaml.safe_dump(told, sort_keys=False, allow_unicode=False, width=1000)
    return text


# -- a form: text, a switch, or lines of text ------------------------------------------------


def to_form(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """None: a value does not fit into one line, so that only a file can hold it."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        field = JOB[name]
        if field.takes is list and name != "command":
            lines = _lines(name, value)
            if lines is None or any("\n" in line or line != line.strip() for line in lines):
                return None
            found[name] = lines
        else:
            found[name] = value if isinstance(value, bool) else str(value)
    return found


def _lines(name: str, value: Any) -> list[str] | None:
    """A value for each time that the flag is given; None: the flag cannot say it."""
    if name in ("env", "label"):
        return [f"{key}={one}" for key, one in value.items()]
    if name == "grid":
        if not all(any(values) and all(map(_in_list, values)) for values in value.values()):
            return None
        return [f"{key}={','.join(values)}" for key, values in value.items()]
    if name == "list":
        if not all(row and all(map(_in_list, row.values())) for row in value):
            return None
        return [",".join(f"{key}={one}" for key, one in row.items()) for row in value]
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _in_list(text: str) -> bool:
    return "," not in text and text == text.strip()


def from_form(form: Mapping[str, Any]) -> dict[str, Any]:
    """What was filled in, as a job file has it. Empty fields were not."""
    found: dict[str, Any] = {}
    for name, value in form.items():
        if name not in JOB or not JOB[name].targets:
            raise BadField("", f"there is no field {units.quoted(name)} in this form")
        if value in ("", [], {}, False, None):
            continue
        if JOB[name].takes is int and isinstance(value, str):
            value = _whole(value)
        elif name == "env" and isinstance(value, list):
            value = _variables(value)
        found[name] = value
    return found


def _whole(text: str) -> Any:
    compact = text.strip().removeprefix("+")
    digits = compact.removeprefix("-")
    return int(compact) if digits.isascii() and digits.isdigit() and len(digits) < 18 else text


def _variables(lines: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = str(line).partition("=")
        if not equals:
            raise BadField("env", f"{units.quoted(name)} has no value; write NAME=VALUE")
        if name.strip() in found:
            raise BadField("env", f"{units.quoted(name.strip())} is given twice")
        found[name.strip()] = value
    return found


def from_fields(fields: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> JobSpec:
    """The job. Unlike in a file of the user's own, `requirements` is the list itself: nothing here
    names a file of the machine that reads it."""
    given = {name: value for name, value in fields.items() if JOB[name].targets}
    rest = dict(more or {})
    if (listed := given.pop("requirements", None)) is not None:
        if not isinstance(listed, str):
            raise BadField("requirements", "must be text: a package on each line")
        rest["requirements"] = checked_requirements("requirements", listed)
    return to_spec(given, rest)


# -- the command line ------------------------------------------------------------------------


def to_words(fields: Mapping[str, Any]) -> list[str] | None:
    """`shoal run ...`; None: flags cannot say it, only a file can. Variables that `shoal run` takes
    along from the shell are not repeated, and the list of requirements is a file's."""
    command = shlex.split(fields["command"])
    if is_job_file(command[0]):
        return None  # it would be read
    words = ["shoal", "run"]
    for name, value in fields.items():
        field = JOB[name]
        if name == "command":
            continue
        if name == "env" and "image" not in fields:
            value = {key: one for key, one in value.items() if key not in CARRIED}
        short = field.metavar.split()[0] if field.metavar.startswith("-") else field.flag
        if field.takes is bool:
            words.append(short)
        elif field.takes is list:
            lines = _lines(name, value)
            if lines is None:
                return None
            words += [word for line in lines for word in (short, line)]
        else:
            words += [short, REQUIREMENTS_FILE if name == "requirements" else str(value)]
    return [*words, "--", *command]
