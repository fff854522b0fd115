"""A spec that is written down, as a file, a form or a command line, is the same when it is read."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shoal.api.forms import (
    from_fields,
    from_form,
    to_fields,
    to_file,
    to_form,
    to_words,
)
from shoal.cli.request import assemble
from shoal.cli.verbs.run import run
from shoal.forms.failure import BadField
from shoal.forms.fields import JOB
from shoal.forms.request import CARRIED, read_fields
from shoal.forms.request import JOB as JOB_FORM
from shoal.model.job import JobSpec

WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TIME = st.integers(1, 10**8).map(lambda ms: f"{ms}ms") | st.sampled_from(["90s", "2h", "1h30m"])
MEMORY = st.integers(1, 10**6).map(lambda mb: f"{mb}M") | st.sampled_from(["4G", "1.5T"])
LABEL = st.sampled_from(["zone", "pool", "rack.example.com/row"])
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    "members": st.sampled_from([4, "2..8", "4..4"]),
    "nodes": st.sampled_from([4, "2..8"]),
    "launcher": st.just(True),
    "interactive": st.just(True),
    "gpus": st.sampled_from([1, 8, 0.5, "0.125", "20G", "3000M"]),
    "gpu_memory": MEMORY,
    "gpu_model": st.lists(WORD, min_size=1, max_size=2),
    "cpus": st.sampled_from([0, 4, 0.5, "0.001"]),
    "memory": MEMORY,
    "within": st.sampled_from(["node", "rack"]),
    "strict": st.just(True),
    "per_node": st.sampled_from([1, 2]),
    "procs_per_node": st.sampled_from([2, "gpu"]),
    "whole_nodes": st.just(True),
    "where": st.lists(st.sampled_from(["a=b", "!c", "d!=e", "f=g|h"]), min_size=1, unique=True),
    "tolerates": st.sampled_from([["*"], ["spot", "a=b"]]),
    "spread": LABEL,
    "together": LABEL,
    "cluster": st.sampled_from(["any", "west,east", "price<2.5,region=eu"]),
    "if_cut": st.sampled_from(["30m", "90s"]),
    "array": st.sampled_from(["0-99", "0-9:3", "1,5-7%8", "%4", "7-7:2"]),
    "grid": st.dictionaries(NAME, st.lists(VALUE, min_size=1, max_size=3), min_size=1, max_size=2),
    "list": NAME.flatmap(
        lambda name: st.lists(st.fixed_dictionaries({name: VALUE}), min_size=1, max_size=3)
    ),
    "halve": st.sampled_from([2, 3, 16]),
    "by": st.sampled_from(["accuracy", "loss"]),
    "max": st.just(True),
    "rung": st.sampled_from([1, 90]),
    "tenant": st.sampled_from(["lab", "default"]),
    "priority": st.integers(-1000, 1000),
    "preemptible": st.just(True),
    "no_sleep": st.just(True),
    "checkpoint_every": TIME,
    "estimate": TIME,
    "time_limit": TIME,
    "label": st.dictionaries(LABEL, st.sampled_from(["a", "1.5", ""]), min_size=1),
    "notify": st.sampled_from([["failed=https://example.com/x"], ["mail:me@example.com"]]),
    "after": st.sampled_from([["j7"], ["j7:any", "j8.3:fail"]]),
    "begin": st.sampled_from(["in 2h", "2031-11-17 03:00", "2031-11-17T03:00:00.125+01:00"]),
    "restart": st.sampled_from(["never", "on-node-loss", "on-failure"]),
    "retries": st.integers(1, 1000),
    "backoff": TIME,
    "stop_grace": st.sampled_from(["0s", "10s", "2m"]),
    "env": st.dictionaries(NAME, WORD, min_size=1, max_size=3),
    "secret": st.sampled_from([["token"], ["token=HF_TOKEN"], ["token=/hf"]]),
    "encrypt": st.just(True),
    "encrypt_network": st.just(True),
    "volume": st.sampled_from([["/data/x:data:ro"], ["https://example.com/a.tar:a"]]),
    "volume_shard": st.just(["a"]),
    "volume_lazy": st.just(["a"]),
    "image": st.just("docker.io/pytorch/pytorch:2.4"),
    "workdir": st.sampled_from(["/srv/my code", "/a'b"]),
    "requirements": st.just("numpy>=2\ntorch\n"),
}
COMMAND = st.lists(WORD, min_size=1, max_size=4).filter(lambda words: bool(words[0].strip()))
WRITTEN = st.tuples(COMMAND, st.fixed_dictionaries({}, optional=FIELDS))


def _possible(command: list[str], fields: dict[str, Any]) -> JobSpec:
    """Many combinations contradict each other: of those, only the least part is kept."""
    kept: dict[str, Any] = {"command": command}
    spec = from_fields(kept)
    for name, value in fields.items():
        try:
            spec = from_fields({**kept, name: value})
            kept[name] = value
        except BadField:
            continue
    return spec


def test_every_field_is_tried() -> None:
    assert set(FIELDS) == set(JOB) - {"command", "pack"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(WRITTEN)
def test_a_job_that_is_written_down_is_the_same_when_it_is_read(
    written: tuple[list[str], dict[str, Any]],
) -> None:
    spec = _possible(*written)
    fields = to_fields(spec)
    assert from_fields(fields) == spec, "as fields"
    assert from_fields(read_fields(JOB_FORM, to_file(fields), ".yaml")) == spec, "as a file"
    form = to_form(fields)
    if form is not None:
        assert from_fields(from_form(form)) == spec, "as a form"


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """What `shoal run` would send."""
    seen: list[JobSpec] = []

    def catch(words: tuple[str, ...], tty: bool, wait: bool, json: bool, **flags: Any) -> None:
        for name in ("file", "home", "context", "cron", "timezone", "overlap", "missed"):
            flags.pop(name, None)
        seen.append(assemble(JOB_FORM, list(words), flags).spec)

    with monkeypatch.context() as patch:
        patch.setattr(run, "callback", catch)
        run.main(words, standalone_mode=False)
    return seen[0]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(written=WRITTEN)
def test_the_command_line_makes_the_same_job(
    written: tuple[list[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    spec = _possible(*written)
    words = to_words(to_fields(spec))
    assume(words is not None)
    assert words is not None
    again = shlex.split(shlex.join(words))
    assert again == words, "as a shell reads it"
    place = tmp_path_factory.getbasetemp()
    (place / "requirements.txt").write_text(spec.requirements)
    with monkeypatch.context() as patch:
        patch.chdir(place)
        found = parsed(again[2:], monkeypatch)
    here = msgspec.structs.replace(
        found,
        user=spec.user,
        env={key: value for key, value in found.env.items() if spec.image or key not in CARRIED},
        workdir=found.workdir if spec.workdir else "",
    )
    assert here == spec


def test_what_flags_cannot_say_is_left_to_a_file() -> None:
    grid = from_fields({"command": "echo {x}", "grid": {"x": ["a,b", "c"]}})
    assert to_words(to_fields(grid)) is None
    assert to_form(to_fields(grid)) is None
    assert to_words(to_fields(from_fields({"command": "job.yaml"}))) is None
    lines = from_fields({"command": "true", "env": {"A": "b\nc"}})
    assert to_form(to_fields(lines)) is None
    assert to_words(to_fields(lines)) == ["shoal", "run", "--env", "A=b\nc", "--", "true"]


@pytest.mark.parametrize(
    ("form", "field", "says"),
    [
        ({"gpus": "1.5"}, "gpus", "is not a number of GPUs"),
        ({"priority": "high"}, "priority", "must be a whole number"),
        ({"env": ["A"]}, "env", "'A' has no value; write NAME=VALUE"),
        ({"env": ["A=1", "A=2"]}, "env", "'A' is given twice"),
        ({"requirements": "-r /etc/passwd"}, "requirements", "names a file of this machine"),
        ({"requirements": ["a"]}, "requirements", "must be text"),
        ({"retries": "3", "restart": "never"}, "retries", "have no effect"),
        ({"pack": True}, "", "there is no field 'pack'"),
        ({"gpuz": "1"}, "", "there is no field 'gpuz'"),
        ({}, "command", "is missing"),
    ],
)
def test_a_wrong_field_is_named(form: dict[str, Any], field: str, says: str) -> None:
    command = {} if field == "command" else {"command": "true"}
    with pytest.raises(BadField) as caught:
        from_fields(from_form({**command, **form}))
    assert caught.value.field == field
    assert says in str(caught.value)


def test_a_list_of_requirements_is_never_a_file_of_the_head(tmp_path: Any) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("secret-package\n")
    spec = from_fields(from_form({"command": "true", "requirements": str(path)}))
    assert spec.requirements == str(path), "it is the list, and pip will say that it is none"
