"""What runs on each instance of an order, as root: it joins the cluster, keeps tenants away from
the metadata service, and watches for spot notices. The user data starts it with
`python -m shoal.engines.ec2.machine ENDS`, with its settings on standard input.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from types import FrameType

import msgspec

from shoal.engines.ec2.render import Settings
from shoal.link.wire import CHECKPOINT_ROOT
from shoal.machine.ends import write_end
from shoal.model.node import LABEL_VALUE_PATTERN

BASE = "http://169.254.169.254"
BASE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as AWS' own tools have it
TOKEN_S = 300  # how long a session with the metadata service lasts
ANSWER_S = 5.0
LOOK_S = 5.0  # between two looks for a notice, as AWS recommends
NOTICE = "spot/instance-action"
# A label of the node, and where the metadata service has it.
LABELS = {
    "ec2.instance": "instance-id",
    "ec2.type": "instance-type",
    "ec2.zone": "placement/availability-zone",
    "ec2.market": "instance-life-cycle",
}


def main(argv: list[str]) -> int:
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    metadata = Metadata(os.environ.get(BASE_VARIABLE, BASE))
    try:
        index = int(metadata.ask("ami-launch-index"))
        about = {label: metadata.ask(path) for label, path in LABELS.items()}
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"the metadata service does not answer: {error}", flush=True)
        return 1
    if not keep_tenants_away():
        print("tenants reach the metadata service: install iptables or nftables", flush=True)
        if told.has_role or len(told.nodes) > 1:  # they would act as its role, or join as another
            return 1
    name = told.nodes[index]
    env = os.environ | {"SHOAL_JOIN_TOKEN": told.token}
    if told.checkpoints:
        env[CHECKPOINT_ROOT] = told.checkpoints
    argv = join_argv(told, name, about, int(argv[0]))
    agent = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)

    def pass_on(number: int, _: FrameType | None) -> None:
        agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    folder = Path(told.folder) / "nodes" / name
    threading.Thread(target=_follow, args=(metadata, folder), daemon=True).start()
    return agent.wait()


def join_argv(told: Settings, name: str, about: dict[str, str], ends_s: int) -> list[str]:
    """CPUs and memory are those of the machine; what it has of GPUs is compared. Pure."""
    argv = [sys.executable, "-m", "shoal.main", "join", told.url, "--foreground"]
    argv += ["--home", told.folder, "--name", name, "--origin", told.supply, "--order", told.order]
    argv += ["--gpus", str(told.gpus)]
    if told.gpu_model:
        argv += ["--gpu-model", told.gpu_model]
    if told.gpu_memory_mb:
        argv += ["--gpu-memory", f"{told.gpu_memory_mb}M"]
    if zone := about.get("ec2.zone"):
        argv += ["--place", zone]
    for label, value in {**about, **told.labels}.items():
        if re.match(LABEL_VALUE_PATTERN, value):
            argv += ["--label", f"{label}={value}"]
    for taint in told.taints:
        argv += ["--taint", taint]
    if ends_s:
        argv += ["--ends-at", str(ends_s)]
    return argv


class Metadata:
    """The instance metadata service, version 2."""

    def __init__(self, base: str) -> None:
        self._base = base
        # A proxy in the environment must not be asked.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str) -> str:
        """Empty: there is nothing of this name."""
        life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        session = self._send("PUT", "/latest/api/token", life)
        own = {"X-aws-ec2-metadata-token": session}
        try:
            return self._send("GET", f"/latest/meta-data/{path}", own)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def _send(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._base + path, headers=headers, method=method)
        with self._opener.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(65_536).decode())


def keep_tenants_away() -> bool:
    """Only root may ask the metadata service: it has the user data, and the keys of the instance's
    role. Jobs of tenants run as other users."""
    rule = ["-d", "169.254.169.254", "-m", "owner", "!", "--uid-owner", "0", "-j", "REJECT"]
    table = (
        "table inet shoal { chain output { type filter hook output priority 0; "
        "ip daddr 169.254.169.254 meta skuid != 0 reject; } }"
    )
    for argv, text in (
        (["iptables", "-w", "-I", "OUTPUT", *rule], ""),
        (["nft", "-f", "-"], table),
    ):
        with contextlib.suppress(OSError):
            if subprocess.run(argv, input=text, text=True, check=False).returncode == 0:
                return True
    return False


def notice(text: str) -> tuple[float, str]:
    """When this instance ends, and what people are told. Pure."""
    said = json.loads(text)
    at_s = datetime.fromisoformat(said["time"]).timestamp()
    return at_s, f"EC2 spot notice: {said['action']}"


def _follow(metadata: Metadata, folder: Path) -> None:
    """Writes a spot notice to where the agent reads it, until the instance ends."""
    known = ""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            text = metadata.ask(NOTICE)
            if text not in ("", known) and folder.is_dir():
                write_end(folder, *notice(text))
                known = text
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
