"""A small scheduler and kubelet: they place pods on machines by their resources, and run them as
processes. They work through the API server alone, as real ones do.

A container's folders are folders of ours: where a mount path stands in a command or a variable, its
folder's path is put instead. Whatever a pod has started is found by that path, and ends with it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from harness.kubernetes.kube import Kube
from harness.kubernetes.store import seconds, stamp

Object = dict[str, Any]
LOOK_S = 0.1
MESSAGE_BYTES_MAX = 2048


class Container:
    """The processes of one pod."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process
        self.told_at = 0.0  # when it got SIGTERM

    def sweep(self) -> None:
        """What a pod has started ends with it, even what has left its process group."""
        mark = str(self.folder)
        for _ in range(100):
            left = [one for one in psutil.process_iter() if _is_of(one, mark)]
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            if not left:
                return
            time.sleep(0.02)


def _is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(
            mark in value for value in process.environ().values()
        )
    except (psutil.Error, OSError):
        return False


class Kubelet:
    """For all machines that the test has added. `silent`: machines whose kubelet does not answer;
    what runs there runs on."""

    def __init__(self, kube: Kube, folder: Path) -> None:
        self._kube, self._folder = kube, folder
        self.silent: set[str] = set()
        self.containers: dict[str, Container] = {}  # by the pod's uid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[str] = []
        self._thread.start()

    def end(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        for one in self.containers.values():
            one.sweep()
            one.process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def folder_of(self, pod: str) -> Path:
        """Where a pod's home is on this machine."""
        uid = str(self._kube.pods()[pod]["metadata"]["uid"])
        return self._folder / uid[:8] / "home"

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self._look()
            except Exception:  # the API server may be down
                self.errors.append(traceback.format_exc())

    def _look(self) -> None:
        machines = {
            one["metadata"]["name"]: one
            for one in self._kube.admin("GET", "/api/v1/nodes")["items"]
        }
        pods = self._kube.pods()
        living = {pod["metadata"]["uid"] for pod in pods.values()}
        for uid in [uid for uid in self.containers if uid not in living]:
            gone = self.containers.pop(uid)
            gone.sweep()
            gone.process.wait(60)
        for name, pod in pods.items():
            machine = pod["spec"].get("nodeName")
            if machine is None:
                self._schedule(name, pod, pods, machines)
            elif machine not in self.silent:
                self._keep(name, pod)

    # -- the scheduler ---------------------------------------------------------------------

    def _schedule(
        self, name: str, pod: Object, pods: dict[str, Object], machines: dict[str, Object]
    ) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        lacks: dict[str, int] = {}
        for machine, found in machines.items():
            lack = self._lack(pod, machine, found, pods)
            if not lack:
                self._kube.bind(name, machine)
                pod["spec"]["nodeName"] = machine
                return
            lacks[lack] = lacks.get(lack, 0) + 1
        text = ", ".join(f"{count} {lack}" for lack, count in sorted(lacks.items()))
        message = f"0/{len(machines)} nodes are available: {text}."
        before = pod["status"].get("conditions") or [{}]
        if before[0].get("message") != message:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
                "lastTransitionTime": stamp(),
            }
            self._kube.set_status(name, {"conditions": [condition]})

    def _lack(self, pod: Object, machine: str, found: Object, pods: dict[str, Object]) -> str:
        """Why a pod cannot run there; empty if it can."""
        spec, labels = found.get("spec", {}), found["metadata"].get("labels", {})
        ready = [one["status"] for one in found["status"]["conditions"] if one["type"] == "Ready"]
        if spec.get("unschedulable") or ready != ["True"] or machine in self.silent:
            return "node(s) were unschedulable"
        tolerated = {one.get("key") for one in pod["spec"].get("tolerations", ())}
        if any(
            taint["effect"] != "PreferNoSchedule" and taint["key"] not in tolerated
            for taint in spec.get("taints") or ()
        ):
            return "node(s) had untolerated taint(s)"
        if any(
            labels.get(key) != value for key, value in pod["spec"].get("nodeSelector", {}).items()
        ):
            return "node(s) didn't match Pod's node affinity/selector"
        others = [one for one in pods.values() if one["spec"].get("nodeName") == machine]
        for what, wanted in asked(pod).items():
            used = sum(
                asked(one).get(what, 0)
                for one in others
                if one["status"]["phase"] not in ("Succeeded", "Failed")
            )
            if used + wanted > amount(found["status"]["allocatable"].get(what, "0")):
                return f"Insufficient {what}"
        return ""

    # -- the kubelet -----------------------------------------------------------------------

    def _keep(self, name: str, pod: Object) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        container = self.containers.get(uid)
        due = pod["metadata"].get("deletionTimestamp")
        if phase in ("Succeeded", "Failed"):
            return
        if container is None:
            if due:
                self._delete(name)
            elif phase == "Pending":
                self._start(name, pod)
            return
        code = container.process.poll()
        if code is not None:
            container.sweep()
            self._report_end(name, container, code)
            if due:
                self._delete(name)
            return
        limit = pod["spec"].get("activeDeadlineSeconds")
        over = limit is not None and time.time() > seconds(pod["status"]["startTime"]) + limit
        if (due or over) and not container.told_at:
            container.told_at = time.monotonic()
            container.process.send_signal(signal.SIGTERM)
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        if container.told_at and time.monotonic() > container.told_at + grace:
            container.process.kill()

    def _start(self, name: str, pod: Object) -> None:
        inside = pod["spec"]["containers"][0]
        if "missing" in inside["image"]:
            text = f'Back-off pulling image "{inside["image"]}"'
            self._wait(name, pod, "ImagePullBackOff", text)
            return
        folder = self._folder / pod["metadata"]["uid"][:8]  # sockets have short names
        mounts = self._volumes(pod, folder)
        if mounts is None:
            self._wait(name, pod, "ContainerCreating", "")
            return

        def here(text: str) -> str:
            for path, real in mounts.items():
                text = text.replace(path, str(real))
            return text.replace("$(POD_IP)", "127.0.0.1")

        env = {
            "POD_FOLDER": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            **{one["name"]: here(one["value"]) for one in inside.get("env", ()) if "value" in one},
        }
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [here(word) for word in inside["command"]],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.containers[pod["metadata"]["uid"]] = Container(folder, process)
        self._set(name, "Running", {"running": {"startedAt": stamp()}}, startTime=stamp())

    def _volumes(self, pod: Object, folder: Path) -> dict[str, Path] | None:
        """Mount paths and their folders; None: a secret is missing."""
        real: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for volume in pod["spec"].get("volumes", ()):
            place = folder / volume["name"]
            place.mkdir(parents=True, exist_ok=True)
            real[volume["name"]] = place
            if "emptyDir" in volume:  # a real one leaves it open to all
                group = pod["spec"].get("securityContext", {}).get("fsGroup", -1)
                os.chown(place, -1, group)
                place.chmod(0o2777)
            if "secret" in volume:
                path = self._kube.path("secrets", volume["secret"]["secretName"])
                found = self._kube.admin("GET", path, check=False)
                if found.get("kind") != "Secret":
                    return None
                for key, value in found["data"].items():
                    (place / key).write_bytes(base64.b64decode(value))
                    (place / key).chmod(volume["secret"].get("defaultMode", 0o644))
        mounts = pod["spec"]["containers"][0].get("volumeMounts", ())
        return {one["mountPath"]: real[one["name"]] for one in mounts}

    def _wait(self, name: str, pod: Object, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        known = pod["status"].get("containerStatuses") or [{}]
        if known[0].get("state") != state:
            self._set(name, "Pending", state)

    def _report_end(self, name: str, container: Container, code: int) -> None:
        code = 128 - code if code < 0 else code
        ended: Object = {"exitCode": code, "finishedAt": stamp(), "reason": "Completed"}
        if code:
            text = (container.folder / "log").read_bytes()[-MESSAGE_BYTES_MAX:]
            ended |= {"reason": "Error", "message": text.decode(errors="replace")}
        self._set(name, "Failed" if code else "Succeeded", {"terminated": ended})

    def _set(self, name: str, phase: str, state: Object, **more: str) -> None:
        status = {
            "name": "node",
            "state": state,
            "image": "",
            "imageID": "",
            "ready": phase == "Running",
            "restartCount": 0,
        }
        self._kube.set_status(name, {"phase": phase, "containerStatuses": [status], **more})

    def _delete(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        self._kube.admin("DELETE", self._kube.path("pods", name), body, check=False)


def asked(pod: Object) -> dict[str, int]:
    """In thousandths of a CPU, bytes, and devices."""
    resources = pod["spec"]["containers"][0].get("resources", {})
    return {name: amount(text) for name, text in (resources.get("requests") or {}).items()}


def amount(text: str) -> int:
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor * 1000
    return int(text[:-1]) if text.endswith("m") else int(text) * 1000
