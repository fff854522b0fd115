"""Policy files: what is written is what is obeyed, and what is wrong is named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.policies import SHIPPED
from shoal.forms import policy as policyfile
from shoal.forms.failure import BadField
from shoal.forms.policy import ABOUT, FIELDS, check, differences, parse, to_text
from shoal.model.neighbor import Neighbor
from shoal.model.policy import Policy, Preempt, Sleeping, Tenant

TIMES = st.integers(0, 10**12)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@st.composite
def tenants(draw: st.DrawFn) -> tuple[Tenant, ...]:
    """A tree: parents come before their children."""
    found: list[Tenant] = []
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        parents = st.sampled_from(["", *[tenant.name for tenant in found]])
        found.append(
            Tenant(
                name=name,
                parent=draw(parents),
                weight=draw(st.integers(1, 1000)),
                quota_gpus=draw(st.integers(0, 1000)),
            )
        )
    return tuple(found)


POLICIES = st.builds(
    Policy,
    name=NAMES,
    order=st.sampled_from(["fifo", "fair", "srtf", "mine:order"]),
    placement=st.sampled_from(["shoal", "packing", "mine.deep:score"]),
    preempt=st.sampled_from(Preempt),
    reservations=st.integers(0, 64),
    patience_ms=TIMES,
    half_life_ms=st.integers(1, 10**12),
    entry_penalty_ms=TIMES,
    run_ms_min=TIMES,
    idle_ends=st.booleans(),
    idle_sleeps=st.booleans(),
    sleep=st.sampled_from(Sleeping),
    turn_ms_min=TIMES,
    tenants=tenants(),
    grace_ms=TIMES,
    losses_max=st.integers(0, 10**12),
    port_first=st.integers(1024, 65_535),
)


@settings(max_examples=60, deadline=None)
@given(POLICIES)
def test_any_policy_shown_as_a_file_reads_back_equal(policy: Policy) -> None:
    assert parse(to_text(policy), ".yaml") == policy
    assert parse(msgspec.json.encode(policy).decode(), ".json") == policy


@settings(deadline=None)
@given(st.text(), st.sampled_from([".yaml", ".toml", ".json"]))
def test_any_text_is_a_policy_or_is_refused(text: str, ending: str) -> None:
    with contextlib.suppress(BadField):
        parse(text, ending)


def test_every_field_is_explained() -> None:
    assert set(ABOUT) == set(FIELDS)


def test_the_least_file_is_its_base_by_another_name() -> None:
    assert parse("base: fifo", ".yaml", name="mine") == msgspec.structs.replace(
        SHIPPED["fifo"], name="mine"
    )
    assert parse("base: fair\nname: other", ".yaml", name="mine").name == "other"


def test_a_whole_file_is_understood() -> None:
    text = """
        base: backfill
        name: labs
        order: fair
        preempt: rank
        reservations: 8
        patience: 30m
        half_life: 3d
        run_min: 10m
        entry_penalty: 90s
        grace: 2m
        tenants:
          research: {weight: 2, quota_gpus: 32}
          vision: {parent: research, quota_gpus: 16}
          guests:
    """
    assert parse(text, ".yaml") == Policy(
        name="labs",
        order="fair",
        preempt=Preempt.RANK,
        reservations=8,
        patience_ms=1_800_000,
        half_life_ms=259_200_000,
        run_ms_min=600_000,
        entry_penalty_ms=90_000,
        grace_ms=120_000,
        tenants=(
            Tenant(name="research", weight=2, quota_gpus=32),
            Tenant(name="vision", parent="research", quota_gpus=16),
            Tenant(name="guests"),
        ),
    )


@pytest.mark.parametrize(
    ("text", "ends", "sleeps"),
    [
        ("idle: end", True, False),
        ("idle: requeue", False, False),
        ("idle: sleep", True, True),
        ("idle: sleep\nidle_ends: false", False, True),
        ("idle_ends: false", False, False),  # as files of 0.5 write it
        ("idle_ends: true", True, False),
    ],
)
def test_one_word_says_what_happens_to_an_idle_job(text: str, ends: bool, sleeps: bool) -> None:
    policy = parse(f"base: fair\n{text}", ".yaml")
    assert (policy.idle_ends, policy.idle_sleeps) == (ends, sleeps)


def test_a_file_says_when_jobs_sleep_and_take_turns() -> None:
    text = """
        sleep: never
        sleepers_max: 3
        sleep_memory_percent: 25
        turn_cost_percent: 10
        turn_min: 2m
    """
    policy = parse(text, ".yaml")
    assert (policy.sleep, policy.sleepers_max) == (Sleeping.NEVER, 3)
    assert (policy.sleep_memory_percent, policy.turn_cost_percent) == (25, 10)
    assert policy.turn_ms_min == 120_000


REFUSED = [
    ("idle: nap", "idle: must be one of end, requeue, sleep, not 'nap'"),
    ("idle: end\nidle_ends: true", "idle_ends: is given twice, because idle says it, too"),
    ("idle: sleep\nidle_sleeps: true", "idle_sleeps: is given twice"),
    ("idle_ends: maybe", "idle_ends: expected bool"),
    ("sleep: sometimes", "sleep: must be one of never, prefer, not 'sometimes'"),
    ("sleepers_max: 1001", "sleepers_max: expected int <= 1000"),
    ("sleep_memory_percent: 101", "sleep_memory_percent: expected int <= 100"),
    ("turn_cost_percent: 51", "turn_cost_percent: expected int <= 50"),
    ("turn_min: 30", "turn_min: 30 of what? Write 30s, 30m or 30h"),
    ("", "the file is empty"),
    ("- a", "the file must hold fields"),
    ("base: nosuch", "base: there is no policy 'nosuch'; there are fifo, backfill, fair"),
    ("base: [fair]", "base: there is no policy"),
    ("patiense: 1m", "there is no field 'patiense'; did you mean 'patience'?"),
    ("zzz: 1", "`shoal policy show` lists them"),
    ("1: 1", "there is no field '1'"),
    ("patience: 10", "patience: 10 of what? Write 10s, 10m or 10h"),
    ("patience: soon", "patience: 'soon' is not a time"),
    ("patience: [1m]", "patience: must be an amount, e.g. 90s"),
    ("patience: true", "patience: must be an amount, e.g. 90s"),
    ("patience: 99999999d", "patience: '99999999d' is too much"),
    ("patience: 1m\npatience_ms: 1", "patience_ms: is given twice"),
    ("patience_ms: x", "patience: expected int, got str"),
    ("half_life: 0s", "half_life: expected int >= 1"),
    ("reservations: 65", "reservations: expected int <= 64"),
    ("reservations: many", "reservations: expected int, got str"),
    ("losses_max: 999999999999999", "losses_max: is too much"),
    ("preempt: sometimes", "preempt: must be one of never, priority, rank, not 'sometimes'"),
    ("preempt: []", "preempt: must be one of"),
    ("order: 7", "order: expected str, got int"),
    ('order: "a\\nb"', "order: 'a\\nb' is not valid"),
    ("name: a b", "name: 'a b' is not a valid name"),
    ("tenants: all", "tenants: must be names with their fields"),
    ("tenants: [a]", "tenants: must be names with their fields; one has no name"),
    ("tenants: {a: 1}", "tenants.a: must be a table"),
    ("tenants: {a: {wieght: 1}}", "tenants.a: there is no field 'wieght'; did you mean 'weight'?"),
    ("tenants: {a: {weight: 0}}", "tenants.a.weight: expected int >= 1"),
    ("tenants: {a: {weight: x}}", "tenants.a.weight: expected int, got str"),
    ("tenants: {a: {quota_gpus: -1}}", "tenants.a.quota_gpus: expected int >= 0"),
    ("tenants: {a: {quota_gpus: 99999999999999}}", "tenants.a.quota_gpus: is too much"),
    ("tenants: {a/b: {}}", "tenants.a/b"),
    ("tenants: {a: {parent: b}}", "tenants: the parent 'b' of 'a' is not named"),
    ("tenants: {a: {parent: b}, b: {parent: a}}", "tenants: 'a' is its own ancestor"),
    ("tenants: [{name: a}, {name: a}]", "tenants: 'a' is named twice"),
    ("order: shortest", "order: there is no order 'shortest'; there are fair, fifo"),
    ("placement: best", "placement: there is no placement 'best'; there are best-fit"),
    ("order: nosuch.module:x", "order: nosuch.module:x cannot be loaded: No module named"),
    ("order: json:nosuch", "order: json:nosuch cannot be loaded"),
    ("order: json:dumps", "order: json:dumps is not a shoal.core.scheduling.order.Ordering"),
    ("placement: 'json:'", "placement: json: cannot be loaded"),
    ("placement: json:__name__", "placement: json:__name__ is not a function"),
]


@pytest.mark.parametrize(("text", "part"), REFUSED)
def test_what_is_wrong_is_named(text: str, part: str) -> None:
    with pytest.raises(BadField) as caught:
        policyfile.check(parse(text, ".yaml"), load=True)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ('{"name": "\\ud800"}', ".json"),
        ('{"order": "\\ud800:x"}', ".json"),
        ('{"tenants": {"\\ud800": {}}}', ".json"),
        ('{"losses_max": ' + "9" * 5000 + "}", ".json"),
        ("[" * 100_000, ".json"),
        ("patience = 2020-01-01", ".toml"),
        ("patience = 1.5", ".toml"),
        ("patience = inf", ".toml"),
    ],
)
def test_the_other_formats_are_no_weaker(text: str, ending: str) -> None:
    with pytest.raises(BadField) as caught:
        policyfile.check(parse(text, ending), load=True)
    assert len(str(caught.value)) < 400


def test_functions_that_only_the_head_has_are_left_to_it() -> None:
    wanted = parse("order: nosuch:x\nplacement: y", ".yaml")
    policyfile.check(wanted, load=False)
    with pytest.raises(BadField, match="nosuch:x cannot be loaded"):
        policyfile.check(wanted, load=True)


def test_a_file_without_a_name_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "my labs.json"
    path.write_text(json.dumps({"base": "fifo"}))
    assert policyfile.find(str(path)).name == "my-labs"


def test_differences_name_fields_and_tenants() -> None:
    other = parse("base: fair\nname: fair\npatience: 30m\ntenants: {lab: {weight: 2}}", ".yaml")
    assert policyfile.differences(Policy(), other) == [
        ("patience", "1h", "30m"),
        ("tenants.lab", "", "{weight: 2}"),
    ]
    assert policyfile.differences(other, other) == []


def test_what_is_shown_is_plain_yaml() -> None:
    shown = yaml.safe_load(to_text(Policy(tenants=(Tenant(name="true"), Tenant(name="7")))))
    assert shown["patience"] == "1h"
    assert list(shown["tenants"]) == ["true", "7"]


def test_the_old_name_of_silent_after_means_the_same() -> None:
    assert parse("suspect_after: 7s", ".yaml").silent_after_ms == 7_000
    assert parse('{"suspect_after_ms": 7000}', ".json").silent_after_ms == 7_000
    assert "silent_after: 7s" in to_text(parse("silent_after: 7s", ".yaml"))
    with pytest.raises(BadField, match="suspect_after: is given twice"):
        parse("silent_after: 7s\nsuspect_after: 7s", ".yaml")
    with pytest.raises(BadField, match="silent_after"):
        parse("silent_after: soon", ".yaml")


NEIGHBORS = """
neighbors:
  - {name: west, tenants: [lab], gpus_max: 16, price_max: 2.50, labels: {region: eu}, after: 10m}
  - {name: "no"}
"""


def test_neighbors_are_written_as_they_are_read() -> None:
    west, no = parse(NEIGHBORS, ".yaml").neighbors
    assert (west.tenants, west.gpus_max, west.price_max) == (("lab",), 16, 2_500_000)
    assert (west.labels, west.after_ms, no) == ({"region": "eu"}, 600_000, Neighbor(name="no"))
    policy = parse(NEIGHBORS, ".yaml")
    assert parse(to_text(policy), ".yaml") == policy
    stored = {"neighbors": msgspec.to_builtins(policy.neighbors)}  # as `show --json` prints them
    assert parse(json.dumps(stored), ".json").neighbors == policy.neighbors
    other = parse("neighbors: {west: {after: 5m}}", ".yaml")
    rows = {field: after for field, _, after in differences(policy, other)}
    assert rows == {"neighbors.west": '{name: "west", after: 5m}', "neighbors.no": ""}


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("neighbors: 3", "neighbors", "must be a list of neighbors, e.g. [{name: west"),
        ("neighbors: [{after: 3m}]", "neighbors", "must be tables with a name each"),
        ("neighbors: {west: {gpu_max: 3}}", "neighbors.west", "did you mean 'gpus_max'?"),
        ("neighbors: {west: {after: 3}}", "neighbors.west.after", "Write 3s, 3m or 3h"),
        ("neighbors: {west: {price_max: low}}", "neighbors.west.price_max", "write e.g. 2.50"),
        ("neighbors: {west: {tenants: 3}}", "neighbors.west.tenants", "a list of tenants"),
        ("neighbors: {we st: {}}", "neighbors.we st", "is not a valid name"),
        ("neighbors: [{name: a}, {name: a}]", "neighbors", "'a' is named twice"),
    ],
)
def test_a_wrong_neighbor_is_named(text: str, field: str, says: str) -> None:
    with pytest.raises(BadField) as caught:
        check(parse(text, ".yaml"), load=False)
    assert caught.value.field == field
    assert says in str(caught.value)
