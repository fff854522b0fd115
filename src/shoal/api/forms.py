"""The form of a job: its fields for the page, what is filled in, and a job that is run again."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
from litestar import Controller, Request

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.jobs import KEY_MAX, Key, entered, on_its_own
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.views import job_view
from shoal.calls.page import PageCalls
from shoal.forms.datafile import TEXT_BYTES_MAX
from shoal.forms.failure import BadField
from shoal.forms.fields import COMMON, JOB, Field
from shoal.forms.job import field_of
from shoal.forms.readers import Choice, Count
from shoal.forms.request import CARRIED, read_fields
from shoal.forms.request import JOB as JOB_FORM
from shoal.forms.written import (
    REQUIREMENTS_FILE,
    from_fields,
    from_form,
    to_fields,
    to_file,
    to_form,
    to_words,
)
from shoal.model.hidden import HIDDEN, without_keys
from shoal.model.job import Job, JobSpec
from shoal.model.sweep import ARRAY_COUNT, ARRAY_INDEX, ARRAY_JOB
from shoal.model.views import JobView, Problem

KINDS = {bool: "switch", int: "number", list: "lines", str: "text"}
LONG = ("command", "requirements")  # text of several lines
# Where a form is read by another machine than the one that it is filled in on.
ELSEWHERE = {
    "requirements": "pip requirements, a package on each line.",
    "env": "Variables of the job, NAME=VALUE.",
}
BY_SHOAL = (ARRAY_JOB, ARRAY_INDEX, ARRAY_COUNT)


class FieldView(msgspec.Struct, kw_only=True):
    """A field of a job, as `shoal run` and job files have it."""

    name: str
    flag: str  # empty: it is no flag
    kind: str  # text, long, number, switch, choice, or lines: several values
    help: str
    default: str  # for people
    metavar: str
    group: str
    common: bool  # to be shown first
    choices: list[str]
    least: int | None
    most: int | None


class Filled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A form that was filled in: `fields`, each text, true or a list of lines; or `file`, the text
    of a job file (YAML or JSON). `like`: a job from which come the package and what is hidden.
    `instead`: that job has never started, and is cancelled for this one."""

    fields: dict[str, Any] = {}
    file: str = ""
    like: str = ""
    instead: bool = False
    key: str = ""


class FormView(msgspec.Struct, kw_only=True):
    """`fields` is null if they do not fit into lines of text: then only the file has them."""

    fields: dict[str, Any] | None = None
    file: str = ""
    command_line: str = ""  # empty: flags cannot say it
    notes: list[str] = []  # what else there is to know about the command line
    package: str = ""  # its code, which the new job would run with; empty: none
    like: str = ""
    waits: bool = False  # `like` has never started, so that this one can take its place
    problem: Problem | None = None  # then the rest is empty


class Forms(Controller):
    @handles(PageCalls.fields)
    def fields(self) -> list[FieldView]:
        return [_field(field) for field in JOB.values() if field.targets]

    @handles(PageCalls.form)
    def form(self, reach: Reach, like: Key = "", instead: bool = False) -> FormView:
        job = reach.job(like)
        return _view(without_keys(_again(job, instead)), job)

    @handles(PageCalls.check_form)
    def check(self, reach: Reach, data: Filled) -> FormView:
        job = reach.job(data.like) if data.like else None
        try:
            return _view(_spec(data, job), job)
        except BadField as error:
            return FormView(problem=Problem(message=error.message, field=error.field))

    @handles(PageCalls.submit_form)
    async def submit(self, request: Request[Any, Any, Any], reach: Reach, data: Filled) -> JobView:
        if len(data.key) > KEY_MAX:
            raise Refusal(422, f"is longer than {KEY_MAX} characters", "key")
        if data.instead and not data.like:
            raise Refusal(422, "names the job in whose place this one comes", "like")
        job = reach.job(data.like) if data.like else None
        try:
            spec = _restored(_spec(data, job), job)
        except BadField as error:
            raise Refusal(422, error.message, error.field) from None
        instead = data.like if data.instead else ""
        try:
            job_id = await entered(reach, spec, data.key, instead)
        except Refusal as refused:
            field = field_of(refused.problem.field) or refused.problem.field
            raise Refusal(refused.status, refused.problem.message, field, refused.retry_s) from None
        note(request.scope, on=job_id)
        return job_view(reach, reach.job(job_id))


def _field(field: Field) -> FieldView:
    kind = KINDS[field.takes]
    if isinstance(field.read, Choice):
        kind = "choice"
    if field.name in LONG:
        kind = "long"
    bounds = field.read if isinstance(field.read, Count) else None
    return FieldView(
        name=field.name,
        flag=field.flag if field.heading else "",
        kind=kind,
        help=ELSEWHERE.get(field.name, field.help),
        default="" if field.name == "workdir" else field.default,
        metavar=field.metavar.removesuffix("...").split()[-1] if field.metavar else "",
        group=field.heading,
        common=field.name in COMMON,
        choices=list(field.read.words) if isinstance(field.read, Choice) else [],
        least=bounds.least if bounds else None,
        most=bounds.most if bounds else None,
    )


def _again(job: Job, instead: bool) -> JobSpec:
    """Its request as that of a job of its own."""
    spec = job.spec
    if spec.service:
        raise Refusal(422, f"is a replica of {spec.service}; change the service", "job")
    kept = {"after": spec.after, "begin_ms": spec.begin_ms} if instead else {}
    env = {name: value for name, value in spec.env.items() if name not in BY_SHOAL}
    return msgspec.structs.replace(on_its_own(spec), array="", index=0, env=env, **kept)


def _spec(data: Filled, like: Job | None) -> JobSpec:
    """Without what is hidden."""
    if data.file and len(data.file) > TEXT_BYTES_MAX:
        raise Refusal(422, "is too long", "file")
    fields = read_fields(JOB_FORM, data.file, ".yaml") if data.file else from_form(data.fields)
    more = {}
    if like is not None:
        again = _again(like, data.instead)
        more = {"package": again.package, "user": again.user}
    return from_fields(fields, more)


def _hidden(like: Job | None) -> list[tuple[str, str]]:
    """Wishes for notices as they are shown, and as they are."""
    if like is None:
        return []
    pairs = zip(without_keys(like.spec).notify, like.spec.notify, strict=True)
    return [(shown, real) for shown, real in pairs if shown != real]


def _restored(spec: JobSpec, like: Job | None) -> JobSpec:
    """With what the form hides, where it was left as it is shown."""
    if like is None:
        return spec
    hidden, notify = _hidden(like), []
    for wish in spec.notify:
        found = next((pair for pair in hidden if pair[0] == wish), None)
        if found is not None:
            hidden.remove(found)  # two may look the same
        notify.append(found[1] if found is not None else wish)
    env = {
        name: like.spec.env[name] if value == HIDDEN and name in like.spec.env else value
        for name, value in spec.env.items()
    }
    return msgspec.structs.replace(spec, notify=tuple(notify), env=env)


def _view(spec: JobSpec, like: Job | None) -> FormView:
    """`spec` as it may be shown."""
    fields = to_fields(spec)
    line, notes = _command_line(spec, {shown for shown, _ in _hidden(like)})
    return FormView(
        fields=to_form(fields),
        file=to_file(fields),
        command_line=line,
        notes=notes,
        package=spec.package,
        like=like.id if like is not None else "",
        waits=like is not None and not like.attempt and like.finished_ms is None,
    )


def _command_line(spec: JobSpec, hidden: set[str]) -> tuple[str, list[str]]:
    """What a shell would be told, and what else there is to know about it."""
    said = msgspec.structs.replace(
        spec,
        notify=tuple(wish for wish in spec.notify if wish not in hidden),
        env={name: value for name, value in spec.env.items() if value != HIDDEN},
        workdir="" if spec.package else spec.workdir,
    )
    notes = []
    if (said.notify, said.env) != (spec.notify, spec.env):
        notes.append("What is hidden is not part of the command line.")
    if (taken := [name for name in CARRIED if name in spec.env]) and not spec.image:
        notes.append(f"{', '.join(taken)}: shoal run takes these from the shell it is called in.")
    if spec.package:
        notes.append("Run it in the folder of the code with --pack; its package is not named here.")
    if spec.requirements:
        notes.append(f"Save the list of requirements as {REQUIREMENTS_FILE} first.")
    words = to_words(to_fields(said))
    if words is None:
        notes.append("Flags cannot say all of this. Save the job file, and: shoal run job.yaml")
    return shlex.join(words) if words else "", notes
