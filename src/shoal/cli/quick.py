"""Reading plain values without typer's converters, which load more than all of Shoal's client.

Some versions of typer build a pydantic adapter for every parameter of a command, even for text,
and that takes longer than most commands do. Text, numbers, flags and paths are read here instead;
whatever else there is goes on to typer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.forms.failure import USAGE, Failure

# More than any number here may have; Python itself refuses thousands.
NUMBER_FIGURES_MAX = 16


class _NotPlain(Exception):
    pass


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _NotPlain
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not value:
        raise _NotPlain
    return [_text(one) for one in value]


def _number(value: Any) -> int:
    """As text it has come from the user, who is told if it is none."""
    if isinstance(value, str):
        if not (value.removeprefix("-").isdecimal() and value.isascii()):
            raise Failure(f"{value[:40]!r} is no whole number", USAGE)
        if len(value) > NUMBER_FIGURES_MAX:
            raise Failure("that number is too large", USAGE)
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _NotPlain
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NotPlain
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise _NotPlain
    return Path(value)


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    list[str]: _texts,
    int: _number,
    bool: _flag,
    Path: _path,
}


def quicken(parameters: list[Any]) -> list[Any]:
    """For the typer that has slow converters; others are left alone, for they are quick."""
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)
        read = _PLAIN.get(getattr(descriptor, "annotation", None))
        if read is not None and "process_value" not in vars(parameter):
            parameter.process_value = _process(parameter, read)
    return parameters


def _process(parameter: Any, read: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    slow = parameter.process_value

    def process_value(context: Any, value: Any) -> Any:
        if value is None and parameter.required:
            return slow(context, value)
        try:
            ready = None if value is None else read(value)
            _check_range(parameter, ready)
        except _NotPlain:
            return slow(context, value)
        except Failure as failure:
            name = max(parameter.opts, key=len)
            raise Failure(f"{name}: {failure.message}", failure.code) from None
        callback = parameter.callback
        return ready if callback is None else callback(context, parameter, ready)

    return process_value


def _check_range(parameter: Any, value: Any) -> None:
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if value is None:
        return
    if least is not None and value < least:
        raise Failure(f"must be at least {least}, not {value}", USAGE)
    if most is not None and value > most:
        raise Failure(f"must be at most {most}, not {value}", USAGE)
