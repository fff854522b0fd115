"""Job files: what is written is what is asked for, and what is wrong is named."""

from __future__ import annotations

import contextlib
import json
import string
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.forms.failure import BadField
from shoal.forms.job import to_spec
from shoal.forms.request import JOB, read_fields
from shoal.model.job import JobSpec, Restart, Within

# What a process can be given: any text but NUL.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
PLAIN = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)

# Of these some go together in one way only, so each is drawn as a whole.
SIZES = st.one_of(
    st.builds(lambda members: {"members": members}, st.integers(1, 16_384)),
    st.builds(
        lambda least, more: {"members": least, "members_max": least + more},
        st.integers(1, 8_000),
        st.integers(0, 8_000),
    ),
    st.builds(
        lambda nodes, each: {"members": nodes * each, "members_per_node": each},
        st.integers(1, 100),
        st.integers(1, 100),
    ),
)
MODELS = st.lists(PLAIN, max_size=3).map(tuple)
GPUS = st.one_of(
    st.just({"gpus": 0}),
    st.fixed_dictionaries(
        {"gpus": st.integers(1, 256), "gpu_memory_mb": st.integers(0, 10**7), "gpu_models": MODELS}
    ),
    st.fixed_dictionaries(
        {"gpus": st.just(1), "gpu_milli": st.integers(1, 999), "gpu_models": MODELS}
    ),
    st.fixed_dictionaries(
        {
            "gpus": st.just(1),
            "gpu_milli": st.just(0),
            "gpu_memory_mb": st.integers(1, 10**7),
            "gpu_models": MODELS,
        }
    ),
)
PLACES = st.one_of(
    st.fixed_dictionaries({"within": st.sampled_from(Within)}),
    st.fixed_dictionaries(
        {
            "within": st.sampled_from([Within.NODE, Within.RACK, Within.BLOCK]),
            "within_required": st.booleans(),
        }
    ),
)


def parse(text: str, ending: str) -> JobSpec:
    return to_spec(read_fields(JOB, text, ending))


def make_spec(*parts: dict[str, Any], **rest: Any) -> JobSpec:
    return JobSpec(**{name: value for part in (*parts, rest) for name, value in part.items()})


SPECS = st.builds(
    make_spec,
    SIZES,
    GPUS,
    PLACES,
    command=st.lists(TEXTS, max_size=4).map(lambda words: ("run", *words)),
    name=st.none() | PLAIN,
    tenant=PLAIN,
    whole_nodes=st.booleans(),
    preemptible=st.booleans(),
    checkpoint_ms=st.integers(1, 10**10),
    estimate_ms=st.integers(1, 10**10),
    cpu_milli=st.integers(0, 10_000_000),
    memory_mb=st.integers(0, 1_000_000_000),
    env=st.dictionaries(NAMES, TEXTS, max_size=4),
    workdir=st.just("") | PLAIN.map(lambda text: f"/{text}"),
    priority=st.integers(-1000, 1000),
    restart=st.sampled_from(Restart),
    retries=st.integers(0, 1000),
    backoff_ms=st.integers(0, 10**9),
    time_limit_ms=st.integers(1, 10**10),
    stop_grace_ms=st.integers(0, 3_600_000),
)


def friendly(spec: JobSpec) -> dict[str, Any]:
    """A spec in the words of a job file."""
    fields: dict[str, Any] = {
        "command": list(spec.command),
        "members": f"{spec.members}..{spec.members_max}" if spec.members_max else spec.members,
        "gpus": spec.gpus if spec.gpu_milli == 1000 else spec.gpu_milli / 1000,
        "gpu_model": list(spec.gpu_models),
        "within": spec.within.value,
        "strict": spec.within_required,
        "per_node": spec.members_per_node,
        "whole_nodes": spec.whole_nodes,
        "tenant": spec.tenant,
        "preemptible": spec.preemptible,
        "checkpoint_every": f"{spec.checkpoint_ms}ms",
        "estimate": f"{spec.estimate_ms}ms",
        "cpus": spec.cpu_milli / 1000,
        "memory": f"{spec.memory_mb}M",
        "env": spec.env,
        "priority": spec.priority,
        "restart": spec.restart.value,
        "retries": spec.retries,
        "backoff": f"{spec.backoff_ms}ms",
        "time_limit": f"{spec.time_limit_ms}ms",
        "stop_grace": f"{spec.stop_grace_ms}ms",
    }
    if spec.gpu_milli == 0:
        fields["gpus"] = f"{spec.gpu_memory_mb}M"
    else:
        fields["gpu_memory"] = f"{spec.gpu_memory_mb}M"
    if spec.name is not None:
        fields["name"] = spec.name
    if spec.workdir:
        fields["workdir"] = spec.workdir
    return fields


@settings(max_examples=60, deadline=None)
@given(SPECS)
def test_any_job_written_as_a_file_reads_back_equal(spec: JobSpec) -> None:
    assume(not spec.retries or spec.restart is Restart.ON_FAILURE)
    fields = friendly(spec)
    assert parse(json.dumps(fields), ".json") == spec
    assert parse(yaml.safe_dump(fields), ".yaml") == spec
    assert parse(to_toml(fields), ".toml") == spec


def to_toml(fields: dict[str, Any]) -> str:
    lines = [f"{name} = {toml_value(value)}" for name, value in fields.items()]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
        case _:
            return str(value)


@settings(deadline=None)
@given(st.text(), st.sampled_from([".yaml", ".toml", ".json"]))
def test_any_text_is_a_job_or_is_refused(text: str, ending: str) -> None:
    with contextlib.suppress(BadField):
        parse(text, ending)


def test_the_least_file_has_the_defaults() -> None:
    assert parse("command: echo 'hello world'", ".yml") == JobSpec(command=("echo", "hello world"))


def test_a_whole_file_is_understood() -> None:
    text = """
        command: [python, train.py, --epochs, 3]
        name: big
        members: 2
        gpus: 8
        cpus: 1.5
        memory: 4G
        env: {SEED: 1, DEBUG: yes, DAY: 2020-01-01, PORT: "080"}
        priority: -5
        retries: 3
        backoff: 2s
        time_limit: 1h30m
        stop_grace: 30s
    """
    assert parse(text, ".yaml") == JobSpec(
        command=("python", "train.py", "--epochs", "3"),
        name="big",
        members=2,
        gpus=8,
        cpu_milli=1500,
        memory_mb=4096,
        env={"SEED": "1", "DEBUG": "yes", "DAY": "2020-01-01", "PORT": "080"},
        priority=-5,
        restart=Restart.ON_FAILURE,
        retries=3,
        backoff_ms=2000,
        time_limit_ms=5_400_000,
        stop_grace_ms=30_000,
    )


@pytest.mark.parametrize(
    ("gpus", "fields"),
    [
        ("2", {"gpus": 2}),
        ("2.0", {"gpus": 2}),
        ("'2'", {"gpus": 2}),
        ("0.5", {"gpus": 1, "gpu_milli": 500}),
        ("'0.29'", {"gpus": 1, "gpu_milli": 290}),
        ("20G", {"gpus": 1, "gpu_milli": 0, "gpu_memory_mb": 20_480}),
    ],
)
def test_gpus_are_whole_or_a_share_of_one(gpus: str, fields: dict[str, int]) -> None:
    spec = parse(f"command: x\ngpus: {gpus}", ".yaml")
    assert spec == JobSpec(command=("x",), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("gpus: 8\nmembers: 4\nprocs_per_node: gpu", {"members": 32, "members_per_node": 8}),
        ("gpus: 8\nmembers: 4\nprocs_per_node: 8", {"members": 32, "members_per_node": 8}),
        (
            "gpus: 8\nprocs_per_node: '4'\ncpus: 10\nmemory: 9M",
            {"members": 4, "gpus": 2, "members_per_node": 4, "cpu_milli": 2500, "memory_mb": 3},
        ),
        (
            "procs_per_node: 2\nmembers: 1..3",
            {"members": 2, "members_max": 6, "members_per_node": 2, "gpus": 0},
        ),
        ("gpus: 8\nprocs_per_node: 1", {"gpus": 8}),
        ("gpus: 1\nnodes: 2", {"members": 2, "members_per_node": 1}),
        ("gpus: 1\nnodes: 2..4", {"members": 2, "members_max": 4, "members_per_node": 1}),
        (
            "gpus: 1\nnodes: 2\nlauncher: true",
            {"members": 2, "members_per_node": 1, "launcher": True},
        ),
        ("nodes: 2\ngpus: 8\nprocs_per_node: gpu", {"members": 16, "members_per_node": 8}),
    ],
)
def test_processes_share_what_one_member_would_have(text: str, fields: dict[str, int]) -> None:
    spec = parse(f"command: x\n{text}", ".yaml")
    assert spec == JobSpec(command=("x",), **{"gpus": 1, **fields})  # type: ignore[arg-type]


def test_a_launcher_has_one_member_on_each_node() -> None:
    spec = parse("command: mpirun x\nmembers: 4\ngpus: 8\nlauncher: true", ".yaml")
    assert (spec.launcher, spec.members, spec.members_per_node, spec.gpus) == (True, 4, 1, 8)


def test_an_elastic_gang_has_a_least_and_a_most() -> None:
    spec = parse("command: x\nmembers: 2..8\nper_node: 2", ".yaml")
    assert (spec.members, spec.members_max, spec.members_per_node) == (2, 8, 2)
    assert spec.elastic


def test_a_gpu_is_chosen_by_model_and_memory() -> None:
    text = "command: x\ngpus: 0.5\ngpu_memory: 40G\ngpu_model: [A100, H100]"
    demand = parse(text, ".yaml").demand
    assert (demand.gpu_milli, demand.gpu_memory_mb) == (500, 40_960)
    assert demand.gpu_models == ("A100", "H100")


def test_retries_alone_mean_on_failure() -> None:
    assert to_spec({"command": "x", "retries": 1}).restart is Restart.ON_FAILURE
    assert to_spec({"command": "x", "retries": 0}).restart is Restart.ON_NODE_LOSS


REFUSED = [
    ("", "the file is empty"),
    ("   \n\n", "the file is empty"),
    ("gpus: 1", "command: is missing"),
    ("command: x\ngpuz: 1", "there is no field 'gpuz'; did you mean 'gpus'?"),
    ("command: x\ntime-limit: 1s", "did you mean 'time_limit'?"),
    ("command: x\nzzz: 1", "a job has command, name"),
    ("command: x\n1: 2", "there is no field '1'"),
    ("command: x\ngpus: -1", "gpus: must be from 0 to 256"),
    ("command: x\nlauncher: true\nper_node: 2\nmembers: 2", "launcher: starts the processes of a"),
    (
        "command: x\ngpus: 1.5",
        "gpus: '1.5' is not a number of GPUs; write 1 or 2 for whole",
    ),
    ("command: x\ngpus: -0.5", "gpus: '-0.5' is not a number of GPUs"),
    ("command: x\ngpus: 0.0001", "gpus: 0.0001 of a GPU is too little; the least is 0.001"),
    ("command: x\ngpus: half", "gpus: 'half' is not a number of GPUs; write 1"),
    ("command: x\ngpus: 0G", "gpus: '0G' is not a number of GPUs"),
    ("command: x\ngpus: 999T", "gpus: '999T' is more than any GPU has"),
    ("command: x\ngpus: '300'", "gpus: must be from 0 to 256"),
    ("command: x\ngpus: true", "gpus: must be a number or an amount of memory"),
    ("command: x\ngpus: [1]", "gpus: must be a number or an amount of memory"),
    ("command: x\ngpu_memory: 40G", "gpu_memory: has no effect without GPUs; say how many"),
    ("command: x\ngpus: 20G\ngpu_memory: 40G", "gpu_memory: is in gpus already"),
    ("command: x\ngpus: 1\ngpu_memory: 40", "gpu_memory: 40 of what?"),
    ("command: x\ngpu_model: A100", "gpu_model: has no effect without GPUs"),
    ("command: x\ngpus: 1\ngpu_model: 100", "gpu_model: must be text"),
    ("command: x\ngpus: 1\ngpu_model: ''", "gpu_model: is empty; name a model"),
    ("command: x\ngpus: 1\ngpu_model: [A, {}]", "gpu_model: must be text"),
    ("command: x\ngpus: 1\ngpu_model: [" + "A," * 65 + "A]", "gpu_model: names more than 64"),
    ("command: x\nmembers: 8..2", "members: 8..2 is backwards; write 2..8"),
    ("command: x\nmembers: 0..2", "members: must be from 1"),
    ("command: x\nmembers: 2..99999", "members: must be from 1"),
    ("command: x\nmembers: 2...8", "members: '2...8' is not a number of members; write 4, or 2..8"),
    ("command: x\nmembers: many", "members: 'many' is not a number of members"),
    ("command: x\nmembers: 4\nper_node: 3", "per_node: 3 on each node cannot make 4 members"),
    ("command: x\nmembers: 2..5\nper_node: 2", "per_node: 2 on each node cannot make 5 members"),
    ("command: x\nper_node: -1", "per_node: must be from 0"),
    ("command: x\nprocs_per_node: gpu", "procs_per_node: 'gpu' means one for each GPU; say how"),
    ("command: x\ngpus: 0.5\nprocs_per_node: gpu", "procs_per_node: 'gpu' means one for each"),
    ("command: x\ngpus: 0.5\nprocs_per_node: 2", "procs_per_node: 2 processes cannot share"),
    ("command: x\ngpus: 8\nprocs_per_node: 3", "procs_per_node: 3 processes cannot share 8 GPUs"),
    ("command: x\nnodes: 2\nmembers: 2", "nodes: means so many members, one per node; leave out m"),
    (
        "command: x\nnodes: 2\nper_node: 1",
        "nodes: means so many members, one per node; leave out p",
    ),
    ("command: x\nnodes: 0", "nodes: must be from 1"),
    ("command: x\nnodes: two", "nodes: 'two' is not a number of nodes; write 4, or 2..8"),
    ("command: x\nprocs_per_node: 0", "procs_per_node: must be from 1"),
    ("command: x\nprocs_per_node: gpus", "procs_per_node: must be a whole number"),
    ("command: x\nper_node: 2\nmembers: 2\nprocs_per_node: 2", "procs_per_node: and per_node say"),
    ("command: x\nmembers: 9000\nprocs_per_node: 2", "procs_per_node: that makes 18000"),
    ("command: x\nwhole_nodes: 1", "whole_nodes: must be true or false, not the number 1"),
    ("command: x\nwhole_nodes: yes", "whole_nodes: must be true or false, not the text 'yes'"),
    ("command: x\nwithin: room", "within: must be one of anywhere, node, rack, block"),
    ("command: x\nwithin: [rack]", "within: must be one of"),
    ("command: x\nstrict: true", "strict: has no effect without within; add e.g. within: rack"),
    ("command: x\ntenant: a/b", "tenant: 'a/b' is not a valid name"),
    ("command: x\npreemptible: maybe", "preemptible: must be true or false"),
    ("command: x\ncheckpoint_every: 10", "checkpoint_every: 10 of what? Write 10s, 10m or 10h"),
    ("command: x\nestimate: long", "estimate: 'long' is not a time"),
    ("command: x\ngpus:", "not nothing"),
    ("command: x\ngpus: 99999999999999999", "gpus: must be from 0 to 256"),
    ("command: x\nmembers: 0", "members: must be from 1"),
    ("command: x\nmembers: [2]", "members: must be a whole number"),
    ("command: x\nmemory: 512", "memory: 512 of what? Write 512M or 512G"),
    ("command: x\nmemory: 9999999T", "memory: '9999999T' is too much"),
    ("command: x\nmemory: {a: 1}", "memory: must be an amount"),
    ("command: x\ncpus: -1", "cpus: must not be negative"),
    ("command: x\ntime_limit: 90", "time_limit: 90 of what? Write 90s"),
    ("command: x\ntime_limit: 0", "time_limit: must be more than 0; write e.g. 90s"),
    ("command: x\nestimate: 0s", "estimate: must be more than 0"),
    ("command: x\ngrid: [lr=]", "grid: 'lr=' has no values; write e.g. lr=0.1,0.01"),
    ("command: x\ntime_limit: 9999d", "time_limit: '9999d' is too much"),
    ("command: x\nstop_grace: 2h", "stop_grace: '2h' is too much"),
    ("command: x\nname: a/b", "name: 'a/b' is not a valid name"),
    ('command: x\nname: "a\\nb"', "name: 'a\\nb' is not a valid name"),
    ("command: x\nname: " + "a" * 64, "is not a valid name"),
    ("command: x\nname: 7", "name: must be text"),
    ("command: x\nrestart: sometimes", "restart: must be one of never, on-node-loss"),
    ("command: x\nrestart: never\nretries: 1", "retries: have no effect"),
    ("command: x\nenv: [A]", "env: must be names with values"),
    ("command: x\nenv: {A-B: c}", "env: 'A-B' cannot name a variable"),
    ("command: x\nenv: {A: true}", "env: 'A' is true or false (true); put its value in quotes"),
    ("command: x\nenv: {A: 1.10}", "put its value in quotes"),
    ("command: x\nenv: {A: }", "env: 'A' is nothing"),
    ('command: x\nenv: {A: "a\\0b"}', "env: contains a NUL byte"),
    ("command: x\nworkdir: here", "workdir: must be an absolute path"),
    ("command: x\nworkdir: ''", "workdir: is empty"),
    ("command: ''", "command: is empty"),
    ("command: []", "command: is empty"),
    ("command: ['']", "command: begins with an empty word"),
    ("command: 5", "command: must be text or a list"),
    ("command: [x, [y]]", "command: has a word that is a list"),
    ('command: "it\'s"', "command: has a quote that is not closed"),
    ("command: [x, " + "y" * 200_000 + "]", "command"),
    ("command: x\nenv: {A: " + "y" * 200_000 + "}", "env"),
    ("just words", "the file must hold fields"),
    ("- command: x", "the file must hold fields"),
    ("command: x\n\tgpus: 1", "line 2: a tab begins a word"),
    ("command: x\ncommand: y", "'command' is given twice"),
    ("a: &a [x]\nb: *a", "aliases"),
    ("a: !!python/object/apply:os.system [id]", "not YAML"),
    ("? [a]\n: b", "a name must be plain text"),
    ("command: " + "[" * 5000, "nested too deeply"),
    ("\0", "not YAML"),
]


@pytest.mark.parametrize(("text", "part"), REFUSED)
def test_what_is_wrong_is_named(text: str, part: str) -> None:
    with pytest.raises(BadField) as caught:
        parse(text, ".yaml")
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_alias_bomb_does_not_unfold() -> None:
    layers = "\n".join(f"l{n + 1}: [{', '.join([f'*l{n}'] * 9)}]" for n in range(9))
    with pytest.raises(BadField, match="aliases"):
        parse("l0: &l0 x\n" + layers, ".yaml")


@pytest.mark.parametrize(
    ("text", "ending", "part"),
    [
        ("{", ".json", "not JSON, line 1"),
        ('{"command": "x", "command": "y"}', ".json", "'command' is given twice"),
        ('{"command": "x", "cpus": Infinity}', ".json", "cpus: "),
        ('{"command": "\\ud800"}', ".json", "command: holds bytes that are not UTF-8"),
        ('{"gpus": ' + "9" * 5000 + "}", ".json", ""),
        ("[" * 100_000, ".json", "nested too deeply"),
        ("command = ", ".toml", "not TOML"),
        ("command = 'x'\ncommand = 'y'", ".toml", "not TOML"),
        ("command = 'x'\nname = 2020-01-01", ".toml", "name: must be text"),
    ],
)
def test_the_other_formats_are_no_weaker(text: str, ending: str, part: str) -> None:
    with pytest.raises(BadField) as caught:
        parse(text, ending)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400
