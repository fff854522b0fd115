"""`shoal upgrade --hosts` with real sshds: idle hosts follow the head, and jobs go on."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.hosts import Host, Net
from harness.waiting import WAIT_S

import shoal
from shoal.hosts import bring
from tests.netns.cluster import SHOAL, Cluster
from tests.netns.sshd import SSHD, make_key, serve_ssh

OLD = "0.4.9"


class Site:
    """A head of this version, and two servers that joined with an older one."""

    def __init__(self, net: Net) -> None:
        self.cluster = Cluster(net, ())
        self.head = self.cluster.head
        self.idle, self.busy = net.add("idle"), net.add("busy")
        self.file = self.head.home / "hosts.yaml"
        libraries, key = _libraries(net.scratch / "libraries"), make_key(self.head)
        joining = []
        for host in (self.idle, self.busy):
            serve_ssh(host, key, self.head, f"SetEnv PYTHONPATH={libraries}")
            settings = host.home / ".config" / "pip" / "pip.conf"
            settings.parent.mkdir(parents=True)
            settings.write_text("[install]\nno-deps = true\nno-index = true\nno-compile = true\n")
            words = ("join", self.cluster.url, "--name", host.name, "--gpus", "1")
            python = _old_environment(host, words)
            env = {"SHOAL_JOIN_TOKEN": self.cluster.token, "PYTHONPATH": str(libraries)}
            joining.append(host.start(str(python), "-m", "shoal.main", *words, env=env))
        for process in joining:
            assert process.wait(WAIT_S) == 0
        names = {"n1", "idle", "busy"}
        self.cluster.until(lambda: self.cluster.ready() == names, "not all of them joined")

    def upgrade(self, *hosts: Host | str, flags: tuple[str, ...] = ()) -> Any:
        """The exit code, the hosts by their nodes' names, and what was said on stderr."""
        entries = [
            f"- {one}\n" if isinstance(one, str) else f"- host: {one.address}\n  name: {one.name}\n"
            for one in hosts
        ]
        self.file.write_text("".join(entries))
        words = ("upgrade", "--hosts", str(self.file), "--json", *flags)
        done = self.head.run(*SHOAL, *words, timeout_s=WAIT_S)
        told = json.loads(done.stdout) if done.stdout else []
        return done.returncode, {one["node"]: one for one in told}, done.stderr

    def versions(self) -> dict[str, str]:
        return {node.id: node.version for node in self.cluster.nodes() if node.id != "n1"}


@pytest.fixture
def site(net: Net) -> Iterator[Site]:
    if not SSHD or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed: apt install openssh-server")
    made = Site(net)
    yield made
    made.cluster.close()


def _libraries(folder: Path) -> Path:
    """What Shoal needs, without Shoal: pip may not take this checkout for an installation."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "shoal" not in path.name:
            (folder / path.name).symlink_to(path)
    return folder


def _old_environment(host: Host, join: tuple[str, ...]) -> Path:
    """As `shoal up --hosts` of that version would have left it; returns its interpreter."""
    home = host.home / ".shoal"
    venv = home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(io.BytesIO(bring.build_wheel(OLD).data)) as archive:
        archive.extractall(site)
    top = site / "shoal" / "__init__.py"
    text = top.read_text()
    assert f'"{shoal.__version__}"' in text
    top.write_text(text.replace(f'"{shoal.__version__}"', f'"{OLD}"'))
    receipt = {"software": {"shoal": OLD, "digest": "old"}, "join": join}
    (home / "host.json").write_text(json.dumps(receipt))
    return venv / "bin" / "python"


@pytest.mark.soak  # tests/live/test_upgrade.py has nodes that follow when they are idle
@pytest.mark.outside("ssh and pip on three hosts")
def test_idle_hosts_get_the_new_version_and_a_failure_stops_the_rest(site: Site) -> None:
    cluster, new = site.cluster, shoal.__version__
    job = cluster.submit(
        'until [ -e "$SHARED/go" ]; do sleep 0.1; done', where=["node=busy"], gpus=1
    )
    cluster.wait(job, "running")
    code, hosts, said = site.upgrade(site.idle, site.busy, flags=("--check",))
    assert code == 0, said
    found = {name: (one["installed"], one["runs"]) for name, one in hosts.items()}
    assert found == {"idle": (OLD, OLD), "busy": (OLD, OLD)}

    code, hosts, said = site.upgrade(site.busy, site.idle)
    assert code == 0, said
    assert hosts["busy"]["state"] == "busy", hosts
    assert f"its jobs keep running with the old agent ({job}); run `" in hosts["busy"]["why"]
    assert hosts["idle"]["state"] == "upgraded", hosts
    assert site.versions() == {"idle": new, "busy": OLD}
    receipt = json.loads((site.idle.home / ".shoal" / "host.json").read_text())
    assert receipt["software"] == {"shoal": new, "digest": bring.build_wheel(new).digest}
    assert receipt["join"][:2] == ["join", cluster.url], "it joined as before"
    assert (cluster.job(job).state, cluster.job(job).attempt) == ("running", 1)
    (cluster.shared / "go").touch()
    assert (cluster.wait(job).state, cluster.job(job).attempt) == ("succeeded", 1)

    # Nothing listens for ssh on the head.
    code, hosts, said = site.upgrade(site.idle, site.head.address, site.busy)
    assert code == 1
    states = {name: one["state"] for name, one in hosts.items()}
    assert states == {"idle": "unchanged", site.head.address: "failed", "busy": "untouched"}
    assert said == (
        f"error: {site.head.address}: it answers, but not to ssh; is sshd running on that port? "
        "busy was not touched; when that is fixed, run again: "
        f"shoal upgrade --hosts {site.file}\n"
    )
    assert site.versions()["busy"] == OLD

    code, hosts, said = site.upgrade(site.idle, site.busy, flags=("--parallel", "2"))
    states = {name: one["state"] for name, one in hosts.items()}
    assert (code, states) == (0, {"idle": "unchanged", "busy": "upgraded"}), said
    assert site.versions() == {"idle": new, "busy": new}
    assert {node.intent for node in cluster.nodes()} == {"open"}
