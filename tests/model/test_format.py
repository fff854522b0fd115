"""Everything that is stored or sent can be read by this version, and nothing is added unnoticed.

`tests/golden/homes/VERSION/structs.json` describes what the release before stored and sent. If a
test here fails, its message says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.database.formats import FORMAT, newer_text, packed_version, version_of
from tests.golden.describe import describe

HOMES = Path(__file__).parents[1] / "golden/homes"


def _number(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.name.split("."))


NEWEST = max(HOMES.glob("*/structs.json"), key=_number)
RELEASE: dict[str, Any] = json.loads(NEWEST.read_bytes())
NOW = describe()
ROOMS = ("stored", "files", "wire")
# What a release sent or stored and this version does not need any more, as "Struct.field" with the
# reason. It is left out when it is read.
GONE: dict[str, str] = {}
# What this version sends to agents that those of the release before cannot read, and how the head
# avoids it.
GATED: dict[str, str] = {
    "Sleep": "only nodes whose reports say how their members sleep are asked to",
    "Wake": "only members that sleep are woken, and those of older agents never do",
    "NodeSpec.sleep": "the head is upgraded first (docs/upgrading.md); 0.6.0 skips what it lacks",
    "NodeSpec.sleep_why": "as NodeSpec.sleep",
    "NodeSpec.remaps": "as NodeSpec.sleep",
    "NodeSpec.tree": "as NodeSpec.sleep; left out where a node has no GPUs",
    "Tree": "in NodeSpec.tree only",
    "TreeGpu": "in NodeSpec.tree only",
    "Card": "in NodeSpec.tree only",
    "Numa": "in NodeSpec.tree only",
    "NodeSpec.rdma": "as NodeSpec.sleep",
    "Fault=wake": "only members that slept can have it, and an older head puts none to sleep",
    "Fault=port": "an agent reports it only to a head that sends Limits.ports, which can read it",
    "Fault=taken": "as Fault=port",
    "Fault=hangs": "as Fault=port",
    "Fault=lease": "only members with leases can have it, and an older head gives none",
    "Lease": "in Launch.lease and Renew, only for nodes whose reports have a list of leases",
    "Renew": "as Lease",
    "Leased": "as Refusal",
    "HoldCopy": "in fields of FileAnswer and FileSent, which an older agent skips",
    "CopyHeld": "only a node that was asked to hold copies sends it; the head is upgraded first",
    "Refusal": "it is in an agent's report, and an older head skips that field",
    "Slept": "as Refusal",
    "Spent": "as Refusal",
    "Touched": "as Refusal",
    "Uses": "as Refusal",
    "Woke": "as Refusal",
    "Tour": "it is a field of Check that an older agent skips: it measures the node itself instead",
    "Host": "as Tour",
    "Storage": "as Tour",
    "Pair": "as Refusal",
    "Collective": "as Refusal",
    "Weak": "as Refusal",
    "EnergyReading": "as Refusal",
    "Began": "as Refusal",
    "Held": "as Refusal",
    "Hung": "as Refusal",
    "Opens": "the head is upgraded first; an older one skips it, and nodes read origins themselves",
    "Seeks": "as Opens",
    "Joins": "sent for a Launch with encrypt_network only, which an older head does not send",
    "TunnelEnd": "in Joins only",
    "Joined": "an answer to Joins only",
    "Tunnel": "in Joined only",
    "Far": "in Joined only",
    "Door": "in Opens only",
    "Seek": "in Seeks only",
    "Finds": "an answer to Seeks only",
    "Sought": "in Finds only",
    "Peer": "in Finds only",
}


def _kinds(text: str) -> set[str]:
    """The alternatives; those of `tuple[A | B]` may become more as well."""
    return set(text.removeprefix("tuple[").removesuffix("]").split(" | "))


def _unreadable(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What the release has written and this version cannot read."""
    found = []
    for name, was in old.items():
        if name not in new:
            if name not in GONE:
                found.append(f"{name} was removed")
            continue
        now = new[name]
        if was.get("tag") != now.get("tag"):
            found.append(f"{name} has another tag")
        if not set(was.get("values", ())) <= set(now.get("values", ())):
            found.append(f"{name} lost a value")
        if was.get("items", [])[:] != now.get("items", [])[: len(was.get("items", []))]:
            found.append(f"{name} has other items")
        fields = now.get("fields", {})
        for field, one in was.get("fields", {}).items():
            if field not in fields:
                if f"{name}.{field}" not in GONE:
                    found.append(f"{name}.{field} was removed")
            elif not _kinds(one["type"]) <= _kinds(fields[field]["type"]):
                found.append(f"{name}.{field} was {one['type']}, and is {fields[field]['type']}")
        for field, one in fields.items():
            if one.get("required") and not was.get("fields", {}).get(field, {}).get("required"):
                found.append(f"{name}.{field} has no default")
    return found


def _added(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What the release would misread or drop."""
    found = [name for name in new if name not in old]
    for name, was in old.items():
        now = new.get(name, {})
        found += [f"{name}.{one}" for one in now.get("fields", {}) if one not in was["fields"]]
        found += [f"{name}={one}" for one in now.get("values", ()) if one not in was["values"]]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_what_the_release_before_wrote_can_be_read(room: str) -> None:
    problems = _unreadable(RELEASE[room], NOW[room])
    assert not problems, (
        f"homes or agents of {RELEASE['version']} could not be read any more: {problems}. Give new "
        "fields a default, and keep reading old ones; or name them in GONE, with the reason"
    )


def test_the_format_is_raised_when_something_is_stored_that_the_release_before_would_drop() -> None:
    added = _added(RELEASE["stored"], NOW["stored"])
    assert not added or RELEASE["format"] < FORMAT, (
        f"{RELEASE['version']} would drop or misread {added}: raise FORMAT in formats.py to "
        f"{RELEASE['format'] + 1}, so that it refuses instead"
    )


def test_agents_and_heads_of_the_release_before_can_read_what_this_version_sends() -> None:
    old, new = RELEASE["wire"], NOW["wire"]
    added = [
        one
        for one in _added(old, new)
        # A field that the release does not know is skipped, unless its struct is strict.
        if "." not in one or old[one.partition(".")[0]].get("strict")
    ]
    lost = [
        f"{name}.{field}"
        for name, was in old.items()
        for field, one in was.get("fields", {}).items()
        if one.get("required") and field not in new.get(name, {}).get("fields", {})
    ]
    unknown = [one for one in added + lost if one not in GATED]
    assert not unknown, (
        f"{RELEASE['version']} cannot read {unknown}: send it only to agents whose report shows a "
        "version that can, and name it in GATED; or raise wire.PROTOCOL, and say in "
        "docs/upgrading.md that head and nodes must change together"
    )


def test_a_description_shows_what_changed() -> None:
    """The comparisons above can fail."""
    old = {"A": {"fields": {"x": {"type": "int", "required": True}, "y": {"type": "str"}}}}
    new = {"A": {"fields": {"x": {"type": "int | str"}, "z": {"type": "int", "required": True}}}}
    assert _unreadable(old, new) == ["A.y was removed", "A.z has no default"]
    assert _unreadable(new, old) == [
        "A.x was int | str, and is int",
        "A.z was removed",
        "A.x has no default",
    ]
    assert _added(old, new) == ["A.z"]
    assert _added(old, {**old, "B": {}}) == ["B"]


def test_a_version_survives_being_a_number() -> None:
    for version in ("0.6.0", "1.12.103"):
        assert version_of(packed_version(version)) == version
    assert packed_version("0.6.0rc1+local") > packed_version("0.5.9")
    assert version_of(0) == ""
    assert "install 9.8.7 or newer" in newer_text("shoal.db", "9.8.7", 99)
