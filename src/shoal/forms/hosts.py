"""The hosts file: a YAML list, checked field by field. Errors name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from shoal.forms import units
from shoal.forms.datafile import read_text, unknown
from shoal.forms.failure import Failure
from shoal.forms.yamltext import PlainLoader
from shoal.hosts.spec import HostSpec
from shoal.model.node import Labels

HOSTS_MAX = 1_000
FIELDS = tuple(field.name for field in msgspec.structs.fields(HostSpec))
EXAMPLE = "- host: 10.0.0.2"
HINTS = {
    "host": "a name or an address, e.g. 10.0.0.2 or an alias of ~/.ssh/config",
    "user": "a user's name, e.g. ubuntu",
    "port": "a whole number from 1 to 65535",
    "name": "up to 63 lower-case letters, digits, '.' and '-', e.g. gpu1",
    "place": "a path such as b1/r2, outermost first",
    "gpus": "a whole number from 0 to 256",
    "labels": "names with values, e.g. {pool: a100, zone: b}",
    "python": "the path of a Python on the host that has Shoal, e.g. /opt/venv/bin/python",
}


def read_hosts(path: Path) -> list[HostSpec]:
    return parse(read_text(path, "hosts file"), str(path))


def parse(text: str, where: str) -> list[HostSpec]:
    root = _compose(text, where)
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        line = root.start_mark.line + 1 if root is not None else 1
        raise Failure(f"{where}, line {line}: write a list of hosts, e.g. {EXAMPLE}")
    if len(root.value) > HOSTS_MAX:
        raise Failure(f"{where}: there are {len(root.value)} hosts; the maximum is {HOSTS_MAX}")
    hosts: list[HostSpec] = []
    lines: dict[tuple[str, str], int] = {}
    for node in root.value:
        spec, line = _host(node, where), node.start_mark.line + 1
        for what, value in (("host", spec.target), ("name", spec.node)):
            first = lines.setdefault((what, value), line)
            if first != line:
                raise Failure(
                    f"{where}, line {line}: {what}: {value} is in line {first} already; "
                    + ("give each host once" if what == "host" else "give each node its own name")
                )
        hosts.append(spec)
    return hosts


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=PlainLoader)
        return root
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise Failure(f"{where}{line}: not YAML: {error.problem or 'it cannot be read'}") from None
    except (yaml.YAMLError, RecursionError) as error:
        words = (str(error).splitlines() or ["it cannot be read"])[0]
        raise Failure(f"{where}: not YAML: {words[:200]}") from None


def _host(node: yaml.Node, where: str) -> HostSpec:
    if isinstance(node, yaml.ScalarNode):
        return _short(node, where)
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, where, f"a host has fields, e.g. {EXAMPLE}")
    given: dict[str, Any] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if name not in FIELDS:
            error = unknown(name, FIELDS, f"a host has {', '.join(FIELDS)}")
            raise _wrong(key, where, error.message)
        if name in given:
            raise _wrong(key, where, f"{name}: is given twice")
        given[name] = _value(name, value, where)
    if "host" not in given:
        raise _wrong(node, where, f"host: is missing; {HINTS['host']}")
    return msgspec.convert(given, HostSpec)


def _short(node: yaml.ScalarNode, where: str) -> HostSpec:
    """USER@HOST alone."""
    user, at, host = node.value.rpartition("@")
    given = {"host": host, **({"user": user} if at else {})}
    for name, value in given.items():
        _check(name, value, node, where)
    return msgspec.convert(given, HostSpec)


def _value(name: str, node: yaml.Node, where: str) -> str | int | dict[str, str]:
    if name == "labels":
        return _labels(node, where)
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong(node, where, f"{name}: must be {HINTS[name]}")
    value: str | int = node.value
    if name in ("port", "gpus") and node.tag == "tag:yaml.org,2002:int":
        value = int(node.value)
    _check(name, value, node, where)
    return value


def _labels(node: yaml.Node, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(node, node)]
    for key, value in pairs:
        if not (isinstance(node, yaml.MappingNode) and isinstance(value, yaml.ScalarNode)):
            raise _wrong(key, where, f"labels: must be {HINTS['labels']}")
        found[str(key.value)] = value.value
        try:
            msgspec.convert({str(key.value): value.value}, Labels)
        except msgspec.ValidationError:
            said = units.quoted(f"{key.value}: {value.value}")
            raise _wrong(key, where, f"labels: must be {HINTS['labels']}, not {said}") from None
    return found


def _check(name: str, value: str | int, node: yaml.ScalarNode, where: str) -> None:
    filler = {} if name == "host" else {"host": "x"}
    try:
        msgspec.convert({**filler, name: value}, HostSpec)
    except msgspec.ValidationError:
        said = units.quoted(node.value) if node.value else "nothing"
        raise _wrong(node, where, f"{name}: must be {HINTS[name]}, not {said}") from None


def _wrong(node: yaml.Node, where: str, message: str) -> Failure:
    return Failure(f"{where}, line {node.start_mark.line + 1}: {message}")
