"""The fields of a job as people write them, in a file or as flags, checked one by one."""

from __future__ import annotations

import enum
import math
import re
import shlex
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.core.phases.admit import spec_problem
from shoal.forms import units
from shoal.forms.requirements import BadRequirements, requirements_text
from shoal.model.job import MEMBERS_MAX, TIME_MS_MAX, JobSpec, Restart, Within
from shoal.model.resources import plural

GPUS_MAX = 256
PROCESSES = "processes"  # no field of a JobSpec: it is translated
EACH_GPU = 0
GPU_MEMORY_MB_MAX = 10_000_000
GPU_FORMS = (
    "write 1 or 2 for whole GPUs, 0.5 for half of one, "
    "or 20G for as much of one as 20 GB of its memory is"
)


Choice = TypeVar("Choice", bound=enum.StrEnum)


class BadJob(ValueError):
    """What is wrong, in which field, and how to mend it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


def to_spec(fields: Mapping[str, Any]) -> JobSpec:
    """Fields in the friendly form -> a JobSpec that the controller would not find fault with."""
    ready: dict[str, Any] = {}
    for name, value in fields.items():
        field = FIELDS[name]
        found = field.read(name, value)
        if not field.targets:
            continue  # it is for who sends the job, not for who runs it
        ready |= found if len(field.targets) > 1 else {field.targets[0]: found}
    if "command" not in ready:
        raise BadJob("command", "is missing; say what to run, e.g. command: python train.py")
    _settle_restart(ready)
    _settle_gpus(fields, ready)
    _settle_processes(ready)
    _settle_places(ready)
    try:
        spec = msgspec.convert(ready, JobSpec)
    except msgspec.ValidationError as error:
        raise _as_bad_job(error) from None
    problem = spec_problem(spec)
    if problem is not None:
        raise BadJob(problem.field, problem.message)
    return spec


def _settle_restart(ready: dict[str, Any]) -> None:
    """Retries alone mean: run it again when it fails."""
    if not ready.get("retries"):
        return
    restart = ready.setdefault("restart", Restart.ON_FAILURE)
    if restart is not Restart.ON_FAILURE:
        message = f"have no effect with restart: {restart}; leave one out, or use on-failure"
        raise BadJob("retries", message)


def _settle_gpus(fields: Mapping[str, Any], ready: dict[str, Any]) -> None:
    """What describes GPUs needs some."""
    if ready.get("gpu_milli") == 0 and "gpu_memory" in fields:
        raise BadJob("gpu_memory", "is said by gpus already; leave it out, or write gpus: 1")
    for name in ("gpu_memory", "gpu_model"):
        if ready.get(FIELDS[name].targets[0]) and not ready.get("gpus"):
            raise BadJob(name, "has no effect without GPUs; say how many, e.g. gpus: 1")


def _settle_processes(ready: dict[str, Any]) -> None:
    """So many processes share what was asked for as one member: as many members instead, each
    with its part, and all of them on one node."""
    processes = ready.pop(PROCESSES, 1)
    if processes == 1:
        return
    name = "procs_per_node"
    if ready.get("members_per_node"):
        raise BadJob(name, "and per_node say the same in two ways; leave one out")
    gpus = ready.get("gpus", 0)
    if processes == EACH_GPU:
        if gpus < 1 or ready.get("gpu_milli", 1000) != 1000:
            raise BadJob(name, "'gpu' means one for each GPU; say how many GPUs, e.g. gpus: 8")
        processes = gpus
    if gpus % processes or ready.get("gpu_milli", 1000) != 1000:
        message = f"{processes} processes cannot share {plural(gpus, 'GPU')} evenly"
        raise BadJob(name, f"{message}; use a number that divides them, or gpu for one each")
    ready["gpus"] = gpus // processes
    ready["members_per_node"] = processes
    ready["members"] = ready.get("members", 1) * processes
    ready["members_max"] = ready.get("members_max", 0) * processes
    for field in ("cpu_milli", "memory_mb"):
        if field in ready:
            ready[field] = -(-ready[field] // processes)
    most = max(ready["members"], ready["members_max"])
    if most > MEMBERS_MAX:
        raise BadJob(name, f"that makes {most} processes; the most is {MEMBERS_MAX}")


def _settle_places(ready: dict[str, Any]) -> None:
    if ready.get("within_required") and ready.get("within", Within.ANYWHERE) is Within.ANYWHERE:
        raise BadJob("strict", "has no effect without within; add e.g. within: rack")
    per_node = ready.get("members_per_node", 0)
    for members in (ready.get("members", 1), ready.get("members_max", 0)):
        if per_node and members % per_node:
            message = f"{per_node} on each node cannot make {members} members"
            raise BadJob("per_node", f"{message}; use a number that divides them")


# -- fields -------------------------------------------------------------------------------


def _command(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        text = _unicode(field, value)
        try:
            words = shlex.split(text)
        except ValueError:
            raise BadJob(field, "has a quote that is not closed") from None
    elif isinstance(value, list | tuple):
        words = [_word(field, word) for word in value]
    else:
        raise wrong(field, value, "text or a list of words, e.g. python train.py")
    if not words:
        raise BadJob(field, "is empty; say what to run, e.g. python train.py")
    return tuple(words)


def _word(field: str, word: Any) -> str:
    if isinstance(word, str):
        return _unicode(field, word)
    if isinstance(word, int) and not isinstance(word, bool):
        return str(word)
    raise BadJob(field, f"has a word that is {_kind(word)}; put it in quotes")


def _env(field: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(field, value, "names with values, e.g. {SEED: 1}")
    return {_env_name(field, name): _env_value(field, name, v) for name, v in value.items()}


def _env_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        fix = "use letters, digits and _, not beginning with a digit"
        raise BadJob(field, f"{units.quoted(str(name))} cannot name a variable; {fix}")
    return name


def _env_value(field: str, name: str, value: Any) -> str:
    if isinstance(value, str):
        return _unicode(field, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    short = units.quoted(name)
    raise BadJob(field, f"{short} is {_kind(value)}; put its value in quotes")


def whole_number(least: int, most: int, sense: str) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(field, value, f"a whole number ({sense})")
        if not least <= value <= most:
            told = value if abs(value) < 10**15 else "that"
            raise BadJob(field, f"must be from {least} to {most} ({sense}), not {told}")
        return value

    return read


def amount(parse_text: Callable[[str], int], most: int, example: str) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise wrong(field, value, f"an amount, e.g. {example}")
        if not isinstance(value, str) and value < 0:
            raise BadJob(field, f"must not be negative; write e.g. {example}")
        text = value if isinstance(value, str) else f"{value:.9f}".rstrip("0").rstrip(".")
        try:
            found = parse_text(text)
        except units.BadAmount as error:
            raise BadJob(field, str(error)) from None
        if found > most:
            raise BadJob(field, f"{units.quoted(text)} is too much")
        return found

    return read


_count = whole_number(1, MEMBERS_MAX, "processes that start together")
_gpu_count = whole_number(0, GPUS_MAX, "GPUs per member")


def _members(field: str, value: Any) -> dict[str, int]:
    """A number, or the least and the most of an elastic gang: 2..8."""
    if not isinstance(value, str):
        return {"members": _count(field, value)}
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", value)
    if match is None:
        raise BadJob(field, f"{units.quoted(value)} is no number of members; write 4, or 2..8")
    least = _count(field, int(match[1]))
    if match[2] is None:
        return {"members": least}
    most = _count(field, int(match[2]))
    if most < least:
        raise BadJob(field, f"{least}..{most} ends before it begins; write {most}..{least}")
    return {"members": least, "members_max": most}


def _processes(field: str, value: Any) -> int:
    if value == "gpu":
        return EACH_GPU
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)
    return whole_number(1, 1024, "processes for each member's share; or gpu: one a GPU")(
        field, value
    )


def _gpus(field: str, value: Any) -> dict[str, int]:
    """Whole GPUs, a share of one, or as much of one as some of its memory is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"gpus": _gpu_count(field, value)}
    if isinstance(value, bool) or not isinstance(value, str | float):
        raise wrong(field, value, f"a number or an amount of memory; {GPU_FORMS}")
    text = value.strip() if isinstance(value, str) else f"{value:.9f}".rstrip("0").rstrip(".")
    if re.fullmatch(r"-?[0-9]{1,15}", text):
        return {"gpus": _gpu_count(field, int(text))}
    if re.fullmatch(r"0\.[0-9]{1,9}", text):
        milli = math.floor(Decimal(text) * 1000)
        if not milli:
            raise BadJob(field, f"{text} of a GPU is too little; the least is 0.001")
        return {"gpus": 1, "gpu_milli": milli}
    try:
        share_mb = units.memory_mb(text)
    except units.BadAmount:
        share_mb = 0
    if not share_mb:
        raise BadJob(field, f"{units.quoted(text)} will not do; {GPU_FORMS}")
    if share_mb > GPU_MEMORY_MB_MAX:
        raise BadJob(field, f"{units.quoted(text)} is more than any GPU has")
    return {"gpus": 1, "gpu_milli": 0, "gpu_memory_mb": share_mb}


def _models(field: str, value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    models = tuple(plain_text(field, name) for name in names)
    if len(models) > 64:
        raise BadJob(field, "names more than 64 models")
    if not all(model.strip() for model in models):
        raise BadJob(field, "is empty; name a model as `shoal nodes` shows it, e.g. A100")
    return models


def _yes_or_no(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false")
    return value


def plain_text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(field, value, "text; put it in quotes")
    return _unicode(field, value)


def _name(field: str, value: Any) -> str:
    text = plain_text(field, value)
    fix = "use up to 63 letters, digits, '.', '_' and '-', beginning with a letter or digit"
    plain = text.isascii() and all(c.isalnum() or c in "._-" for c in text)
    if not (0 < len(text) <= 63 and plain and text[0].isalnum()):
        raise BadJob(field, f"{units.quoted(text)} will not do; {fix}")
    return text


def one_of(choices: type[Choice]) -> Callable[[str, Any], Choice]:
    words = [choice.value for choice in choices]

    def read(field: str, value: Any) -> Choice:
        if value not in words:
            told = units.quoted(str(value))
            raise BadJob(field, f"must be one of {', '.join(words)}, not {told}")
        return choices(value)

    return read


def _workdir(field: str, value: Any) -> str:
    text = plain_text(field, value)
    if not text:
        raise BadJob(field, "is empty; name a folder, or leave it out")
    return text


def _unicode(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadJob(field, "holds bytes that are not UTF-8 text; it must be text") from None
    return text


def read_requirements(field: str, value: Any) -> str:
    """What the file says goes along, for the node does not have the file."""
    try:
        return requirements_text(plain_text(field, value))
    except BadRequirements as error:
        raise BadJob(field, str(error)) from None


_time = amount(units.duration_ms, TIME_MS_MAX, "90s, 10m or 2h")


class Field(NamedTuple):
    """What a friendly field stands for in a JobSpec. With several targets `read` gives a table;
    without any it is checked, and heeded by who sends the job."""

    targets: tuple[str, ...]
    read: Callable[[str, Any], Any]


FIELDS: dict[str, Field] = {
    "command": Field(("command",), _command),
    "name": Field(("name",), _name),
    "members": Field(("members", "members_max"), _members),
    "gpus": Field(("gpus", "gpu_milli", "gpu_memory_mb"), _gpus),
    "gpu_memory": Field(
        ("gpu_memory_mb",), amount(units.memory_mb, GPU_MEMORY_MB_MAX, "40G or 80G")
    ),
    "gpu_model": Field(("gpu_models",), _models),
    "cpus": Field(("cpu_milli",), amount(units.cpu_milli, 10_000_000, "4 or 0.5")),
    "memory": Field(("memory_mb",), amount(units.memory_mb, 1_000_000_000, "512M or 4G")),
    "within": Field(("within",), one_of(Within)),
    "strict": Field(("within_required",), _yes_or_no),
    "per_node": Field(("members_per_node",), whole_number(0, MEMBERS_MAX, "members on each node")),
    "procs_per_node": Field((PROCESSES,), _processes),
    "whole_nodes": Field(("whole_nodes",), _yes_or_no),
    "tenant": Field(("tenant",), _name),
    "priority": Field(("priority",), whole_number(-1000, 1000, "higher goes first")),
    "preemptible": Field(("preemptible",), _yes_or_no),
    "checkpoint_every": Field(("checkpoint_ms",), _time),
    "estimate": Field(("estimate_ms",), _time),
    "time_limit": Field(("time_limit_ms",), _time),
    "restart": Field(("restart",), one_of(Restart)),
    "retries": Field(("retries",), whole_number(0, 1000, "times it may fail and run again")),
    "backoff": Field(("backoff_ms",), _time),
    "stop_grace": Field(("stop_grace_ms",), amount(units.duration_ms, 3_600_000, "10s or 2m")),
    "env": Field(("env",), _env),
    "workdir": Field(("workdir",), _workdir),
    "pack": Field((), _yes_or_no),
    "requirements": Field(("requirements",), read_requirements),
}


# -- refusals -----------------------------------------------------------------------------


def wrong(field: str, value: Any, wanted: str) -> BadJob:
    return BadJob(field, f"must be {wanted}, not {_kind(value)}")


def _kind(value: Any) -> str:
    match value:
        case bool():
            return f"true or false ({str(value).lower()})"
        case str():
            return f"the text {units.quoted(value)}"
        case int() | float():
            return (
                f"the number {units.quoted(str(value))[1:-1]}"
                if abs(value) < 10**15
                else "a huge number"
            )
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case None:
            return "nothing"
        case _:
            return f"a {type(value).__name__}"


def _as_bad_job(error: msgspec.ValidationError) -> BadJob:
    """The types are stricter than the readers above in something: say what they say."""
    message, _, path = str(error).partition(" - at `$.")
    target = path.rstrip("`").split("[")[0].split(".")[0]
    names = [name for name, field in FIELDS.items() if target in field.targets]
    return BadJob(names[0] if names else "", message[:1].lower() + message[1:].replace("`", ""))
