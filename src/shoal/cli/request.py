"""What `shoal run` or `shoal serve` was asked for: flags over file over what the shell brings."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from shoal.forms import datafile, units
from shoal.forms.datafile import is_job_file
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.forms.jobfields import FIELDS, BadJob, to_spec
from shoal.forms.jobfile import read_fields
from shoal.model.job import JobSpec

# So that `python` and what it imports mean the same in the job as in the shell that sent it.
CARRIED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LANG")

Spec = TypeVar("Spec")


class Flags(NamedTuple):
    """The flags that are fields of a job, in the form of a job file; what is None, False or
    empty was not given."""

    name: str | None = None
    members: str | None = None
    gpus: str | None = None
    gpu_memory: str | None = None
    gpu_model: list[str] | None = None
    cpus: str | None = None
    memory: str | None = None
    within: str | None = None
    strict: bool = False
    per_node: int | None = None
    procs_per_node: str | None = None
    whole_nodes: bool = False
    tenant: str | None = None
    priority: int | None = None
    preemptible: bool = False
    checkpoint_every: str | None = None
    estimate: str | None = None
    time_limit: str | None = None
    restart: str | None = None
    retries: int | None = None
    backoff: str | None = None
    stop_grace: str | None = None
    workdir: str | None = None
    requirements: str | None = None


class Form(NamedTuple, Generic[Spec]):
    """A kind of request: its name, its fields, those that are paths, and what they make."""

    what: str
    fields: Collection[str]
    paths: tuple[str, ...]
    from_words: Callable[[list[str]], dict[str, Any]]
    make: Callable[[Mapping[str, Any]], Spec]


JOB = Form("job", FIELDS, ("workdir", "requirements"), lambda words: {"command": words}, to_spec)


def build(words: list[str], flags: Flags, env: list[str]) -> JobSpec:
    return msgspec.structs.replace(assemble(JOB, words, flags._asdict(), env), user=who())


def who() -> str:
    """The user of this machine who asks, for the ledger; empty if nobody knows."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
    return "".join(c for c in name if c.isprintable())[:63]


def packing_wanted(form: Form[Any], words: list[str], flag: bool | None) -> bool | None:
    """By the flag, else by the file; None: nobody said."""
    if flag is not None or not is_job_file(words[0]):
        return flag
    wanted: bool | None = _from_file(form, Path(words[0]), []).get("pack")
    return wanted


def assemble(form: Form[Spec], words: list[str], flags: Mapping[str, Any], env: list[str]) -> Spec:
    """`flags` that are None, False or empty were not given."""
    given = {name: value for name, value in flags.items() if not _is_absent(value)}
    _resolve_all(given, form.paths, Path())
    file = Path(words[0]) if is_job_file(words[0]) else None
    fields = form.from_words(words) if file is None else _from_file(form, file, words[1:])
    try:
        merged = {**fields, **given}
        merged["env"] = {**carried(os.environ), **_table(fields), **parse_env(env, os.environ)}
        merged.setdefault("workdir", _here())
        return form.make(merged)
    except BadJob as error:
        where = f"{file}: " if file is not None and error.field not in given else ""
        raise Failure(f"{where}{error}", USAGE if file is None else REFUSED) from None


def _is_absent(value: Any) -> bool:
    """0 is a value, though Python takes it for False."""
    return value is None or value is False or value == []


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """What the shell brings along; a value that is not text stays behind."""
    return {
        name: environ[name] for name in CARRIED if environ.get(name) and _is_text(environ[name])
    }


def _from_file(form: Form[Spec], path: Path, more: list[str]) -> dict[str, Any]:
    if more:
        message = f"{units.quoted(more[0])} follows the {form.what} file"
        raise Failure(f"{message}; the command stands in the file, so give flags only", USAGE)
    text = datafile.read_text(path, f"{form.what} file")
    try:
        fields = read_fields(text, path.suffix.lower(), form.fields, form.what)
    except BadJob as error:
        raise Failure(f"{path}: {error}") from None
    _resolve_all(fields, form.paths, path.parent)
    return fields


def _resolve_all(fields: dict[str, Any], names: tuple[str, ...], base: Path) -> None:
    for name in names:
        if isinstance(fields.get(name), str) and fields[name]:
            fields[name] = _resolve(name, fields[name], base)


def _resolve(name: str, path: str, base: Path) -> str:
    try:
        return os.path.normpath(Path.cwd() / base / Path(path).expanduser())
    except (OSError, RuntimeError, ValueError) as error:
        raise Failure(f"{name}: {error}") from None


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        message = "workdir: the current directory is gone; name another with --workdir"
        raise Failure(message) from None


def _table(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The file's own environment, if it is one: what is no table is left for the check."""
    env = fields.get("env", {})
    if not isinstance(env, dict):
        to_spec({"command": "x", "env": env})
    return dict(env)


def parse_env(texts: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in environ:
                message = f"{units.quoted(name)} is not set here; write --env NAME=VALUE"
                raise BadJob("env", message)
            value = environ[name]
        found[name] = value
    return found


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
