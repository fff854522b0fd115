"""How the values of fields are read: from what people write to the numbers and words of a spec.

Help pages load this module, so it imports neither msgspec nor the model. A reader takes the name of
the field and the value as written. It returns the value, or a tuple where a field sets several
targets, and raises `BadField` with the fix.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from shoal.forms import units
from shoal.forms.failure import BadField

Reader = Callable[[str, Any], Any]

EACH_GPU = 0  # `procs_per_node: gpu`
GPU_MEMORY_MB_MAX = 10_000_000
MODELS_MAX = 64
CONDITIONS_MAX = 64
IMAGE_CHARACTERS_MAX = 512
SECRET_PATTERN = (
    r"[A-Za-z][A-Za-z0-9._-]{0,62}"
    r"(=(/[A-Za-z][A-Za-z0-9._-]{0,62}|[A-Za-z_][A-Za-z0-9_]{0,127}))?"
)
YEAR_MS = 366 * 24 * 3_600_000
GPU_FORMS = (
    "write 1 or 2 for whole GPUs, 0.5 for half of one, or 20G for a share with 20 GB of its memory"
)


# -- numbers ------------------------------------------------------------------------------


class Count:
    """Reads a whole number within bounds."""

    def __init__(self, least: int, most: int, sense: str) -> None:
        self.least, self.most, self.sense = least, most, sense

    def __call__(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(field, value, f"a whole number ({self.sense})")
        if not self.least <= value <= self.most:
            shown = value if abs(value) < 10**15 else "that"
            limits = f"from {self.least} to {self.most} ({self.sense})"
            raise BadField(field, f"must be {limits}, not {shown}")
        return value


def amount(parse: Callable[[str], int], most: int, example: str, least: int = 0) -> Reader:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise wrong(field, value, f"an amount, e.g. {example}")
        if not isinstance(value, str) and value < 0:
            raise BadField(field, f"must not be negative; write e.g. {example}")
        text = value if isinstance(value, str) else _plain(value)
        try:
            found = parse(text)
        except units.BadAmount as error:
            raise BadField(field, str(error)) from None
        if found > most:
            raise BadField(field, f"{units.quoted(text)} is too much")
        if found < least:
            raise BadField(field, f"must be more than 0; write e.g. {example}")
        return found

    return read


cpus = amount(units.cpu_milli, 10_000_000, "4 or 0.5")


def memory(most: int, example: str) -> Reader:
    return amount(units.memory_mb, most, example)


def time(example: str, most: int = YEAR_MS, least: int = 0) -> Reader:
    return amount(units.duration_ms, most, example, least)


def span(least: int, most: int, noun: str, forms: str) -> Reader:
    """A number, or the least and the most: 2..8. The tuple has one or two numbers."""
    read_count = Count(least, most, noun)

    def read(field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, str):
            return (read_count(field, value),)
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", value)
        if match is None:
            raise BadField(field, f"{units.quoted(value)} is not a number of {field}; {forms}")
        found = tuple(read_count(field, int(part)) for part in match.groups() if part)
        if found[-1] < found[0]:
            first, last = found
            raise BadField(field, f"{first}..{last} is backwards; write {last}..{first}")
        return found

    return read


members = span(1, 16_384, "processes that start together", "write 4, or 2..8")
nodes = span(1, 16_384, "nodes with a process on each", "write 4, or 2..8")
_replicas = span(0, 10_000, "replicas", "write 2, or 1..8, or 0..4 to scale to zero when idle")


def replicas(field: str, value: Any) -> tuple[int, int]:
    found: tuple[int, ...] = _replicas(field, value)
    if not found[-1]:
        raise BadField(field, "0 replicas never serve; write 0..1 to scale to zero when idle")
    return found[0], found[-1]


def processes(field: str, value: Any) -> int:
    if value == "gpu":
        return EACH_GPU
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)
    return Count(1, 1024, "processes that share the GPUs of a member; or gpu: one per GPU")(
        field, value
    )


_gpu_count = Count(0, 256, "GPUs per process")


def gpus(field: str, value: Any) -> tuple[int, ...]:
    """(gpus,) or (1, thousandths of one) or (1, 0, MB of its memory)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (_gpu_count(field, value),)
    if isinstance(value, bool) or not isinstance(value, str | float):
        raise wrong(field, value, f"a number or an amount of memory; {GPU_FORMS}")
    text = value.strip() if isinstance(value, str) else _plain(value)
    if re.fullmatch(r"-?[0-9]{1,15}", text):
        return (_gpu_count(field, int(text)),)
    if re.fullmatch(r"0\.[0-9]{1,9}", text):
        milli = math.floor(Decimal(text) * 1000)
        if not milli:
            raise BadField(field, f"{text} of a GPU is too little; the least is 0.001")
        return 1, milli
    try:
        share_mb = units.memory_mb(text)
    except units.BadAmount:
        share_mb = 0
    if not share_mb:
        raise BadField(field, f"{units.quoted(text)} is not a number of GPUs; {GPU_FORMS}")
    if share_mb > GPU_MEMORY_MB_MAX:
        raise BadField(field, f"{units.quoted(text)} is more than any GPU has")
    return 1, 0, share_mb


def _plain(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")


# -- words --------------------------------------------------------------------------------


def text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(field, value, "text; put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadField(field, "holds bytes that are not UTF-8 text; it must be text") from None
    return value


def matching(pattern: str, most: int, problem: str) -> Reader:
    """Text of 1 to `most` characters that looks like `pattern`; `problem` follows the text."""

    def read(field: str, value: Any) -> str:
        found = text(field, value)
        if not 0 < len(found) <= most or not re.fullmatch(pattern, found):
            raise BadField(field, f"{units.quoted(found)} {problem}")
        return found

    return read


name = matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]*",
    63,
    "is not a valid name; use up to 63 letters, digits, '.', '_' and '-', beginning with a letter "
    "or digit",
)
_service_name = matching(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?",
    63,
    "is not a valid name for a URL; use up to 63 lower-case letters, digits "
    "and '-', with a letter or digit at both ends",
)
url_path = matching(r"/[A-Za-z0-9._:/@+,=-]*", 255, "is not a path such as /health, or openai")


def probe(field: str, value: Any) -> tuple[str, bool]:
    """The path, and whether it has to list a model."""
    return ("/v1/models", True) if value == "openai" else (url_path(field, value), False)


header = matching(
    r"[A-Za-z0-9!#$&'*+.^_`|~-]+", 64, "is not a name of a header or cookie; write e.g. x-session"
)
certificate = matching(
    r"[A-Za-z0-9._:/@+,=-]+",
    255,
    "is neither a secret's name nor a usable path; name a PEM file whose path has only letters, "
    "digits and ._:/@+,=-",
)


def host(field: str, value: Any) -> str:
    from shoal.model.service import HOST_PATTERN

    found: str = matching(HOST_PATTERN, 255, "is not a host name such as chat.example.com")(
        field, value
    )
    return found


def names_secret(value: str) -> bool:
    """A secret, and not a PEM file here: `certificate: web-tls` beside `certificate: web.pem`."""
    from shoal.model.secret import SECRET_NAME_PATTERN

    return bool(re.fullmatch(SECRET_NAME_PATTERN, value)) and not value.endswith(".pem")


def service_name(field: str, value: Any) -> str:
    found: str = _service_name(field, value)
    if re.fullmatch(r"j[0-9]+", found):
        raise BadField(field, f"{found} looks like a job id; choose another name, e.g. chat")
    return found


def image(field: str, value: Any) -> str:
    from shoal.model.job import IMAGE_PATTERN

    found = text(field, value)
    if not found or len(found) > IMAGE_CHARACTERS_MAX or not re.fullmatch(IMAGE_PATTERN, found):
        problem = "is not the name of an image, e.g. docker.io/pytorch/pytorch:2.4"
        raise BadField(field, f"{units.quoted(found)} {problem}")
    return found


def secrets(field: str, value: Any) -> tuple[str, ...]:
    from shoal.model.job import SECRETS_MAX

    found = tuple(
        text(field, one) for one in (value if isinstance(value, list | tuple) else [value])
    )
    for one in found:
        if not re.fullmatch(SECRET_PATTERN, one):
            problem = "is not a secret's name, NAME=VARIABLE or NAME=/FILE; see: shoal secret list"
            raise BadField(field, f"{units.quoted(one)} {problem}")
    if len(found) > SECRETS_MAX:
        raise BadField(field, f"names more than {SECRETS_MAX} secrets")
    return found


CONDITION_FORMS = "write key=value, key=a|b, key!=value, key or !key"
TOLERATION_FORMS = "write key, key=value, or * for every taint"
_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"


def words(pattern: str, forms: str) -> Reader:
    """Texts that are separated by commas, or a list of them."""

    def read(field: str, value: Any) -> tuple[str, ...]:
        given = value if isinstance(value, list | tuple) else [value]
        found = [part.strip() for one in given for part in text(field, one).split(",")]
        for one in found:
            if not re.fullmatch(pattern, one):
                raise BadField(field, f"{units.quoted(one)} cannot be read; {forms}")
        if len(found) > CONDITIONS_MAX:
            raise BadField(field, f"has {len(found)} parts; the maximum is {CONDITIONS_MAX}")
        return tuple(dict.fromkeys(found))

    return read


conditions = words(rf"!?{_KEY}|{_KEY}!?={_VALUE}(?:\|{_VALUE})*", CONDITION_FORMS)
tolerations = words(rf"\*|{_KEY}(?:={_VALUE})?", TOLERATION_FORMS)


def label(field: str, value: Any) -> str:
    found = text(field, value).strip()
    if not re.fullmatch(_KEY, found):
        raise BadField(field, f"{units.quoted(found)} is not the name of a label, e.g. zone")
    return found


def changes(field: str, value: Sequence[str], *, bare: bool) -> dict[str, str | None]:
    """`key=value` sets, `key-` removes (None); `key` alone sets it without a value if `bare`."""
    forms = "write key=value to set it, or key- to remove it"
    if bare:
        forms = "write key or key=value to set it, or key- to remove it"
    pattern = rf"{_KEY}-|{_KEY}={_VALUE}" + (rf"|{_KEY}" if bare else "")
    found: dict[str, str | None] = {}
    for one in words(pattern, forms)(field, list(value)):
        key, equals, text_ = one.partition("=")
        gone = not equals and one.endswith("-")
        found[one.removesuffix("-") if gone else key] = None if gone else text_
    return found


_access = words(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "write open, cluster, or names of tenants")


def access(field: str, value: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = _access(field, value)
    return found


clusters = words(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", "write names of neighbors: west,south")


def share(field: str, value: Any) -> int:
    """A part of all, in thousandths of them: 0.99, or 99%."""
    text_ = value if isinstance(value, str) else _plain(value) if _is_number(value) else ""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*(%?)", text_.strip())
    milli = math.floor(Decimal(match[1]) * (10 if match[2] else 1000)) if match else -1
    if not 1 <= milli <= 1000:
        raise BadField(field, f"must be a share such as 0.99 or 99%, not {kind(value)}")
    return milli


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def folder(field: str, value: Any) -> str:
    if not text(field, value):
        raise BadField(field, "is empty; name a folder, or leave it out")
    return str(value)


class Choice:
    """Reads one of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, field: str, value: Any) -> str:
        if value not in self.words:
            shown = units.quoted(str(value))
            raise BadField(field, f"must be one of {', '.join(self.words)}, not {shown}")
        return str(value)


def switch(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false")
    return value


def models(field: str, value: Any) -> tuple[str, ...]:
    found = tuple(
        text(field, one) for one in (value if isinstance(value, list | tuple) else [value])
    )
    if len(found) > MODELS_MAX:
        raise BadField(field, f"names more than {MODELS_MAX} models")
    if not all(model.strip() for model in found):
        raise BadField(field, "is empty; name a model as `shoal nodes` shows it, e.g. A100")
    return found


def command(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            words = shlex.split(text(field, value))
        except ValueError as error:
            if isinstance(error, BadField):
                raise
            raise BadField(field, "has a quote that is not closed") from None
    elif isinstance(value, list | tuple):
        words = [_word(field, word, "has a word that", "it") for word in value]
    else:
        raise wrong(field, value, "text or a list of words, e.g. python train.py")
    if not words:
        raise BadField(field, "is empty; say what to run, e.g. python train.py")
    return tuple(words)


def environment(field: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(field, value, "names with values, e.g. {SEED: 1}")
    found = {}
    for key, one in value.items():
        shown = units.quoted(str(key))
        if not isinstance(key, str) or not (key.isascii() and key.isidentifier()):
            fix = "use letters, digits and _, not beginning with a digit"
            raise BadField(field, f"{shown} cannot name a variable; {fix}")
        found[key] = _word(field, one, shown, "its value")
    return found


def _word(field: str, value: Any, where: str, quote: str) -> str:
    if isinstance(value, str):
        return text(field, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadField(field, f"{where} is {kind(value)}; put {quote} in quotes")


def requirements(field: str, value: Any) -> str:
    """The content of the file: nodes do not have the file itself."""

    return requirements_text(field, text(field, value))


# -- refusals -----------------------------------------------------------------------------


def wrong(field: str, value: Any, wanted: str) -> BadField:
    return BadField(field, f"must be {wanted}, not {kind(value)}")


def kind(value: Any) -> str:
    match value:
        case bool():
            return f"true or false ({str(value).lower()})"
        case str():
            return f"the text {units.quoted(value)}"
        case int() | float() if abs(value) >= 10**15:
            return "a huge number"
        case int() | float():
            return f"the number {units.quoted(str(value))[1:-1]}"
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case None:
            return "nothing"
        case _:
            return f"a {type(value).__name__}"


# How labels of jobs and wishes for notices are read. Help pages load this module, too.


WISH_FORMS = (
    "write WHERE or WHAT=WHERE, e.g. failed=https://..., ended,waiting:1h=slack:@NAME or "
    "mail:me@example.com; see: shoal notify --help"
)


def labels(field: str, value: Any) -> dict[str, str]:
    """`{run: a}`, or texts such as run=a."""
    if isinstance(value, dict):
        pairs = [(str(key), _as_text(field, key, one)) for key, one in value.items()]
    else:
        given = value if isinstance(value, list | tuple) else [value]
        split = (text(field, one).strip().partition("=") for one in given)
        pairs = [(key, one if equals else "\n") for key, equals, one in split]
    for key, one in pairs:
        if not re.fullmatch(_KEY, key) or not re.fullmatch(_VALUE, one):
            shown = units.quoted(f"{key}={one}".rstrip("=\n"))
            raise BadField(field, f"{shown} cannot be read; write key=value, e.g. run=a")
    return dict(pairs)


def _as_text(field: str, key: Any, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadField(field, f"{units.quoted(str(key))} is {kind(value)}; put it in quotes")
    return str(value)


def wishes(field: str, value: Any) -> tuple[str, ...]:
    """The text itself is not repeated in an error: a URL may be a secret."""
    from shoal.model.notice import OF_JOBS, WISH_CHARACTERS_MAX, wanted_of

    given = value if isinstance(value, list | tuple) else [value]
    found = [text(field, one).strip() for one in given]
    for one in found:
        try:
            wanted = wanted_of(one)
        except ValueError:
            raise BadField(field, f"cannot be read; {WISH_FORMS}") from None
        if len(one) > WISH_CHARACTERS_MAX:
            raise BadField(field, f"is longer than {WISH_CHARACTERS_MAX} characters")
        for what in wanted.on:
            if what not in OF_JOBS:
                fix = f"a rule can send it: shoal notify add {what}=WHERE"
                raise BadField(field, f"{what} is not about one job; {fix}")
    return tuple(dict.fromkeys(found))


# A pip requirements file that is sent with a job: all of it, with the same meaning on a node.


# Lines that name a file or folder of this machine, which a node may not have.
ELSEWHERE = re.compile(r"(-r|-c|--requirement|--constraint|-e|--editable)\b|\.{1,2}(/|$)")


def requirements_text(field: str, name: str) -> str:
    from pathlib import Path

    path = Path(name)
    if not path.is_file():
        what = "is not a file" if path.exists() else "there is no such file"
        raise BadField(field, f"{name}: {what}; name one like requirements.txt")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadField(field, f"{name}: is not text (UTF-8)") from None
    except OSError as error:
        raise BadField(field, f"{name}: {error.strerror}") from None
    return checked_requirements(field, text, f"{name}: ", f"{name} ")


def checked_requirements(field: str, text: str, before: str = "", line_of: str = "") -> str:
    """The list itself; `before` and `line_of` name the file that it is from, if it is from one."""
    from shoal.model.job import REQUIREMENTS_BYTES_MAX

    if len(text.encode("utf-8", "surrogatepass")) > REQUIREMENTS_BYTES_MAX or "\0" in text:
        limit = f"{REQUIREMENTS_BYTES_MAX // 1024} KiB"
        why = "contains a NUL byte" if "\0" in text else f"is longer than {limit}"
        raise BadField(field, f"{before}{why}, so it is not a requirements file")
    for number, line in enumerate(text.splitlines(), 1):
        if "://" not in line and ELSEWHERE.match(line.strip()):
            message = f"'{line.strip()[:60]}' names a file of this machine"
            fix = "nodes get only this list, so write its lines here, or give a whole path or URL"
            raise BadField(field, f"{line_of}line {number}: {message}; {fix}")
    if not any(line.strip() and not line.strip().startswith("#") for line in text.splitlines()):
        raise BadField(field, f"{before}lists no packages; leave it out")
    return text
