"""The file of hosts: what it may say, and what is said about what it may not."""

from __future__ import annotations

import pytest

from shoal.forms.failure import Failure
from shoal.forms.hosts import parse
from shoal.hosts.spec import HostSpec

GOOD = """\
# two servers
- host: 10.0.0.2
  user: ubuntu
  port: 2222
  name: gpu1
  place: b1/r1
  gpus: 8
  python: ~/venv/bin/python
- ada@gpu2.example.com
- GPU3
"""


def test_a_list_of_hosts_with_fields_or_just_by_name() -> None:
    first, second, third = parse(GOOD, "hosts.yaml")
    assert first == HostSpec(
        host="10.0.0.2",
        user="ubuntu",
        port=2222,
        name="gpu1",
        place="b1/r1",
        gpus=8,
        python="~/venv/bin/python",
    )
    assert (first.node, first.target) == ("gpu1", "ubuntu@10.0.0.2:2222")
    assert (second.node, second.target) == ("gpu2.example.com", "ada@gpu2.example.com")
    assert (third.node, third.target) == ("gpu3", "GPU3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: write a list of hosts"),
        ("hosts: 3\n", "line 1: write a list of hosts"),
        ("- host: a\n- user: ada\n", "line 2: host: is missing"),
        ("- host: a\n  prot: 3\n", "line 2: there is no field 'prot'; did you mean 'port'?"),
        ("- host: a\n  color: red\n", "line 2: there is no field 'color'; a host has host, user"),
        ("- host: a\n  port: ssh\n", "line 2: port: must be a whole .*, not 'ssh'"),
        ("- host: a\n  port: 70000\n", "line 2: port: must be a whole number"),
        ("- host: a\n  gpus: -1\n", "line 2: gpus: must be a whole number from 0"),
        ("- host: a\n  name: GPU_1\n", "line 2: name: must be up to 63 lower-case letters"),
        ("- host: a\n  place: b1//r1\n", "line 2: place: must be a path"),
        ("- host: -oProxyCommand=x\n", "line 1: host: must be a name or an address"),
        ("- host: a\n  user: '-l'\n", "line 2: user: must be"),
        ("- host: a\n  python: 'x; rm y'\n", "line 2: python: must be the path"),
        ("- host: [a]\n", "line 1: host: must be a name"),
        ("- host:\n", "line 1: host: must be a name or an address, .* not nothing"),
        ("- host: a\n  host: b\n", "line 2: host: is given twice"),
        ("- a\n- b\n- a\n", "line 3: host: a is in line 1 already"),
        ("- host: a\n  name: x\n- host: b\n  name: x\n", "line 3: name: x is in line 1 already"),
        ("- [a, b]\n", "line 1: a host has fields"),
        ("- host: *a\n", "line 1: not YAML"),
        ("- host: 'a\n", "line 2: not YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line_and_field(text: str, words: str) -> None:
    with pytest.raises(Failure, match=f"^hosts.yaml, {words}"):
        parse(text, "hosts.yaml")
