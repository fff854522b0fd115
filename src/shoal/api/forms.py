"""The form of a job: its fields for the page, what is filled in, and a job that is run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.jobs import KEY_MAX, Key
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.submitting import entered, on_its_own
from shoal.api.views import job_view
from shoal.calls.page import PageCalls
from shoal.forms import units
from shoal.forms.datafile import TEXT_BYTES_MAX, is_job_file
from shoal.forms.failure import BadField
from shoal.forms.fields import COMMON, JOB, Field
from shoal.forms.job import SWEEP, field_of, to_spec
from shoal.forms.readers import Choice, Count, checked_requirements
from shoal.forms.request import CARRIED, read_fields
from shoal.forms.request import JOB as JOB_FORM
from shoal.model.hidden import HIDDEN, without_keys
from shoal.model.job import Job, JobSpec
from shoal.model.sweep import ARRAY_COUNT, ARRAY_INDEX, ARRAY_JOB, IndexRange, Sweep
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


class Forms:
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
    async def submit(self, request: Request, reach: Reach, data: Filled) -> JobView:
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


# From a JobSpec back to what people would have written: the fields of a job file, the lines of a
# form, and the command line of `shoal run`. Read again, each of them makes the same spec.


REQUIREMENTS_FILE = "requirements.txt"
PLAIN = JobSpec(command=("true",))

# -- fields, as a job file has them --------------------------------------------------------


def to_fields(spec: JobSpec) -> dict[str, Any]:
    """Only what differs from the defaults. `requirements` is the list itself, not a file."""
    found: dict[str, Any] = {"command": shlex.join(spec.command)}
    for name, field in JOB.items():
        if field.targets and (value := _written(spec, name, field)) is not None:
            found[name] = value
    return found


def _written(spec: JobSpec, name: str, field: Field) -> Any:
    """None: it need not be said."""
    match name:
        case "command" | "nodes" | "procs_per_node":  # members and per_node say what these made
            return None
        case "members":
            most = f"..{spec.members_max}" if spec.members_max else ""
            return f"{spec.members}{most}" if most or spec.members > 1 else None
        case "gpus":
            return _gpus(spec)
        case "gpu_memory":
            whole = spec.gpu_milli or not spec.gpus  # else it is what `gpus` says
            return memory_exact(spec.gpu_memory_mb) if spec.gpu_memory_mb and whole else None
        case "begin":
            return _moment(spec.begin_ms) if spec.begin_ms else None
    target = field.targets.split()[0]
    if target.startswith(SWEEP):
        return _sweep(spec.sweep, name) if spec.sweep is not None else None
    value = getattr(spec, target)
    return None if value == getattr(PLAIN, target) else _text(target, value)


def _text(target: str, value: Any) -> Any:
    if target.endswith("_ms"):
        return units.duration_exact(value)
    if target.endswith("_mb"):
        return memory_exact(value)
    if target == "cpu_milli":
        return _thousandths(value)
    return list(value) if isinstance(value, tuple) else msgspec.to_builtins(value)


def _gpus(spec: JobSpec) -> str | int | None:
    if spec.gpus == 1 and spec.gpu_milli == 0:
        return memory_exact(spec.gpu_memory_mb)
    if spec.gpus == 1 and spec.gpu_milli < 1000:
        return _thousandths(spec.gpu_milli)
    return spec.gpus or None


HALVING = {"halve": "halve", "by": "by", "max": "highest", "rung": "rung"}


def _sweep(sweep: Sweep, name: str) -> Any:
    if name == "grid":
        return {key: list(values) for key, values in sweep.grid.items()} or None
    if name == "list":
        return [dict(row) for row in sweep.rows] or None
    if name in HALVING:
        value = getattr(sweep, HALVING[name])
        return value if value != getattr(Sweep(), HALVING[name]) else None
    at_most = f"%{sweep.at_most}" if sweep.at_most else ""
    return ",".join(map(_range, sweep.ranges)) + at_most or None


def _range(one: IndexRange) -> str:
    if one.first == one.last and one.step == 1:
        return str(one.first)
    return f"{one.first}-{one.last}" + (f":{one.step}" if one.step > 1 else "")


def memory_exact(mb: int) -> str:
    for unit in ("t", "g"):
        if mb and mb % units.MEGABYTES[unit] == 0:
            return f"{mb // units.MEGABYTES[unit]}{unit.upper()}"
    return f"{mb}M"


def _thousandths(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


LINE_ENDS = "\x85\u2028\u2029"  # to YAML, besides \\n


def to_file(fields: Mapping[str, Any]) -> str:
    """The text of a job file."""
    import yaml

    told = dict(fields)
    text: str = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=1000)
    if any(letter in text for letter in LINE_ENDS):  # YAML would fold them
        text = yaml.safe_dump(told, sort_keys=False, allow_unicode=False, width=1000)
    return text


# -- a form: text, a switch, or lines of text ------------------------------------------------


def to_form(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """None: a value does not fit into one line, so that only a file can hold it."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        field = JOB[name]
        if field.takes is list and name != "command":
            lines = _lines(name, value)
            if lines is None or any("\n" in line or line != line.strip() for line in lines):
                return None
            found[name] = lines
        else:
            found[name] = value if isinstance(value, bool) else str(value)
    return found


def _lines(name: str, value: Any) -> list[str] | None:
    """A value for each time that the flag is given; None: the flag cannot say it."""
    if name in ("env", "label"):
        return [f"{key}={one}" for key, one in value.items()]
    if name == "grid":
        if not all(any(values) and all(map(_in_list, values)) for values in value.values()):
            return None
        return [f"{key}={','.join(values)}" for key, values in value.items()]
    if name == "list":
        if not all(row and all(map(_in_list, row.values())) for row in value):
            return None
        return [",".join(f"{key}={one}" for key, one in row.items()) for row in value]
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _in_list(text: str) -> bool:
    return "," not in text and text == text.strip()


def from_form(form: Mapping[str, Any]) -> dict[str, Any]:
    """What was filled in, as a job file has it. Empty fields were not."""
    found: dict[str, Any] = {}
    for name, value in form.items():
        if name not in JOB or not JOB[name].targets:
            raise BadField("", f"there is no field {units.quoted(name)} in this form")
        if value in ("", [], {}, False, None):
            continue
        if JOB[name].takes is int and isinstance(value, str):
            value = _whole(value)
        elif name == "env" and isinstance(value, list):
            value = _variables(value)
        found[name] = value
    return found


def _whole(text: str) -> Any:
    compact = text.strip().removeprefix("+")
    digits = compact.removeprefix("-")
    return int(compact) if digits.isascii() and digits.isdigit() and len(digits) < 18 else text


def _variables(lines: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = str(line).partition("=")
        if not equals:
            raise BadField("env", f"{units.quoted(name)} has no value; write NAME=VALUE")
        if name.strip() in found:
            raise BadField("env", f"{units.quoted(name.strip())} is given twice")
        found[name.strip()] = value
    return found


def from_fields(fields: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> JobSpec:
    """The job. Unlike in a file of the user's own, `requirements` is the list itself: nothing here
    names a file of the machine that reads it."""
    given = {name: value for name, value in fields.items() if JOB[name].targets}
    rest = dict(more or {})
    if (listed := given.pop("requirements", None)) is not None:
        if not isinstance(listed, str):
            raise BadField("requirements", "must be text: a package on each line")
        rest["requirements"] = checked_requirements("requirements", listed)
    return to_spec(given, rest)


# -- the command line ------------------------------------------------------------------------


def to_words(fields: Mapping[str, Any]) -> list[str] | None:
    """`shoal run ...`; None: flags cannot say it, only a file can. Variables that `shoal run` takes
    along from the shell are not repeated, and the list of requirements is a file's."""
    command = shlex.split(fields["command"])
    if is_job_file(command[0]):
        return None  # it would be read
    words = ["shoal", "run"]
    for name, value in fields.items():
        field = JOB[name]
        if name == "command":
            continue
        if name == "env" and "image" not in fields:
            value = {key: one for key, one in value.items() if key not in CARRIED}
        short = field.metavar.split()[0] if field.metavar.startswith("-") else field.flag
        if field.takes is bool:
            words.append(short)
        elif field.takes is list:
            lines = _lines(name, value)
            if lines is None:
                return None
            words += [word for line in lines for word in (short, line)]
        else:
            words += [short, REQUIREMENTS_FILE if name == "requirements" else str(value)]
    return [*words, "--", *command]
