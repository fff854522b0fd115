"""Applies a script's function to lines of JSON: what a worker of `shoal map` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.tasks.functions import from_script


class LineFunction:
    """Sent by name and loaded in the worker, so the client never imports the script."""

    def __init__(self, path: str, name: str) -> None:
        self._where = path, name

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return line_function, self._where

    def __call__(self, line: bytes) -> bytes:
        return line_function(*self._where)(line)


class InitFunction(LineFunction):
    """Called once in each worker, without arguments."""

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return from_script, self._where


def line_function(path: str, name: str) -> Callable[[bytes], bytes]:
    import msgspec

    function = from_script(path, name)
    decode, encode = msgspec.json.decode, msgspec.json.Encoder(enc_hook=_plain).encode

    def run(line: bytes) -> bytes:
        return encode(function(decode(line)))

    return run


def _plain(value: Any) -> Any:
    """Converts arrays and tensors; the function must turn other types into JSON itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a result of type {type(value).__name__} cannot be written as JSON")
