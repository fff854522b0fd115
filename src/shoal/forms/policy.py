"""A policy as people write it, in YAML, TOML or JSON: read, checked field by field, and told."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from shoal.control import plugins
from shoal.core import tryout
from shoal.core.policies import SHIPPED
from shoal.forms import datafile, units
from shoal.forms.datafile import is_job_file
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.policy import Policy, Preempt, Tenant

NAME_CHARACTERS_MAX = 63
NUMBER_MAX = 10**12  # more than any count or time in a policy may be

# Times are written with their unit, so the friendly names have none: `patience: 10m`.
FIELDS = {field.name.replace("_ms", ""): field.name for field in msgspec.structs.fields(Policy)}
TENANT_FIELDS = tuple(field.name for field in msgspec.structs.fields(Tenant))[1:]

ABOUT = {
    "name": "for people",
    "order": "who goes first",
    "placement": "which of the nodes that fit",
    "preempt": "never, for priority and quota, or also by rank in the order",
    "reservations": "blocked jobs in front that get room set aside",
    "patience": "a blocked job may be overtaken for so long",
    "elder": "in fair: who waited longer, and 16 times as long as jobs live here, comes first",
    "half_life": "usage so long ago counts half",
    "entry_penalty": "what a start counts at once, as if it had run so long",
    "run_min": "nobody is preempted before it ran so long",
    "move_cost": "what moving a job costs, beside lost work",
    "spares": "nodes kept for gangs that lose one",
    "hang_after": "no step for so long, and for 20 usual ones, is a hang",
    "hangs_max": "a job that hung so often is given up",
    "idle_warn": "a job whose GPUs are unused for so long is warned; 0: never",
    "idle_reclaim": "and gives them back after so long",
    "idle_ends": "it is over then; else it waits, to run again",
    "retest": "a node in quarantine is checked again after so long, then twice that",
    "tenants": "who shares, by weight; quotas are guaranteed; budgets per month or in all",
    "budget_stops": "whose budget is used up is stopped, too",
    "suspect_after": "a node is suspect when silent for so long",
    "grace": "and lost after so long",
    "losses_max": "a job survives so many lost nodes",
    "backoff_max": "the longest pause before a retry",
    "port_first": "of the ports where gangs meet",
    "port_count": "so many of them",
    "placements_per_step_max": "jobs placed in one step",
}
COMMENT_COLUMN = 32


class BadPolicy(ValueError):
    """What is wrong, in which field, and how to mend it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)


def find(word: str, *, flag: str = "", load: bool = True) -> Policy:
    """The shipped policy of this name, or the one in this file. Without `load` a function of the
    user's own (`module:name`) is left for the controller to find, for it looks elsewhere."""
    where = f"{flag}: " if flag else ""
    if is_job_file(word):
        path = Path(word)
        try:
            text = datafile.read_text(path, "policy file")
            policy = parse(text, path.suffix.lower(), name=_as_name(path.stem))
            check(policy, load=load)
        except BadPolicy as error:
            raise Failure(f"{where}{path}: {error}", REFUSED) from None
        return policy
    if word not in SHIPPED:
        message = f"there is no policy {units.quoted(word)}; there are {', '.join(SHIPPED)}"
        raise Failure(f"{where}{message}, or a .yaml, .toml or .json file of your own", USAGE)
    return SHIPPED[word]


def parse(text: str, ending: str, name: str = "mine") -> Policy:
    """What the text says over what its `base` says; `name` is for one that does not tell."""
    if not text.strip():
        raise BadPolicy("", "the file is empty; it needs at least a line like: base: fair")
    try:
        written = datafile.load(text, ending)
    except datafile.BadData as error:
        raise BadPolicy("", str(error)) from None
    base = _base(written.pop("base", "fair"))
    changes: dict[str, Any] = {"name": name}
    for field, value in written.items():
        target = FIELDS.get(field, field if field in FIELDS.values() else "")
        if not target:
            raise _unknown(field, ("base", *FIELDS), "`shoal policy show` lists them")
        if target != field and target in written:
            raise BadPolicy(str(field), f"is given twice; leave out {target}")
        changes[target] = _value(field, target, value)
    try:
        return msgspec.convert({**msgspec.to_builtins(base), **changes}, Policy)
    except msgspec.ValidationError as error:
        raise _as_bad_policy(error, changes) from None


def check(policy: Policy, *, load: bool) -> None:
    """Can it be obeyed? With `load`, users' functions are looked up here and now."""
    if load:
        plugins.enable()
    else:
        known = {
            field: getattr(Policy(), field)
            for field in ("order", "placement")
            if ":" in getattr(policy, field)
        }
        policy = msgspec.structs.replace(policy, **known)
    problem = plugins.problem(policy)
    if problem is None and load:
        problem = tryout.problem(policy, b"", 0)
    if problem is not None:
        field, _, message = problem.partition(": ")
        raise BadPolicy(field, units.shortened(message, 300))


# -- reading --------------------------------------------------------------------------------


def _base(value: Any) -> Policy:
    if not isinstance(value, str) or value not in SHIPPED:
        told = units.quoted(str(value))
        raise BadPolicy("base", f"there is no policy {told}; there are {', '.join(SHIPPED)}")
    return SHIPPED[value]


def _value(field: str, target: str, value: Any) -> Any:
    if field != target:
        return _time(field, value)
    if field == "tenants":
        return _tenants(value)
    if field == "preempt" and value not in list(Preempt):
        told = units.quoted(str(value))
        raise BadPolicy(field, f"must be one of {', '.join(Preempt)}, not {told}")
    if isinstance(value, str):
        return _text(field, value)
    if isinstance(value, int) and abs(value) > NUMBER_MAX:
        raise BadPolicy(field, "is too much")
    return value


def _time(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadPolicy(field, "must be a time, e.g. 90s, 10m or 7d")
    try:
        ms = units.duration_ms(str(value)[:100])
    except units.BadAmount as error:
        raise BadPolicy(field, str(error)) from None
    if ms > NUMBER_MAX:
        raise BadPolicy(field, "is too much")
    return ms


def _text(field: str, value: str) -> str:
    if field == "name" and _as_name(value) != value:
        fix = f"use up to {NAME_CHARACTERS_MAX} letters, digits, '.', '_' and '-'"
        raise BadPolicy(field, f"{units.quoted(value)} will not do; {fix}")
    if not value.isprintable() or len(value) > 256:
        raise BadPolicy(field, f"{units.quoted(value)} will not do; it must be one short line")
    return value


def _tenants(value: Any) -> list[dict[str, Any]]:
    """A table by name is easiest to write; a list is what `show --json` prints."""
    rows: list[Any] = list(value) if isinstance(value, list) else []
    if isinstance(value, dict):
        rows = [{"name": str(name), **_tenant(str(name), about)} for name, about in value.items()]
    elif not isinstance(value, list):
        raise BadPolicy("tenants", "must be names with what they have, e.g. {lab: {weight: 2}}")
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise BadPolicy("tenants", "must be names with what they have; one has no name")
        _tenant(row["name"], {field: row[field] for field in row if field != "name"})
    return rows


def _tenant(name: str, about: Any) -> dict[str, Any]:
    where = f"tenants.{units.shortened(name, 63)}"
    if about is None:
        return {}
    if not isinstance(about, dict):
        raise BadPolicy(where, "must be a table, e.g. {weight: 2, quota_gpus: 16}")
    for field, value in about.items():
        if field not in TENANT_FIELDS:
            raise _unknown(field, TENANT_FIELDS, f"a tenant has {', '.join(TENANT_FIELDS)}", where)
        if isinstance(value, int) and abs(value) > NUMBER_MAX:
            raise BadPolicy(f"{where}.{field}", "is too much")
    return about


def _unknown(field: Any, known: tuple[str, ...], has: str, where: str = "") -> BadPolicy:
    close = difflib.get_close_matches(str(field).replace("-", "_").lower(), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else has
    return BadPolicy(where, f"there is no field {units.quoted(str(field))}; {hint}")


def _as_bad_policy(error: msgspec.ValidationError, changes: dict[str, Any]) -> BadPolicy:
    message, _, path = str(error).partition(" - at `$.")
    match = re.match(r"tenants\[(\d+)\]\.?(\w*)", path)
    if match is not None:
        name = changes["tenants"][int(match[1])]["name"]
        where = f"tenants.{units.shortened(name, 63)}" + (f".{match[2]}" if match[2] else "")
    else:
        target = path.rstrip("`")
        where = next((field for field, name in FIELDS.items() if name == target), target)
    return BadPolicy(where, message[:1].lower() + message[1:].replace("`", ""))


def _as_name(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:NAME_CHARACTERS_MAX]
    return plain if re.fullmatch(JOB_NAME_PATTERN, plain) else f"p{plain}"[:NAME_CHARACTERS_MAX]


# -- telling --------------------------------------------------------------------------------


def to_text(policy: Policy) -> str:
    """A policy file in YAML that says the same."""
    lines = []
    for field, value in told(policy).items():
        if field.startswith("tenants."):
            lines.append(f"  {_scalar(field.removeprefix('tenants.'))}: {value}")
            continue
        line = f"{field}: {value}".rstrip()
        lines.append(f"{line:{COMMENT_COLUMN}}# {ABOUT[field]}" if field in ABOUT else line)
    return "\n".join(lines) + "\n"


def told(policy: Policy) -> dict[str, str]:
    """Every field and every tenant as a file would write it."""
    rows: dict[str, str] = {}
    tenants: dict[str, str] = {}
    for field, target in FIELDS.items():
        value = getattr(policy, target)
        if field == "tenants":
            tenants = {f"tenants.{tenant.name}": _about(tenant) for tenant in value}
        else:
            rows[field] = units.duration_exact(value) if field != target else _scalar(value)
    return {**rows, "tenants": "" if tenants else "{}", **tenants}


def differences(before: Policy, after: Policy) -> list[tuple[str, str, str]]:
    """(field, one, other) where they differ."""
    one, other = told(before), told(after)
    fields = [field for field in {**one, **other} if field != "tenants"]
    pairs = [(field, one.get(field, ""), other.get(field, "")) for field in fields]
    return [row for row in pairs if row[1] != row[2]]


def _about(tenant: Tenant) -> str:
    usual = Tenant(name=tenant.name)
    said = [
        f"{field}: {_scalar(getattr(tenant, field))}"
        for field in TENANT_FIELDS
        if getattr(tenant, field) != getattr(usual, field)
    ]
    return "{" + ", ".join(said) + "}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*(:[A-Za-z0-9_.]+)?", str(value))
    if isinstance(value, str) and (not plain or value.lower() in ("true", "false", "null")):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
