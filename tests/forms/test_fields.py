"""Flags, files, keywords, the specs and the page of fields cannot differ from the table."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest

import shoal as package
from shoal.cli.command import Option
from shoal.cli.verbs.run import run
from shoal.cli.verbs.services import serve
from shoal.forms.failure import BadField
from shoal.forms.fields import JOB, SERVICE, Field, Table
from shoal.forms.policy import to_text
from shoal.forms.readers import Count
from shoal.forms.request import JOB as JOB_FORM
from shoal.forms.request import read_fields
from shoal.model.job import JobSpec, Restart, Within
from shoal.model.policy import Policy
from shoal.model.service import Rollout, Route, Routing, ServiceSpec
from shoal.model.sweep import Sweep
from tests.cli.conftest import Shoal

DOCS = Path(__file__).parents[2] / "docs"
# What a job has beyond its fields: who sent it and what was packed, and what replicas belong to.
# What fields set on the way to members and members_per_node.
SHORTHANDS = ("processes", "nodes", "nodes_max")
NOT_FIELDS = {
    *("workflow", "schedule", "scheduled_ms", "package", "user", "service", "version"),
    *("array", "index"),
}
ALL = [*JOB.values(), *[field for name, field in SERVICE.items() if JOB.get(name) != field]]


def markdown(table: Table) -> str:
    """The rows of the page, under the headings of the help."""
    lines = []
    for heading in dict.fromkeys(field.heading for field in table.values()):
        lines += ["", f"### {heading}" if heading else "### Required", ""]
        lines += ["| field | default | meaning |", "| --- | --- | --- |"]
        for field in table.values():
            if field.heading == heading:
                short = field.metavar.split()[0] if field.metavar.startswith("-") else ""
                name = f"`{field.name}`" + (f" (`{short}`)" if short else "")
                lines.append(f"| {name} | {field.default} | {field.help} |")
    return "\n".join(lines) + "\n"


PARTS = {
    "job": ("job-files.md", markdown(JOB)),
    "service": ("job-files.md", markdown(SERVICE)),
    "policy": ("scheduling.md", "\n" + textwrap.indent(to_text(Policy()), "    ")),
}


def with_fields(text: str, what: str) -> str:
    """The page with the part as it should be."""
    before, begin, rest = text.partition(f"<!-- {what} fields -->\n")
    _, end, after = rest.partition(f"<!-- end of {what} fields -->")
    assert begin and end
    return before + begin + PARTS[what][1] + "\n" + end + after


@pytest.mark.parametrize("what", PARTS)
def test_the_documentation_of_fields_is_up_to_date(what: str) -> None:
    text = (DOCS / PARTS[what][0]).read_text()
    assert with_fields(text, what) == text, "run: python -m tests.forms.test_fields"


@pytest.mark.parametrize(("verb", "table"), [(run, JOB), (serve, SERVICE)])
def test_the_flags_are_the_fields(verb: click.Command, table: Table) -> None:
    shared = (
        "tty",
        "cron",
        "timezone",
        "overlap",
        "missed",
        "file",
        "wait",
        "no_wait",
        "json",
        "home",
        "context",
    )
    options = {
        option.name: option
        for option in verb.params
        if isinstance(option, Option) and option.name not in shared
    }
    flags = {name: field for name, field in table.items() if field.heading}
    assert list(options) == list(flags)
    for name, field in flags.items():
        assert field.flag in options[name].opts
        assert (options[name].help, options[name].heading) == (field.text, field.heading)


@pytest.mark.parametrize("field", ALL, ids=lambda field: field.name)
def test_a_field_says_what_it_is_in_a_sentence(field: Field) -> None:
    assert field.help.endswith(".")
    assert field.help[0].isupper() or field.help[0].isdigit() or field.help.startswith("pip ")


def targets(table: Table) -> dict[str, Field]:
    return {target: field for field in table.values() for target in field.targets.split()}


def struct_field(target: str, spec: type) -> msgspec.structs.FieldInfo:
    part, _, name = target.rpartition(".")
    if part in ("route", "sweep"):
        spec = Route if part == "route" else Sweep
    elif part:
        spec = type(msgspec.structs.fields(spec)[_position(spec, part)].default)
    return msgspec.structs.fields(spec)[_position(spec, name)]


def _position(spec: type, name: str) -> int:
    return [field.name for field in msgspec.structs.fields(spec)].index(name)


def own_targets(table: Table, spec: type) -> list[tuple[str, Field, msgspec.structs.FieldInfo]]:
    return [
        (target, field, struct_field(target, spec))
        for target, field in targets(table).items()
        if target not in SHORTHANDS and not (spec is ServiceSpec and field.name in JOB)
    ]


TARGETS = [*own_targets(JOB, JobSpec), *own_targets(SERVICE, ServiceSpec)]


def test_every_part_of_a_job_has_a_field() -> None:
    parts = {field.name for field in msgspec.structs.fields(JobSpec)}
    named = {target.partition(".")[0] for target in targets(JOB)}
    assert parts == (named - set(SHORTHANDS)) | NOT_FIELDS


@pytest.mark.parametrize(("target", "field", "info"), TARGETS, ids=lambda part: str(part)[:30])
def test_bounds_are_those_of_the_spec(
    target: str, field: Field, info: msgspec.structs.FieldInfo
) -> None:
    if not isinstance(field.read, Count) or target == "route.rate_per_s" or target == "route.port":
        return  # 0 means none in these two specs, and a field that is left out says that
    meta = next(part for part in get_args(info.type) if isinstance(part, msgspec.Meta))
    assert (field.read.least, field.read.most) == (meta.ge, meta.le)


@pytest.mark.parametrize(("target", "field", "info"), TARGETS, ids=lambda part: str(part)[:30])
def test_the_default_that_is_shown_is_the_real_one(
    target: str, field: Field, info: msgspec.structs.FieldInfo
) -> None:
    prose = {"workdir", "pack"}
    if not field.default or field.name in prose or "max" in target or "gpu_m" in target:
        return
    text: Any = int(field.default) if field.takes is int else field.default
    found = field.read(field.name, text)
    if isinstance(found, tuple) and len(targets := field.targets.split()) > 1:
        found = found[targets.index(target)] if target in targets else found[0]
    assert found == info.default


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        (JOB["within"], Within),
        (JOB["restart"], Restart),
        (SERVICE["route"], Routing),
        (SERVICE["rollout"], Rollout),
    ],
)
def test_the_choices_are_those_of_the_spec(field: Field, choices: type[Within]) -> None:
    with pytest.raises(BadField, match=f"must be one of {', '.join(choices)}, not 'zzz'"):
        field.read(field.name, "zzz")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("memory", "4 X", "memory: '4 X' is not an amount of memory; write e.g. 512M, 4G or 1.5T"),
        ("restart", "maybe", "restart: must be one of never, on-node-loss, on-failure"),
        ("gpus", "1.5", "gpus: '1.5' is not a number of GPUs; write 1 or 2"),
        ("priority", 5000, "priority: must be from -1000 to 1000 (higher goes first), not 5000"),
    ],
)
def test_a_flag_a_file_and_a_keyword_are_refused_with_the_same_words(
    name: str, value: Any, says: str, shoal: Shoal, tmp_path: Path
) -> None:
    assert says in shoal("run", JOB[name].flag, str(value), "--", "true").err
    path = tmp_path / "job.yaml"
    path.write_text(f"command: 'true'\n{name}: {value}\n")
    assert f"{path}: {says}" in shoal("run", str(path)).err
    with pytest.raises(package.ShoalError) as caught:
        package.Client("http://127.0.0.1:1", "").run("true", **{name: value})
    assert str(caught.value).startswith(says)
    assert caught.value.field == name


def test_a_keyword_that_is_not_a_field_is_refused_as_in_a_file() -> None:
    with pytest.raises(BadField) as in_file:
        read_fields(JOB_FORM, "command: x\ngpuz: 1", ".yaml")
    with pytest.raises(package.ShoalError) as keyword:
        package.Client("http://127.0.0.1:1", "").run("x", gpuz=1)
    assert str(in_file.value) == str(keyword.value)
    assert "did you mean 'gpus'?" in str(keyword.value)


def test_the_help_of_the_client_lists_every_field() -> None:
    for method, table in ((package.Client.run, JOB), (package.Client.serve, SERVICE)):
        for name, field in table.items():
            assert f"{name}: {field.text}" in (method.__doc__ or "")


if __name__ == "__main__":
    for what, (name, _) in PARTS.items():
        (DOCS / name).write_text(with_fields((DOCS / name).read_text(), what))
