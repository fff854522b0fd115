"""The checklist "Add a field to a job" of docs/extending.md, done once in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# File, the line before, and what is added there.
PLACES = (
    (
        "model/job.py",
        "    interactive: bool = False  # each member has a terminal, to which users attach\n",
        "    shm_mb: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0\n",
    ),
    (
        "forms/fields.py",
        '    "Its environment": [\n',
        '        Field("shm", "SIZE", "", memory(1_000_000, "512M or 4G"), "shm_mb",\n'
        '              "Shared memory of its container, e.g. 4G."),\n',
    ),
    (
        "agent/images/render.py",
        '        "--no-healthcheck",\n',
        '        *([f"--shm-size={launch.shm_mb}m"] if launch.shm_mb else []),\n',
    ),
)
# From the flag to the command line of the container, in the package with the new field.
WAY = """
import msgspec
from shoal.agent.images.render import Box, render
from shoal.agent.images.runtimes import Facts, Gpus, Runtime
from shoal.cli.verbs.run import run
from shoal.forms.job import to_spec
from shoal.link.wire import Commands, ToAgent, encode
from shoal.model.commands import Envelope, Launch
from shoal.model.report import Submit
from tests.core.build import Cluster

assert "--shm" in [word for option in run.params for word in option.opts]
cluster = Cluster()
cluster.join("a", containers="podman")
spec = to_spec({"command": "train", "image": "torch", "workdir": "/work", "shm": "4G"})
cluster.ask(Submit(spec))
(launch,) = [one for one in cluster.last.commands if isinstance(one, Launch)]
sent = encode(Commands(Envelope(1, 1, (launch,))))
(received,) = msgspec.msgpack.decode(sent, type=ToAgent).envelope.commands
assert received == launch
some = (1, 1)
facts = Facts(0, 0, Gpus.NONE, files=some, processes=some, memory_mb=8, limits=True)
box = Box(name="x", node="a", env={}, workdir="/work", mounts=(), folder="/x", image="torch")
print(*render(Runtime("podman", ("podman",)), facts, received, box).words)
"""


def test_a_field_that_a_node_needs_is_written_in_three_places(tmp_path: Path) -> None:
    package = tmp_path / "shoal"
    shutil.copytree(
        *(ROOT / "src/shoal", package),
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=os.symlink,
    )
    for name, before, added in PLACES:
        text = (ROOT / "src/shoal" / name).read_text()
        assert text.count(before) == 1, f"{name} has changed: choose another line for this test"
        (package / name).unlink()
        (package / name).write_text(text.replace(before, before + added))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", WAY], env=env, capture_output=True, text=True, check=False
    )
    assert "--shm-size=4096m" in done.stdout.split(), done.stderr
