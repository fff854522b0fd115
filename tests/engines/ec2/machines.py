"""Instances that run: each one in Moto is a shell with its user data, and a metadata service."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from harness.waiting import until
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from shoal.engines.ec2.render import Settings
from shoal.machine.kernel import kill_marked
from tests.engines.ec2.cloud import REGION, Cloud
from tests.engines.ec2.test_machine import metadata_service, program

SETTINGS = re.compile(r"^echo (\S+) \| base64 -d \| \S+ -m shoal", re.MULTILINE)
MARK = "EC2_INSTANCE"
LOOK_S = 0.1
ACCOUNT = "123456789012"  # Moto's


def settings_in(user_data: str) -> Settings:
    (text,) = SETTINGS.findall(user_data)
    return msgspec.json.decode(base64.b64decode(text), type=Settings)


class Machines:
    """`notices`: what the metadata service of an instance says, by its id."""

    def __init__(self, ec2: Cloud, scratch: Path) -> None:
        self._ec2 = ec2
        self._scratch = scratch
        self._stack = ExitStack()
        self._over = threading.Event()
        self.answers: dict[str, dict[str, str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for instance in list(self.running):
            self._power_off(instance)
        self._stack.close()

    def folder(self, instance: str) -> Path:
        return self._scratch / instance

    def interrupt(self, instance: str) -> None:
        """As EC2 does with a spot instance, two minutes after its notice or without one."""
        self._terminate(instance, "Server.SpotInstanceTermination")

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            living = {one["InstanceId"]: one for one in self._ec2.instances("pending", "running")}
            for instance, about in living.items():
                if instance not in self.answers:
                    self._boot(instance, about)
            for instance in [one for one in self.running if one not in living]:
                self._power_off(instance)
            for instance in [one for one in self.running if (self.folder(one) / "off").exists()]:
                self._terminate(instance, "Client.InstanceInitiatedShutdown")

    def _boot(self, instance: str, about: dict[str, Any]) -> None:
        folder = self.folder(instance)
        programs = folder / "bin"
        programs.mkdir(parents=True)
        program(programs, "shutdown", f'[ "$2" != now ] || touch {folder}/off')
        program(programs, "iptables", f'echo "$*" >>{folder}/rules')
        (folder / "user-data").write_text(self._ec2.user_data(instance))
        self.answers[instance] = {
            "ami-launch-index": str(about["AmiLaunchIndex"]),
            "instance-id": instance,
            "instance-type": about["InstanceType"],
            "placement/availability-zone": about["Placement"]["AvailabilityZone"],
            "instance-life-cycle": about.get("InstanceLifecycle", "on-demand"),
        }
        base = self._stack.enter_context(metadata_service(self.answers[instance]))
        path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.defpath))
        with (folder / "console").open("wb") as console:
            self.running[instance] = subprocess.Popen(
                ["/bin/sh", str(folder / "user-data"), "node"],  # there is no systemd here
                env={"PATH": path, "AWS_EC2_METADATA_SERVICE_ENDPOINT": base, MARK: instance},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                cwd="/",
            )

    def _power_off(self, instance: str) -> None:
        """Its processes are gone, and its disk with them."""
        told = settings_in((self.folder(instance) / "user-data").read_text())
        disk = Path(told.folder) / "nodes" / told.nodes[0]
        until(lambda: not kill_marked(MARK, lambda value: value == instance), "it does not end")
        until(
            lambda: not kill_marked("SHOAL_CHECKPOINT_DIR", lambda value: str(disk) in value),
            "its members do not end",
        )
        self.running.pop(instance).wait()
        shutil.rmtree(disk, ignore_errors=True)

    def _terminate(self, instance: str, code: str) -> None:
        self._ec2.client().terminate_instances(InstanceIds=[instance])
        one = ec2_backends[ACCOUNT][REGION].get_instance(instance)
        one.state_reason = StateReason(code, code)
