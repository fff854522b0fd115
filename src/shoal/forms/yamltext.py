"""YAML as a job file may use it: the plain types of YAML 1.2, no aliases, no key given twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """Aliases are refused because a few of them can unfold into gigabytes; `yes`, `on`, `0123`
    and `1:30` stay text because YAML 1.1 turns them into something else behind the user's back."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not taken", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a name must be plain text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"{key.value[:40]!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false|True|False|TRUE|FALSE", "tTfF"),
    ("int", r"0|-?[1-9][0-9]{0,17}", "-0123456789"),
    ("float", r"-?[0-9]{1,17}\.[0-9]{1,17}", "-0123456789"),
    ("null", r"~|null|Null|NULL", "~nN"),
):
    PlainLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])


def load(text: str) -> Any:
    """Raises yaml.YAMLError with a mark, or RecursionError."""
    return yaml.load(text, Loader=PlainLoader)
