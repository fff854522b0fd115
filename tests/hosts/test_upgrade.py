"""Which hosts an upgrade touches, and what it says about the others. The hosts are answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from shoal.hosts import bring as scripts
from shoal.hosts import upgrade
from shoal.hosts.bring import RemoteError, Ssh, Wheel
from shoal.hosts.spec import HostSpec, Receipt, Software, Unfit

NEW, OLD = "0.7.0", "0.6.0"
WHEEL = Wheel("shoal-0.7.0-py3-none-any.whl", b"wheel", "new")


class Hosts(Ssh):
    """Answers scripts for hosts of which `installed` says the version; the others do not answer."""

    def __init__(self, **installed: str) -> None:
        self.installed = installed
        self.ran: list[tuple[str, str]] = []

    def run(
        self,
        spec: HostSpec,
        script: str,
        *arguments: str,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> str:
        names = {
            scripts.LOOK: "look",
            scripts.INSTALL: "install",
            scripts.SHOAL: "replace",
            scripts.NOTE: "note",
        }
        self.ran.append((spec.host, names[script]))
        if spec.host not in self.installed:
            raise RemoteError("it does not answer")
        if script == scripts.INSTALL:
            self.installed[spec.host] = NEW
        if script == scripts.SHOAL:
            return f'[{{"part": "{spec.node}", "state": "upgraded"}}]'
        has = self.installed[spec.host]
        receipt = Receipt(Software(has, "new" if has == NEW else "old"), ("join", "url"))
        told = {"home": "/h", "python": "/p", "version": "3.11", "shoal": has, "node": spec.host}
        told["free_kb"] = "10000000"
        told["receipt"] = msgspec.json.encode(receipt).decode()
        return "\n".join(f"{name} {value}" for name, value in told.items())


class Nodes:
    def __init__(self, hosts: Hosts, busy: str = "") -> None:
        self.agents = dict(hosts.installed)
        self.busy = busy

    def runs(self, node: str) -> str:
        if node not in self.agents:
            raise Unfit("it is not a node")
        return self.agents[node]

    def replace(self, node: str, act: Callable[[], str]) -> str:
        return "j7" if node == self.busy else act()


def bring(
    hosts: Hosts, *specs: HostSpec, busy: str = "", at_once: int = 1
) -> dict[str, tuple[str, str]]:
    looking = upgrade.Looking(Nodes(hosts, busy), "3.11", lambda node, words: None)
    task = upgrade.Task(looking, Software(NEW), WHEEL)
    found = upgrade.upgrade(task, specs, hosts, at_once)
    assert [one.host for one in found] == [spec.host for spec in specs]
    return {one.node: (one.state, one.why) for one in found}


def test_a_host_that_is_done_or_busy_gets_nothing_installed() -> None:
    hosts = Hosts(done=NEW, busy=OLD, old=OLD)
    specs = [HostSpec(host=name) for name in hosts.installed]
    states = bring(hosts, *specs, busy="busy")
    assert states == {"done": ("unchanged", ""), "busy": ("busy", "j7"), "old": ("upgraded", "")}
    changed = [what for what in hosts.ran if what[1] != "look"]
    assert changed == [("old", "install"), ("old", "replace"), ("old", "note")]


@pytest.mark.parametrize("at_once", [1, 2])
def test_nothing_is_begun_after_a_failure(at_once: int) -> None:
    hosts = Hosts(a=OLD, c=OLD, d=OLD)
    states = bring(hosts, *(HostSpec(host=name) for name in "abcd"), at_once=at_once)
    assert states["a"][0] == "upgraded", "it had begun"
    assert states["b"] == ("failed", "it does not answer")
    reached = {host for host, _ in hosts.ran}
    for name in "cd":
        assert (states[name][0] == "untouched") == (name not in reached)
    assert at_once > 1 or reached == {"a", "b"}


@pytest.mark.parametrize(
    ("spec", "has", "words"),
    [
        (HostSpec(host="a"), "0.8.0", "it has Shoal 0.8.0, and this head is 0.7.0; upgrade the"),
        (HostSpec(host="a", name="b"), OLD, "a has joined from /h there; set name:"),
        (HostSpec(host="a", python="/p"), OLD, "/p -m pip install 'shoal==0.7.0'"),
        (HostSpec(host="a"), "", "/h/venv has no Shoal there; name the node's interpreter"),
    ],
)
def test_a_host_that_cannot_follow_says_what_to_do(spec: HostSpec, has: str, words: str) -> None:
    hosts = Hosts(a=has)
    state, why = bring(hosts, spec)[spec.node]
    assert state == "failed" and words in why
    assert hosts.ran == [("a", "look")]
