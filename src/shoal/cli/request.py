"""From the words and flags of `shoal run` and `shoal serve` to a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.cli.flags import given_of
from shoal.forms import datafile, units
from shoal.forms.failure import REFUSED, USAGE, BadField, Failure
from shoal.forms.request import Form, Request, Spec, complete, read_file


def _as_command(words: list[str]) -> dict[str, Any]:
    return {"command": words}


def assemble(
    form: Form[Spec],
    words: list[str],
    flags: Mapping[str, Any],
    from_words: Callable[[list[str]], dict[str, Any]] = _as_command,
) -> Request[Spec]:
    """`words` are a command, or the name of a file."""
    given = given_of(flags)
    path = Path(words[0]) if datafile.is_job_file(words[0]) else None
    try:
        if "env" in given:
            given["env"] = parse_env(given["env"], os.environ)
        file = _read_file(form, path, words[1:]) if path else from_words(words)
        return complete(form, given, file)
    except BadField as error:
        where = f"{path}: " if path is not None and error.field not in given else ""
        raise Failure(f"{where}{error}", USAGE if path is None else REFUSED) from None


def _read_file(form: Form[Any], path: Path, more: list[str]) -> dict[str, Any]:
    if more:
        message = f"{units.quoted(more[0])} follows the {form.what} file"
        raise Failure(f"{message}; the command is in the file, so give only flags", USAGE)
    return read_file(form, path)


def parse_env(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in environ:
                message = f"{units.quoted(name)} is not set here; write --env NAME=VALUE"
                raise BadField("env", message)
            value = environ[name]
        found[name] = value
    return found
