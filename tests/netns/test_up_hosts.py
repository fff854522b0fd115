"""`shoal up --hosts` with real sshds: servers become nodes, and only what differs is done."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from harness.hosts import Host, Net

import shoal
from tests.netns.sshd import SSHD, make_key, serve_ssh

SHOAL = (sys.executable, "-m", "shoal.main")
SOURCE = Path(shoal.__file__).parent.parent
WAIT_S = 300.0


class Site:
    """A head with a file of hosts, and two servers that its key opens."""

    def __init__(self, net: Net) -> None:
        self.head, self.bare, self.equipped = (
            net.add(name) for name in ("head", "bare", "equipped")
        )
        key = make_key(self.head)
        # The bare one has only the libraries: Shoal itself must come to it.
        libraries = sysconfig.get_path("purelib")
        serve_ssh(self.bare, key, self.head, f"SetEnv PYTHONPATH={libraries}")
        settings = self.bare.home / ".config" / "pip" / "pip.conf"
        settings.parent.mkdir(parents=True)
        settings.write_text("[install]\nno-deps = true\nno-index = true\n")
        serve_ssh(self.equipped, key, self.head, f"SetEnv PYTHONPATH={SOURCE}")
        self.file = self.head.home / "hosts.yaml"

    def up(self, text: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        """The exit code, the hosts by the node's name, and what was said on the way."""
        self.file.write_text(text)
        words = ("up", "--hosts", str(self.file), "--nodes", "0", "--port", "0", "--json")
        done = self.head.run(*SHOAL, *words, timeout_s=WAIT_S)
        told = json.loads(done.stdout) if done.stdout else {"hosts": []}
        return done.returncode, {one["node"]: one for one in told["hosts"]}, done.stderr

    def nodes(self) -> dict[str, dict[str, Any]]:
        done = self.head.run(*SHOAL, "nodes", "--json")
        assert done.returncode == 0, done.stderr
        return {one["id"]: one for one in json.loads(done.stdout) if one["intent"] != "removed"}


@pytest.fixture(scope="module")
def site(net: Net) -> Site:
    if not SSHD or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed: apt install openssh-server")
    return Site(net)


def whys(hosts: dict[str, dict[str, Any]]) -> str:
    return "\n".join(f"{name}: {one['state']}: {one['why']}" for name, one in hosts.items())


def entry(host: Host, **fields: object) -> str:
    more = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    return f"- host: {host.address}\n  name: {host.name}\n{more}"


@pytest.mark.outside("ssh and pip on three hosts")
def test_bare_servers_become_nodes_and_only_what_differs_is_done_again(site: Site) -> None:
    bare = entry(site.bare, place="b1/r1", gpus=2, labels="{pool: a100}")
    equipped = entry(site.equipped, python=sys.executable, gpus=4)
    nobody = "- 10.77.0.99\n"

    code, hosts, said = site.up(bare + equipped + nobody)
    assert code == 1, "one of them cannot be reached"
    assert (hosts["bare"]["state"], hosts["bare"]["did"]) == ("joined", ["install", "join"]), whys(
        hosts
    )
    assert (hosts["equipped"]["state"], hosts["equipped"]["did"]) == ("joined", ["join"])
    assert hosts["10.77.0.99"]["state"] == "failed"
    assert "does not answer" in hosts["10.77.0.99"]["why"]
    nodes = site.nodes()
    assert nodes.keys() == {"bare", "equipped"}
    assert (nodes["bare"]["gpus"], nodes["bare"]["place"]) == (2, "b1/r1")
    assert nodes["bare"]["address"] == site.bare.address
    spec = site.bare.home / ".shoal" / "nodes" / "bare" / "spec.json"
    assert json.loads(spec.read_text())["labels"] == {"pool": "a100"}
    wrote = site.head.run(
        *SHOAL, "run", "--wait", "-n", "2", "-g", "2", "--", "sh", "-c", "hostname; exit 0"
    )
    assert wrote.returncode == 0, wrote.stderr

    code, hosts, said = site.up(bare + equipped)
    assert (code, {one["state"] for one in hosts.values()}) == (0, {"unchanged"}), whys(hosts)

    moved = entry(site.bare, place="b2/r1", gpus=2)
    code, hosts, said = site.up(moved)
    assert code == 0, whys(hosts)
    assert (hosts["bare"]["state"], hosts["bare"]["did"]) == ("joined", ["leave", "join"])
    assert (hosts["equipped"]["state"], hosts["equipped"]["did"]) == ("left", ["leave"])
    nodes = site.nodes()
    assert nodes.keys() == {"bare"} and nodes["bare"]["place"] == "b2/r1"

    assert "token" not in said
    token = (site.head.home / ".shoal" / "join-token").read_text().strip()
    assert token not in said


def test_what_is_wrong_is_told_for_each_host(site: Site) -> None:
    wrong = entry(site.equipped, python="/no/such/python")
    stranger = f"- host: {site.bare.address}\n  name: stranger\n  user: nobody\n"
    code, hosts, _ = site.up(wrong + stranger)
    assert code == 1
    assert hosts["equipped"]["why"] == "python: /no/such/python is not a working interpreter there"
    assert "authorized_keys" in hosts["stranger"]["why"]


def test_a_file_that_makes_no_sense_starts_nothing(site: Site) -> None:
    code, hosts, said = site.up("- host: a\n  gpus: many\n")
    assert (code, hosts) == (1, {})
    assert said == (
        f"error: {site.file}, line 2: gpus: must be a whole number from 0 to 256, not 'many'\n"
    )
