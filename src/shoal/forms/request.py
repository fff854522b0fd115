"""A request as it is sent: what was asked for, over a file, over what the shell brings along."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from shoal.forms import datafile, fields, readers
from shoal.forms.failure import BadField
from shoal.forms.fields import Table
from shoal.forms.job import to_spec
from shoal.forms.service import to_service
from shoal.model.job import JobSpec

# With these, `python` and its imports mean the same in the job as in the shell that sent it.
CARRIED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LANG")

NAMED_MAX = 24  # fields in a refusal, which is one line

Spec = TypeVar("Spec")


class Form(NamedTuple, Generic[Spec]):
    """A kind of request: its name, its fields, and the spec that they make."""

    what: str
    fields: Table
    make: Callable[[Mapping[str, Any]], Spec]

    def check_names(self, given: dict[Any, Any]) -> None:
        names = list(self.fields)
        more = len(names) - NAMED_MAX
        rest = f" and {more} more; docs/job-files.md has all" if more > 0 else ""
        has = f"a {self.what} has {', '.join(names[:NAMED_MAX])}{rest}"
        datafile.check_names(given, self.fields, has)


class Request(NamedTuple, Generic[Spec]):
    """`pack` is None if neither flag nor file has it."""

    spec: Spec
    pack: bool | None


def _own_job(given: Mapping[str, Any]) -> JobSpec:
    return msgspec.structs.replace(to_spec(given), user=user())


JOB = Form("job", fields.JOB, _own_job)
SERVICE = Form("service", fields.SERVICE, to_service)


def complete(
    form: Form[Spec], given: Mapping[str, Any], file: Mapping[str, Any] | None = None
) -> Request[Spec]:
    """`given` overrides the fields of the file. Relative paths in it count from here."""
    file = file or {}
    whole = {**file, **resolved(form, given, Path())}
    # What this shell has says nothing about the inside of an image.
    environment = {} if whole.get("image") else carried(os.environ)
    for source in (file, given):
        environment |= readers.environment("env", source.get("env", {}))
    whole["env"] = environment
    if "workdir" not in whole:
        whole["workdir"] = _here()
    return Request(form.make(whole), whole.get("pack"))


def read_fields(form: Form[Any], text: str, ending: str) -> dict[str, Any]:
    """The fields of a file as written, with their names checked."""
    data = datafile.load(text, ending, "command: python train.py")
    form.check_names(data)
    return data


def read_file(form: Form[Any], path: Path) -> dict[str, Any]:
    """The fields of a file; relative paths in it count from its folder."""
    if not datafile.is_job_file(path.name):
        raise BadField("", f"is not a {form.what} file: name a .yaml, .toml or .json file")
    text = datafile.read_text(path, f"{form.what} file")
    return resolved(form, read_fields(form, text, path.suffix.lower()), path.parent)


def resolved(form: Form[Any], given: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """With absolute paths; relative ones count from `base`."""
    ready = dict(given)
    for name, value in given.items():
        field = form.fields[name]
        if field.read is readers.certificate and readers.names_secret(str(value)):
            continue
        if field.is_path and isinstance(value, str | os.PathLike) and value:
            try:
                ready[name] = os.path.normpath(Path.cwd() / base / Path(value).expanduser())
            except (OSError, RuntimeError, ValueError) as error:
                raise BadField(name, str(error)) from None
    return ready


def user() -> str:
    """The user of this machine who asks, for the ledger; empty if it is not known."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
    return "".join(c for c in name if c.isprintable())[:63]


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the shell that go along, except values that are not text."""
    return {name: value for name in CARRIED if (value := environ.get(name)) and _is_text(value)}


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise BadField("workdir", "the current directory is gone; name another") from None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
