"""The units of `shoal install-service` under a real systemd: crashes, restarts, a reboot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.systemd import Machine, missing
from harness.waiting import until

from shoal.client import Client, ShoalError

HEAD, NODE = "shoal-head.service", "shoal-node-gpu7.service"
# It says under which process id each attempt runs, and saves when it is told to end.
JOB = 'trap "echo saved >>$0.saved; exit 1" TERM; echo $$ >>$0.pids; while :; do sleep 0.1; done'


class Cluster:
    """A head with a node of its own, and a node that joined, in two homes of one machine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.folder = folder
        self.head, self.joined = folder / "the head's 100%h $HOME", folder / "joined"

    def run(self, job: str, model: str) -> None:
        where = ("--home", self.head, "-g", "1", "--gpu-model", model, "--no-pack")
        command = ("sh", "-c", JOB, self.folder / job)
        self.machine.shoal("run", *where, "--retries", "5", "--", *command)
        self.until_run(job, 1, f"{job} to start")

    def until_run(self, job: str, attempts: int, what: str) -> None:
        until(lambda: len(self.pids(job)) == attempts, what, self.story)

    def story(self) -> str:
        """Why jobs wait, what happened, and what the nodes have said."""
        logs = [path for home in (self.head, self.joined) for path in home.glob("nodes/*/*.log")]
        lines = [f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        with Client.at_home(self.head) as client:
            lines += [f"{job.id} {job.state}: {job.why}" for job in client.jobs()]
            lines += [str(record.event) for record in client.events(after=-60).events]
        return "\n".join(lines)

    def pids(self, job: str) -> list[str]:
        """One for each attempt."""
        path = self.folder / f"{job}.pids"
        return path.read_text().split() if path.exists() else []

    def saved(self, job: str) -> bool:
        return (self.folder / f"{job}.saved").exists()

    def alive(self, job: str) -> bool:
        """The first attempt is alive, and there was no other."""
        return [self.machine.call("kill", "-0", pid).returncode for pid in self.pids(job)] == [0]

    def controller(self) -> str:
        try:
            return str(json.loads((self.head / "controller.json").read_bytes())["pid"])
        except (OSError, ValueError):
            return ""

    def ready(self) -> set[str]:
        try:
            with Client.at_home(self.head) as client:
                return {node.id for node in client.nodes() if node.health == "ready"}
        except ShoalError:
            return set()

    def back(self, last: str) -> bool:
        """Another controller than the last one leads, and both nodes are with it."""
        return self.controller() not in ("", last) and self.ready() == {"n1", "gpu7"}

    def agents(self) -> list[int]:
        folders = (self.head / "nodes" / "n1", self.joined / "nodes" / "gpu7")
        return [json.loads((one / "agent.json").read_bytes())["pid"] for one in folders]


def test_head_and_node_survive_crashes_and_restarts_and_a_reboot(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with Machine(tmp_path) as machine:
        cluster = Cluster(machine, tmp_path)
        head, joined = cluster.head, cluster.joined
        shape = ("--nodes", "1", "--gpus", "1", "--gpu-model", "A100", "--port", "7700")
        up = json.loads(machine.shoal("up", "--home", head, *shape, "--json"))
        token = ("--token-file", head / "join-token", "--name", "gpu7")
        has = ("--gpus", "1", "--gpu-model", "H100")
        machine.shoal("join", up["join"], "--home", joined, *token, *has)
        cluster.run("local", "A100")
        cluster.run("remote", "H100")
        before = cluster.agents()

        # The units take over what runs.
        for home in (head, joined):
            said = json.loads(machine.shoal("install-service", "--home", home, "--json"))
            assert said["started"] and not said["next"]
        for unit in (HEAD, NODE):
            assert machine.show(unit, "ActiveState") == "active", unit
            assert machine.show(unit, "UnitFileState") == "enabled", unit
        machine.call("systemctl", "restart", HEAD)  # now its own supervisor is in the unit
        until(lambda: cluster.back(str(up["pid"])), "the head to restart")

        _crash_everything_but_the_agents(cluster)
        assert cluster.agents() == before and cluster.alive("local") and cluster.alive("remote")

        # In order: jobs may save, and are started again after the boot.
        machine.halt()
        assert cluster.saved("local") and cluster.saved("remote")
        machine.boot()
        for job, node in (("local", "n1"), ("remote", "gpu7")):
            cluster.until_run(job, 2, f"the job on {node} to run again")

        _stop_on_purpose(cluster)


def _crash_everything_but_the_agents(cluster: Cluster) -> None:
    machine = cluster.machine
    last = cluster.controller()
    machine.call("kill", "-9", last)
    until(lambda: cluster.back(last), "the next controller")
    mains = {unit: machine.show(unit, "MainPID") for unit in (HEAD, NODE)}
    machine.call("kill", "-9", *mains.values())
    until(
        lambda: all(
            machine.show(unit, "ActiveState") == "active"
            and machine.show(unit, "MainPID") not in ("0", main)
            for unit, main in mains.items()
        ),
        "systemd to start both units again",
    )
    last = cluster.controller()
    machine.call("systemctl", "stop", HEAD)
    assert machine.show(HEAD, "Result") == "success"
    assert not cluster.ready() and cluster.alive("local") and cluster.alive("remote")
    machine.call("systemctl", "start", HEAD)  # returns when the nodes are ready
    until(lambda: cluster.back(last), "the head to start")


def _stop_on_purpose(cluster: Cluster) -> None:
    """systemd does not undo `shoal leave` and `shoal down`, and they end everything."""
    machine = cluster.machine
    machine.shoal("leave", "--now", "--home", cluster.joined)
    until(lambda: machine.show(NODE, "ActiveState") == "inactive", "the node's unit to end")
    machine.shoal("down", "--home", cluster.head)
    until(lambda: machine.show(HEAD, "ActiveState") == "inactive", "the head's unit to end")
    for unit in (HEAD, NODE):
        assert machine.show(unit, "Result") == "success", unit
    for home in (cluster.head, cluster.joined):
        machine.shoal("install-service", "--remove", "--home", home)
    assert not list(machine.units.rglob("shoal-*"))
