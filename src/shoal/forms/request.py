"""A request as it is sent, of one job or of a workflow: what was asked for, over a file, over what
the shell brings along."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from shoal.forms import datafile, fields, readers, units
from shoal.forms.failure import BadField
from shoal.forms.fields import AFTER_PATTERN, Table, texts
from shoal.forms.job import to_service, to_spec
from shoal.model.job import JobSpec
from shoal.model.workflow import WorkflowJob

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


# Workflow files: named jobs with the fields of a job file, and fields that all of them share.


JOBS = "jobs"


def is_workflow(data: Mapping[Any, Any]) -> bool:
    return JOBS in data


def workflow_jobs(
    data: Mapping[str, Any], given: Mapping[str, Any], base: Path
) -> tuple[list[WorkflowJob], bool | None]:
    """`given` overrides the fields of every job. The second value: whether to send the folder."""
    shared = {name: value for name, value in data.items() if name != JOBS}
    jobs = data[JOBS]
    if not isinstance(jobs, dict) or not jobs:
        raise BadField(JOBS, "must hold named jobs, e.g. jobs: {train: {command: python train.py}}")
    for field in ("name", "after", "sweep"):
        if field in given or field in shared:
            raise BadField(field, "belongs to a single job of the workflow")
    JOB.check_names(shared)
    found, packs = [], dict[bool | None, None]()
    for name, own in jobs.items():
        try:
            job, pack = _job(str(name), own, shared, given, base, jobs)
        except BadField as error:
            field = f"{name}.{error.field}" if error.field else str(name)
            raise BadField(field, error.message) from None
        found.append(job)
        packs[pack] = None
    return found, next(iter(packs)) if len(packs) == 1 else True


def _job(
    name: str,
    own: Any,
    shared: Mapping[str, Any],
    given: Mapping[str, Any],
    base: Path,
    names: Mapping[str, Any],
) -> tuple[WorkflowJob, bool | None]:
    if isinstance(own, str):
        own = {"command": own}
    if not isinstance(own, dict):
        raise readers.wrong("", own, "a job with fields, e.g. command: python train.py")
    if "name" in own:
        raise BadField("name", "is the job's name in the workflow; leave it out")
    JOB.check_names(own)
    fields = {**shared, **own}
    environment = [readers.environment("env", part.get("env", {})) for part in (shared, own)]
    fields["env"] = environment[0] | environment[1]
    inner, outer = list[str](), list[str]()
    for text in texts("after", fields.pop("after", ())):
        known = text.partition(":")[0] in names
        if not known and not re.fullmatch(AFTER_PATTERN, text):
            quoted = units.quoted(text.partition(":")[0])
            raise BadField("after", f"there is no job {quoted} in this workflow")
        (inner if known else outer).append(text)
    if outer:
        fields["after"] = outer
    spec, pack = complete(JOB, given, resolved(JOB, fields, base))
    return WorkflowJob(name, spec, tuple(inner)), pack


def read_data(path: Path) -> dict[str, Any]:
    """The fields of a job or workflow file as written."""
    text = datafile.read_text(path, "job file")
    return datafile.load(text, path.suffix.lower(), "command: python train.py")
