"""What deploy/ has for clouds: templates that parse, units that systemd accepts, notices.

No cloud is used here. `docs/clouds.md` says what was tried besides this.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.waiting import WAIT_S

DEPLOY = Path(__file__).parents[2] / "deploy"
CLOUD_INIT = DEPLOY / "cloud-init"
TOKEN = "shoal_ab12cd34_secret.abcdef"


def render(*args: str, token: str = TOKEN, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "token").write_text(token + "\n")
    command = [sys.executable, str(CLOUD_INIT / "render.py"), args[0], str(folder / "token")]
    return subprocess.run([*command, *args[1:]], capture_output=True, text=True, check=False)


def files_of(user_data: str) -> dict[str, dict[str, Any]]:
    return {one["path"]: one for one in yaml.safe_load(user_data)["write_files"]}


def test_user_data_holds_the_join_command_the_token_and_the_notices(tmp_path: Path) -> None:
    made = render("https://head.example:7700", "pool=a100", "zone=b", folder=tmp_path)
    assert made.returncode == 0 and made.stdout.startswith("#cloud-config\n"), made.stderr
    files = files_of(made.stdout)
    assert files["/etc/shoal/join-token"]["content"] == TOKEN
    assert files["/etc/shoal/join-token"]["permissions"] == "0600"
    unit = files["/etc/systemd/system/shoal-node.service"]["content"]
    assert "shoal join https://head.example:7700 --foreground" in unit
    assert "--label pool=a100 --label zone=b\n" in unit and "@" not in unit
    script = base64.b64decode(files["/opt/shoal-notices"]["content"])
    assert script == (CLOUD_INIT / "notices.py").read_bytes()


@pytest.mark.parametrize(
    ("args", "token", "line"),
    [
        (("head:7700; rm -rf /",), TOKEN, "is not the address of a head"),
        (("https://head",), "two words", "holds no join token"),
        (("https://head",), "", "holds no join token"),
        (("https://head", "pool=a\nExecStartPre=bad"), TOKEN, "is not a label"),
    ],
)
def test_user_data_never_holds_what_could_be_a_command(
    args: tuple[str, ...], token: str, line: str, tmp_path: Path
) -> None:
    made = render(*args, token=token, folder=tmp_path)
    assert made.returncode and line in made.stderr and not made.stdout
    assert "Traceback" not in made.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    files = files_of(render("https://head:7700", folder=tmp_path).stdout)
    units = []
    for path, one in files.items():
        if path.endswith(".service"):
            unit = tmp_path / Path(path).name
            # What they start is not installed here.
            text = one["content"].replace("/opt/shoal/bin/shoal", sys.executable)
            unit.write_text(text.replace("/opt/shoal-notices", sys.executable))
            units.append(str(unit))
    assert len(units) == 2
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert done.returncode == 0 and not ours, done.stderr


# -- notices -----------------------------------------------------------------------------------


class Metadata:
    """A cloud's metadata service, as far as notices go."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers  # by "METHOD path"; anything else is a 404
        self.headers: dict[str, str] = {}

    @contextmanager
    def serve(self) -> Iterator[str]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                outer.headers.update(self.headers.items())
                found = outer.answers.get(f"{self.command} {self.path}")
                self.send_response(200 if found is not None else 404)
                self.end_headers()
                self.wfile.write((found or "").encode())

            do_GET = do_PUT = _answer  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


AWS = {"PUT /latest/api/token": "t0ken"}
GOOGLE = {
    "GET /computeMetadata/v1/instance/id": "1",
    "GET /computeMetadata/v1/instance/preempted": "FALSE",
}
AZURE = {
    "GET /metadata/instance?api-version=2021-02-01": "{}",
    "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text": "vm7",
    "GET /metadata/scheduledevents?api-version=2020-07-01": '{"Events": []}',
}


def azure_event(moment: str, resource: str = "vm7") -> str:
    event = {"EventType": "Preempt", "NotBefore": moment, "Resources": [resource]}
    return json.dumps({"Events": [event]})


def soon(form: str) -> str:
    return time.strftime(form, time.gmtime(time.time() + 3600))


NOTICES = {
    "aws": (
        AWS,
        "GET /latest/meta-data/spot/instance-action",
        json.dumps({"action": "terminate", "time": soon("%Y-%m-%dT%H:%M:%SZ")}),
        "AWS spot notice: terminate",
    ),
    "google": (
        GOOGLE,
        "GET /computeMetadata/v1/instance/preempted",
        "TRUE",
        "Google spot notice",
    ),
    "azure": (
        AZURE,
        "GET /metadata/scheduledevents?api-version=2020-07-01",
        azure_event(soon("%a, %d %b %Y %H:%M:%S GMT")),
        "Azure notice: Preempt",
    ),
}


@contextmanager
def watching(url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The script, with a `shoal` that notes how it is called, and fails the first time."""
    shoal = folder / "shoal"
    shoal.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/said\n[ -e {folder}/once ] && exit 0\n'
        f"touch {folder}/once\nexit 1\n"
    )
    shoal.chmod(0o755)
    environment = {"METADATA": url, "SHOAL": str(shoal), "LOOK_S": "0.05", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, str(CLOUD_INIT / "notices.py")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("cloud", list(NOTICES))
def test_a_notice_is_passed_on_until_it_is_taken(cloud: str, tmp_path: Path) -> None:
    quiet, path, answer, why = NOTICES[cloud]
    service = Metadata(dict(quiet))
    with service.serve() as url, watching(url, tmp_path) as process:
        time.sleep(0.3)  # it looks a few times, and there is nothing to say
        assert process.poll() is None and not (tmp_path / "said").exists()
        service.answers[path] = answer
        assert process.wait(WAIT_S) == 0
        said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 2, said  # the first try failed
    for line in said:
        words = line.split()
        assert words[:2] == ["ends", "--in"] and line.endswith(f"--why {why}")
        left_s = int(words[2].removesuffix("s"))
        assert left_s == 30 if cloud == "google" else 0 < left_s <= 3600


def test_a_notice_for_another_machine_is_not_ours() -> None:
    spec = importlib.util.spec_from_file_location("notices", CLOUD_INIT / "notices.py")
    assert spec is not None and spec.loader is not None
    notices: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notices)
    path = "GET /metadata/scheduledevents?api-version=2020-07-01"
    other = Metadata({**AZURE, path: azure_event("", "vm8")})
    own = Metadata({**AZURE, path: azure_event("", "vm7")})
    for service, expected in ((other, None), (own, (0, "Azure notice: Preempt"))):
        with service.serve() as notices.BASE:
            assert notices.azure() == expected


def test_a_machine_of_no_cloud_is_left_alone(tmp_path: Path) -> None:
    with Metadata({}).serve() as url, watching(url, tmp_path) as process:
        assert process.wait(WAIT_S) == 0
        assert process.stdout is not None and "no cloud" in process.stdout.read()


# -- Slurm in clouds ---------------------------------------------------------------------------


def test_the_parallelcluster_template_starts_with_no_gpu_node() -> None:
    """Its schema was checked with AWS's own; this holds what Shoal relies on."""
    scheduling = yaml.safe_load((DEPLOY / "aws" / "parallelcluster.yaml").read_text())["Scheduling"]
    assert scheduling["Scheduler"] == "slurm"
    resources = [one for queue in scheduling["SlurmQueues"] for one in queue["ComputeResources"]]
    assert resources and all(one["MinCount"] == 0 for one in resources)


def test_each_module_of_the_google_blueprint_uses_modules_before_it() -> None:
    (group,) = yaml.safe_load((DEPLOY / "google" / "slurm.yaml").read_text())["deployment_groups"]
    known: set[str] = set()
    for module in group["modules"]:
        assert set(module.get("use", ())) <= known, module["id"]
        known.add(module["id"])
