"""Workflow files: named jobs with the fields of a job file, and fields that all of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.forms import datafile, readers, units
from shoal.forms.after import AFTER_PATTERN, texts
from shoal.forms.failure import BadField
from shoal.forms.request import JOB, complete, resolved
from shoal.model.workflow import WorkflowJob

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
