"""From the words and flags of `shoal run` and `shoal serve` to a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cli.command import given_of
from shoal.forms import datafile, units
from shoal.forms.failure import REFUSED, USAGE, BadField, Failure
from shoal.forms.pack import Note, packed
from shoal.forms.request import JOB, Form, Request, Spec, complete, read_file
from shoal.model.workflow import WorkflowJob

if TYPE_CHECKING:
    from shoal.client import Client


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


def assemble_jobs(
    words: list[str], flags: Mapping[str, Any], name: str = "job"
) -> tuple[list[WorkflowJob], bool | None, bool]:
    """The job, or the jobs of a workflow file; whether to send the folder; whether it is a
    workflow. `name` is for a single job without one."""
    from shoal.forms.request import is_workflow, read_data, workflow_jobs

    if not words:
        raise Failure("COMMAND: is missing; write e.g. -- python train.py", USAGE)
    path = Path(words[0]) if datafile.is_job_file(words[0]) else None
    try:
        data = read_data(path) if path is not None and len(words) == 1 else {}
        if path is not None and is_workflow(data):
            given = given_of(flags)
            if "env" in given:
                given["env"] = parse_env(given["env"], os.environ)
            return (*workflow_jobs(data, given, path.parent), True)
    except BadField as error:
        raise Failure(f"{path}: {error}", REFUSED) from None
    spec, pack = assemble(JOB, words, flags)
    return [WorkflowJob(spec.name or name, spec)], pack, False


def packed_jobs(
    client: Client, jobs: list[WorkflowJob], pack: bool | None, note: Note | None
) -> tuple[WorkflowJob, ...]:
    """As `packed`, for each of them; every line of it is shown once."""
    seen: dict[str, None] = {}

    def once(text: str) -> None:
        if note is not None and text not in seen:
            note(text)
        seen[text] = None

    return tuple(
        msgspec.structs.replace(job, spec=packed(client, job.spec, pack, once)) for job in jobs
    )


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
