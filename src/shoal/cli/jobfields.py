"""The fields of a job as people write them, in a file or as flags, checked one by one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shoal.cli import units
from shoal.core.admit import spec_problem
from shoal.model.job import MEMBERS_MAX, TIME_MS_MAX, JobSpec, Restart


class BadJob(ValueError):
    """What is wrong, in which field, and how to mend it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


def to_spec(fields: Mapping[str, Any]) -> JobSpec:
    """Fields in the friendly form -> a JobSpec that the controller would not find fault with."""
    ready: dict[str, Any] = {}
    for name, value in fields.items():
        target, reader = FIELDS[name]
        ready[target] = reader(name, value)
    if "command" not in ready:
        raise BadJob("command", "is missing; say what to run, e.g. command: python train.py")
    _settle_restart(ready)
    try:
        spec = msgspec.convert(ready, JobSpec)
    except msgspec.ValidationError as error:
        raise _as_bad_job(error) from None
    problem = spec_problem(spec)
    if problem is not None:
        raise BadJob(problem.field, problem.message)
    return spec


def _settle_restart(ready: dict[str, Any]) -> None:
    """Retries alone mean: run it again when it fails."""
    if not ready.get("retries"):
        return
    restart = ready.setdefault("restart", Restart.ON_FAILURE)
    if restart is not Restart.ON_FAILURE:
        message = f"have no effect with restart: {restart}; leave one out, or use on-failure"
        raise BadJob("retries", message)


# -- fields -------------------------------------------------------------------------------


def _command(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        text = _unicode(field, value)
        try:
            words = shlex.split(text)
        except ValueError:
            raise BadJob(field, "has a quote that is not closed") from None
    elif isinstance(value, list | tuple):
        words = [_word(field, word) for word in value]
    else:
        raise _wrong(field, value, "text or a list of words, e.g. python train.py")
    if not words:
        raise BadJob(field, "is empty; say what to run, e.g. python train.py")
    return tuple(words)


def _word(field: str, word: Any) -> str:
    if isinstance(word, str):
        return _unicode(field, word)
    if isinstance(word, int) and not isinstance(word, bool):
        return str(word)
    raise BadJob(field, f"has a word that is {_kind(word)}; put it in quotes")


def _env(field: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(field, value, "names with values, e.g. {SEED: 1}")
    return {_env_name(field, name): _env_value(field, name, v) for name, v in value.items()}


def _env_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        fix = "use letters, digits and _, not beginning with a digit"
        raise BadJob(field, f"{units.quoted(str(name))} cannot name a variable; {fix}")
    return name


def _env_value(field: str, name: str, value: Any) -> str:
    if isinstance(value, str):
        return _unicode(field, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    short = units.quoted(name)
    raise BadJob(field, f"{short} is {_kind(value)}; put its value in quotes")


def _whole(least: int, most: int, sense: str) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(field, value, f"a whole number ({sense})")
        if not least <= value <= most:
            told = value if abs(value) < 10**15 else "that"
            raise BadJob(field, f"must be from {least} to {most} ({sense}), not {told}")
        return value

    return read


def _amount(parse_text: Callable[[str], int], most: int, example: str) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _wrong(field, value, f"an amount, e.g. {example}")
        if not isinstance(value, str) and value < 0:
            raise BadJob(field, f"must not be negative; write e.g. {example}")
        text = value if isinstance(value, str) else f"{value:.9f}".rstrip("0").rstrip(".")
        try:
            amount = parse_text(text)
        except units.BadAmount as error:
            raise BadJob(field, str(error)) from None
        if amount > most:
            raise BadJob(field, f"{units.quoted(text)} is too much")
        return amount

    return read


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "text; put it in quotes")
    return _unicode(field, value)


def _name(field: str, value: Any) -> str:
    text = _text(field, value)
    fix = "use up to 63 letters, digits, '.', '_' and '-', beginning with a letter or digit"
    plain = text.isascii() and all(c.isalnum() or c in "._-" for c in text)
    if not (0 < len(text) <= 63 and plain and text[0].isalnum()):
        raise BadJob(field, f"{units.quoted(text)} will not do; {fix}")
    return text


def _restart(field: str, value: Any) -> Restart:
    choices = [rule.value for rule in Restart]
    if value not in choices:
        raise BadJob(field, f"must be one of {', '.join(choices)}, not {units.quoted(str(value))}")
    return Restart(value)


def _workdir(field: str, value: Any) -> str:
    text = _text(field, value)
    if not text:
        raise BadJob(field, "is empty; name a folder, or leave it out")
    return text


def _unicode(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadJob(field, "holds bytes that are not UTF-8 text; it must be text") from None
    return text


_time = _amount(units.duration_ms, TIME_MS_MAX, "90s, 10m or 2h")

# Friendly name -> the field of JobSpec, and what reads it.
FIELDS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "command": ("command", _command),
    "name": ("name", _name),
    "members": ("members", _whole(1, MEMBERS_MAX, "processes that start together")),
    "gpus": ("gpus", _whole(0, 256, "GPUs per member")),
    "cpus": ("cpu_milli", _amount(units.cpu_milli, 10_000_000, "4 or 0.5")),
    "memory": ("memory_mb", _amount(units.memory_mb, 1_000_000_000, "512M or 4G")),
    "env": ("env", _env),
    "workdir": ("workdir", _workdir),
    "priority": ("priority", _whole(-1000, 1000, "higher goes first")),
    "restart": ("restart", _restart),
    "retries": ("retries", _whole(0, 1000, "times it may fail and run again")),
    "backoff": ("backoff_ms", _time),
    "time_limit": ("time_limit_ms", _time),
    "stop_grace": ("stop_grace_ms", _amount(units.duration_ms, 3_600_000, "10s or 2m")),
}


# -- refusals -----------------------------------------------------------------------------


def _wrong(field: str, value: Any, wanted: str) -> BadJob:
    return BadJob(field, f"must be {wanted}, not {_kind(value)}")


def _kind(value: Any) -> str:
    match value:
        case bool():
            return f"true or false ({str(value).lower()})"
        case str():
            return f"the text {units.quoted(value)}"
        case int() | float():
            return (
                f"the number {units.quoted(str(value))[1:-1]}"
                if abs(value) < 10**15
                else "a huge number"
            )
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case None:
            return "nothing"
        case _:
            return f"a {type(value).__name__}"


def _as_bad_job(error: msgspec.ValidationError) -> BadJob:
    """The types are stricter than the readers above in something: say what they say."""
    message, _, path = str(error).partition(" - at `$.")
    target = path.rstrip("`").split("[")[0].split(".")[0]
    names = [name for name, (field, _) in FIELDS.items() if field == target]
    return BadJob(names[0] if names else "", message[:1].lower() + message[1:].replace("`", ""))
