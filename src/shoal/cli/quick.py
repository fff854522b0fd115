"""Reading plain values without typer's converters, which load more than all of Shoal's client.

Some versions of typer build a pydantic adapter for every parameter of a command, even for text,
and that takes longer than most commands do. What is plain and right is taken here; whatever is
not goes on to typer, which knows how to complain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


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
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _NotPlain
    if isinstance(value, str) and not (value.removeprefix("-").isdecimal() and len(value) < 16):
        raise _NotPlain
    return int(value)


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
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)

    def process_value(context: Any, value: Any) -> Any:
        try:
            if value is None and parameter.required:
                raise _NotPlain
            ready = None if value is None else read(value)
            if ready is not None and (
                (least is not None and ready < least) or (most is not None and ready > most)
            ):
                raise _NotPlain
        except _NotPlain:
            return slow(context, value)
        callback = parameter.callback
        return ready if callback is None else callback(context, parameter, ready)

    return process_value
