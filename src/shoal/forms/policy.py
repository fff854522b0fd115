"""Policies as people write them: read and checked field by field, and written back."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from shoal.control import plugins
from shoal.core import tryout
from shoal.core.policies import SHIPPED
from shoal.forms import datafile, neighbor, readers, supply, units
from shoal.forms.datafile import is_job_file, unknown
from shoal.forms.failure import REFUSED, USAGE, BadField, Failure
from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.phrases import shortened
from shoal.model.policy import (
    GpuOver,
    Others,
    Places,
    Policy,
    Preempt,
    Rdma,
    Sleeping,
    Tenant,
    problem_with,
)

NAME_CHARACTERS_MAX = 63
NUMBER_MAX = 10**12  # more than any count or time in a policy may be

# Times are written with their unit, so the friendly names have none: `patience: 10m`.
# What happens to idle jobs is one word (`idle: sleep`) for two stored fields.
IDLE_FIELDS = ("idle_ends", "idle_sleeps")
FIELDS = {
    "idle" if name == "idle_ends" else name.replace("_ms", ""): name
    for name in (field.name for field in msgspec.structs.fields(Policy))
    if name != "idle_sleeps"
}
STORED = {field.name: field.encode_name for field in msgspec.structs.fields(Policy)}
# Names before 0.2, which files may still have.
RENAMED = {"suspect_after": "silent_after", "suspect_after_ms": "silent_after_ms"}
TENANT_FIELDS = tuple(field.name for field in msgspec.structs.fields(Tenant))[1:]

ABOUT = {
    "name": "a name for people",
    "order": "the order of the queue",
    "placement": "how to choose among the nodes that fit",
    "place": "racks and blocks: as typed, or as the network was measured",
    "preempt": "stop running jobs: never, for priority and quota, or also by rank in the order",
    "reservations": "blocked jobs at the front of the queue that get room set aside",
    "patience": "a blocked job can be overtaken for this long",
    "elder": "order fair: first the job that waited this long and 16 times the usual job",
    "half_life": "usage from this long ago counts half",
    "entry_penalty": "starting a job counts at once as this much run time",
    "run_min": "a job is not preempted before it has run this long",
    "move_cost": "what moving a job costs, in addition to lost work",
    "spares": "nodes kept for gangs that lose one",
    "hang_after": "a job hangs after this long without a step, and 20 times its usual step",
    "hangs_max": "give a job up after this many hangs",
    "idle_warn": "warn about a job whose GPUs are unused for this long; 0: never",
    "idle_reclaim": "take the GPUs back after this long; 0: never",
    "idle": "what happens to the job then: end, requeue, or sleep until it is used",
    "sleep": "jobs that make room for others: never sleep, or prefer it where it costs less",
    "sleepers_max": "members that may sleep on a node at a time",
    "sleep_memory_percent": "of a node's memory that sleepers may fill",
    "turn_cost_percent": "jobs take turns; switching may cost this share of the time; 0: no turns",
    "turn_min": "the shortest turn",
    "checkpoint_copy_mb": "MB of a job's checkpoints that travel between nodes; 0: none do",
    "checkpoint_peers": "true: they are copied to another node, and not through the head",
    "data_mbit_s": "Mbit/s at which a node fetches volumes, and gives them to others; 0: any",
    "retest": "check a node in quarantine again after this long, then after twice as long",
    "tenants": "shares by weight; quotas are guaranteed; budgets; caps on jobs",
    "supply": "nodes that Slurm, Kubernetes or Ray brings when they are wanted",
    "neighbors": "what may go to other clusters: whose jobs, how many GPUs, at which price",
    "budget_stops": "also stop running jobs whose budget is used up",
    "others": "what a tenant sees of others' jobs: nothing, or the tenants that use the nodes",
    "site": "labels of this cluster that neighbors are told, e.g. region=eu, power=hydro",
    "processes_max": "processes and threads of a member; 0: no limit",
    "cpu_hard": "true: a member never gets more CPU than it asked for, even if some is idle",
    "gpu_over": "a member that uses more of a shared GPU than it asked for: end it, or warn",
    "rdma": "whose jobs may use InfiniBand and RoCE cards: nobody, operator or everyone",
    "silent_after": "a node is silent after this long without a report",
    "grace": "and lost after this long",
    "losses_max": "give a job up after it has lost this many nodes",
    "backoff_max": "the longest pause before a retry",
    "port_first": "the first port where gangs meet",
    "port_count": "how many such ports there are",
    "placements_per_step_max": "jobs placed in one step",
}
COMMENT_COLUMN = 32
# Fields that are lists or tables of things with names.
TABLES = ("tenants", "supply", "neighbors")
LISTS = ("supply.", "neighbors.")
CHOICES: dict[str, type[StrEnum]] = {
    "place": Places,
    "preempt": Preempt,
    "others": Others,
    "gpu_over": GpuOver,
    "rdma": Rdma,
    "sleep": Sleeping,
}
IDLE = {  # by the word: idle_ends, idle_sleeps
    "end": (True, False),
    "requeue": (False, False),
    "sleep": (True, True),  # a job that cannot sleep ends, unless idle_ends is false
}

_read_time = readers.amount(units.duration_ms, NUMBER_MAX, "90s, 10m or 7d")


def find(word: str, *, flag: str = "", load: bool = True) -> Policy:
    """The shipped policy of this name, or the one in this file. Without `load` the functions and
    engines that it names are not looked up, because the head has other packages than this machine.
    """
    where = f"{flag}: " if flag else ""
    if is_job_file(word):
        path = Path(word)
        try:
            text = datafile.read_text(path, "policy file")
            policy = parse(text, path.suffix.lower(), name=_as_name(path.stem))
            check(policy, load=load)
        except BadField as error:
            raise Failure(f"{where}{path}: {error}", REFUSED) from None
        return policy
    if word not in SHIPPED:
        message = f"there is no policy {units.quoted(word)}; there are {', '.join(SHIPPED)}"
        raise Failure(f"{where}{message}, or a .yaml, .toml or .json file of your own", USAGE)
    return SHIPPED[word]


def parse(text: str, ending: str, name: str = "mine") -> Policy:
    """Its `base` with the changes that the text makes; `name` is for a text without a name."""
    written = datafile.load(text, ending, "base: fair")
    return changed(_base(written.pop("base", "fair")), written, name)


def changed(base: Policy, written: dict[Any, Any], name: str) -> Policy:
    """The base with these fields, as a file has them."""
    written = dict(written)
    changes: dict[str, Any] = {"name": name}
    changes |= _idle(written)
    for given, value in written.items():
        field = RENAMED.get(given, given)
        target = FIELDS.get(field, field if field in STORED else "")
        if not target:
            raise unknown(field, ("base", *FIELDS), "`shoal policy show` lists them")
        if STORED[target] in changes and target != "name":
            raise BadField(str(given), f"is given twice; leave out {given}")
        changes[STORED[target]] = _value(field, target, value)
    try:
        return msgspec.convert({**msgspec.to_builtins(base), **changes}, Policy)
    except msgspec.ValidationError as error:
        raise datafile.invalid(error, lambda path: _where(path, changes)) from None


def with_tenants(base: Policy, written: dict[Any, Any]) -> dict[Any, Any]:
    """The same, with changes by tenant made into all tenants; None removes one."""
    given = written.get("tenants")
    if not isinstance(given, dict):
        return written
    tenants = {one.name: msgspec.to_builtins(one) for one in base.tenants}
    for name, about in given.items():
        if about is None:
            tenants.pop(name, None)
        else:
            fields = _tenant(str(name), about)
            tenants[str(name)] = {**tenants.get(str(name), {"name": str(name)}), **fields}
    return {**written, "tenants": list(tenants.values())}


def check(policy: Policy, *, load: bool) -> None:
    """Refuses a policy that cannot be obeyed. `load` also looks up what it names."""
    problem = plugins.problem(policy) if load else problem_with(policy)
    if problem is None and load:
        functions = plugins.PolicyFunctions().load(policy)
        problem = tryout.problem(policy, functions, b"", 0)
    if problem is not None:
        field, _, message = problem.partition(": ")
        raise BadField(field, shortened(message, 300))


# -- reading --------------------------------------------------------------------------------


def _base(value: Any) -> Policy:
    if not isinstance(value, str) or value not in SHIPPED:
        shown = units.quoted(str(value))
        raise BadField("base", f"there is no policy {shown}; there are {', '.join(SHIPPED)}")
    return SHIPPED[value]


def _idle(written: dict[str, Any]) -> dict[str, bool]:
    """Takes `idle` out of what was written. Files of 0.5 say `idle_ends` instead; beside
    `idle: sleep` it says what happens to a job that cannot sleep."""
    if "idle" not in written:
        return {}
    word = readers.Choice(*IDLE)("idle", written.pop("idle"))
    other = next((name for name in IDLE_FIELDS if name in written), "")
    if other and (word != "sleep" or other == "idle_sleeps"):
        raise BadField(other, f"is given twice, because idle says it, too; leave out {other}")
    ends, sleeps = IDLE[word]
    if other:
        return {"idle_sleeps": sleeps}
    return {"idle_ends": ends, "idle_sleeps": sleeps}


def _value(field: str, target: str, value: Any) -> Any:
    if field != target:
        return _read_time(field, value)
    if field == "tenants":
        return _tenants(value)
    if field == "supply":
        return supply.supplies(value)
    if field == "neighbors":
        return neighbor.neighbors(value)
    if field in CHOICES:
        return readers.Choice(*CHOICES[field])(field, value)
    if field == "name":
        return readers.name(field, value)
    if isinstance(value, str) and (not value.isprintable() or len(value) > 256):
        raise BadField(field, f"{units.quoted(value)} is not valid; it must be one short line")
    _check_size(field, value)
    return value


def _check_size(field: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > NUMBER_MAX:
        raise BadField(field, "is too much")


def _tenants(value: Any) -> list[dict[str, Any]]:
    """A table by name is easiest to write; `show --json` prints a list."""
    rows: list[Any] = list(value) if isinstance(value, list) else []
    if isinstance(value, dict):
        rows = [{"name": str(name), **_tenant(str(name), about)} for name, about in value.items()]
    elif not isinstance(value, list):
        raise BadField("tenants", "must be names with their fields, e.g. {lab: {weight: 2}}")
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise BadField("tenants", "must be names with their fields; one has no name")
        _tenant(row["name"], {field: row[field] for field in row if field != "name"})
    return rows


def _tenant(name: str, about: Any) -> dict[str, Any]:
    where = f"tenants.{shortened(name, 63)}"
    if about is None:
        return {}
    if not isinstance(about, dict):
        raise BadField(where, "must be a table, e.g. {weight: 2, quota_gpus: 16}")
    has = f"a tenant has {', '.join(TENANT_FIELDS)}"
    datafile.check_names(about, TENANT_FIELDS, has, where)
    for field, value in about.items():
        _check_size(f"{where}.{field}", value)
    grants = {field: _grant(about[field]) for field in ("hosts", "ports") if field in about}
    return {**about, **grants}


def _grant(value: Any) -> Any:
    """A list, or one port, as the text that is stored."""
    parts = value if isinstance(value, list) else [value]
    plain = all(isinstance(one, str | int) and not isinstance(one, bool) for one in parts)
    return ", ".join(map(str, parts)) if plain else value


def _where(path: str, changes: dict[str, Any]) -> str:
    """The field, as people write it, at a path in the struct."""
    path = RENAMED.get(path, path)
    if supplied := supply.where_of(path, changes.get("supply", [])):
        return supplied
    if shared := neighbor.where_of(path, changes.get("neighbors", [])):
        return shared
    match = re.match(r"tenants\[(\d+)\]\.?(\w*)", path)
    if match is None and path in IDLE_FIELDS:
        return path
    if match is None:
        return next((field for field, name in FIELDS.items() if name == path), path)
    name = changes["tenants"][int(match[1])]["name"]
    return f"tenants.{shortened(name, 63)}" + (f".{match[2]}" if match[2] else "")


def _as_name(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:NAME_CHARACTERS_MAX]
    return plain if re.fullmatch(JOB_NAME_PATTERN, plain) else f"p{plain}"[:NAME_CHARACTERS_MAX]


# -- writing --------------------------------------------------------------------------------


def to_text(policy: Policy) -> str:
    """The same policy as a YAML file."""
    lines = []
    for field, value in as_written(policy).items():
        if field.startswith("tenants."):
            lines.append(f"  {scalar(field.removeprefix('tenants.'))}: {value}")
            continue
        if field.startswith(LISTS):
            lines.append(f"  - {value}")
            continue
        line = f"{field}: {value}".rstrip()
        lines.append(f"{line:{COMMENT_COLUMN}}# {ABOUT[field]}" if field in ABOUT else line)
    return "\n".join(lines) + "\n"


def as_written(policy: Policy) -> dict[str, str]:
    """Every field and every tenant as a file would write it."""
    rows: dict[str, str] = {}
    tenants: dict[str, str] = {}
    lists: dict[str, str] = {}
    for field, target in FIELDS.items():
        value = getattr(policy, target)
        if field == "tenants":
            tenants = {f"tenants.{tenant.name}": _about(tenant) for tenant in value}
        elif field == "supply":
            lists |= _listed(field, {one.name: supply.about(one) for one in value})
        elif field == "neighbors":
            lists |= _listed(field, {one.name: neighbor.about(one) for one in value})
        elif field == "idle":
            rows |= _idle_rows(policy)
        else:
            rows[field] = units.duration_exact(value) if field != target else scalar(value)
    return {**rows, **lists, "tenants": "" if tenants else "{}", **tenants}


def _listed(field: str, lines: dict[str, str]) -> dict[str, str]:
    rows = {f"{field}.{name}": line for name, line in lines.items()}
    return {field: "" if rows else "[]", **rows}


def _idle_rows(policy: Policy) -> dict[str, str]:
    pair = policy.idle_ends, policy.idle_sleeps
    word = next((word for word, meant in IDLE.items() if meant == pair), "")
    return {"idle": word} if word else {"idle": "sleep", "idle_ends": "false"}


def differences(before: Policy, after: Policy) -> list[tuple[str, str, str]]:
    """(field, one, other) where they differ."""
    one, other = as_written(before), as_written(after)
    fields = [field for field in {**one, **other} if field not in TABLES]
    rows: list[tuple[str, str, str]] = []
    mine = {f"tenants.{tenant.name}": tenant for tenant in before.tenants}
    theirs = {f"tenants.{tenant.name}": tenant for tenant in after.tenants}
    for field in fields:
        if one.get(field, "") == other.get(field, ""):
            continue
        if field in mine and field in theirs:  # by field
            rows += _tenant_rows(field, mine[field], theirs[field])
        else:
            rows.append((field, one.get(field, ""), other.get(field, "")))
    return rows


def _tenant_rows(where: str, one: Tenant, other: Tenant) -> list[tuple[str, str, str]]:
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in TENANT_FIELDS]
    return [(f"{where}.{name}", scalar(a), scalar(b)) for name, a, b in pairs if a != b]


def _about(tenant: Tenant) -> str:
    usual = Tenant(name=tenant.name)
    said = [
        f"{field}: {scalar(getattr(tenant, field))}"
        for field in TENANT_FIELDS
        if getattr(tenant, field) != getattr(usual, field)
    ]
    return "{" + ", ".join(said) + "}"


def scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*(:[A-Za-z0-9_.]+)?", str(value))
    if isinstance(value, str) and (not plain or value.lower() in ("true", "false", "null")):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
