"""What runs on each machine of an allocation: it says what Slurm gave us here, joins the cluster
with that and no more, and ends with it. The batch script starts it with
`python -m shoal.engines.slurm.machine HOME/slurm/o12.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import msgspec

from shoal.engines.slurm.read import features, limited, node_named
from shoal.engines.slurm.render import NOTICE_S, Settings
from shoal.machine.ends import EndNote, write_end
from shoal.model.node import LABEL_PATTERN, LABEL_VALUE_PATTERN, LABELS_MAX

NODE_LABEL = "slurm.node"
PARTITION_LABEL = "slurm.partition"
JOB_LABEL = "slurm.job"
FEATURE_LABEL = "slurm.feature/"
FEATURE_VALUE = "yes"

LOOK_S = 2.0  # between two looks at the files that say when this ends
OUTPUT_BYTES_MAX = 256 * 1024
END = "SLURM_JOB_END_TIME"  # set by the batch script where Slurm is older than 23.02


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    try:
        told = msgspec.json.decode(path.read_bytes(), type=Settings)
        node = node_named(_text(path.with_suffix(".nodes")), os.environ.get("SLURMD_NODENAME", ""))
        home = Path(tempfile.mkdtemp(prefix="shoal-", dir=told.folder))
    except (OSError, msgspec.DecodeError) as error:
        print(f"{os.environ.get('SLURMD_NODENAME', '')}: {error}", flush=True)
        return 1
    try:
        return _run(told, path, home, node)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def join_argv(
    told: Settings, environ: Mapping[str, str], node: Mapping[str, str], home: str, now_s: float
) -> list[str]:
    """`shoal join` with what this allocation has here. Pure."""
    argv = [told.python, "-m", "shoal.main", "join", told.url, "--foreground", "--home", home]
    argv += ["--name", name_of(told, environ), "--origin", told.supply, "--order", told.order]
    argv += ["--gpus", str(len(gpus_of(environ)))]
    if told.gpu_model:
        argv += ["--gpu-model", told.gpu_model]
    if told.gpu_memory_mb:
        argv += ["--gpu-memory", f"{told.gpu_memory_mb}M"]
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if cpus.isdigit():
        argv += ["--cpus", cpus]
    memory_mb = memory_of(environ, node)
    if memory_mb:
        argv += ["--memory", f"{memory_mb}M"]
    place = place_of(environ)
    if place:
        argv += ["--place", place]
    for name, value in labels_of(told, environ, node).items():
        argv += ["--label", f"{name}={value}"]
    for taint in told.taints:
        argv += ["--taint", taint]
    end = environ.get(END, "")
    if end.isdigit() and limited(int(end), now_s):  # NONE: it has no limit
        argv += ["--ends-at", end]
    return argv


def name_of(told: Settings, environ: Mapping[str, str]) -> str:
    number = environ.get("SLURM_NODEID", "0")
    return told.nodes[int(number)]


def gpus_of(environ: Mapping[str, str]) -> list[str]:
    """Those that Slurm gave us here, as the machine's driver names them."""
    text = environ.get("CUDA_VISIBLE_DEVICES", "") or environ.get("SLURM_STEP_GPUS", "")
    return [word for word in text.split(",") if word and word != "NoDevFiles"]


def memory_of(environ: Mapping[str, str], node: Mapping[str, str]) -> int:
    """In MB. A whole machine has what Slurm says it has; 0: Slurm does not say."""
    whole = environ.get("SLURM_MEM_PER_NODE", "")
    if whole.isdigit() and int(whole):
        return int(whole)
    each, cpus = environ.get("SLURM_MEM_PER_CPU", ""), environ.get("SLURM_CPUS_ON_NODE", "")
    if each.isdigit() and cpus.isdigit() and int(each):
        return int(each) * int(cpus)
    real = node.get("RealMemory", "")
    return int(real) if real.isdigit() else 0


def place_of(environ: Mapping[str, str]) -> str:
    """Its switches, outermost first, where Slurm knows the topology."""
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds):
        return ""
    return "/".join(
        re.sub(r"[^A-Za-z0-9_-]", "-", name)
        for name, kind in zip(names, kinds, strict=True)
        if kind in ("switch", "block") and name
    )


def labels_of(
    told: Settings, environ: Mapping[str, str], node: Mapping[str, str]
) -> dict[str, str]:
    """The supply's own labels win. A feature whose name cannot be a label is left out."""
    found = {
        NODE_LABEL: environ.get("SLURMD_NODENAME", ""),
        JOB_LABEL: environ.get("SLURM_JOB_ID", ""),
        PARTITION_LABEL: environ.get("SLURM_JOB_PARTITION", ""),
    }
    found |= told.labels
    for feature in features(dict(node)):
        found.setdefault(FEATURE_LABEL + feature, FEATURE_VALUE)
    fitting = {
        name: value
        for name, value in found.items()
        if value and re.match(LABEL_PATTERN, name) and re.match(LABEL_VALUE_PATTERN, value)
    }
    return dict(list(fitting.items())[:LABELS_MAX])


def _run(told: Settings, path: Path, home: Path, node: Mapping[str, str]) -> int:
    argv = join_argv(told, os.environ, node, str(home), time.time())
    # Saved work must outlive the allocation, so it is where the head keeps it.
    env = os.environ | {"SHOAL_JOIN_TOKEN": told.token, "SHOAL_CHECKPOINT_ROOT": told.checkpoints}
    agent = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def pass_on(number: int, _: FrameType | None) -> None:
        agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    folder = home / "nodes" / name_of(told, os.environ)
    threading.Thread(target=_follow, args=(path, folder), daemon=True).start()
    _copy_output(agent)
    return agent.wait()


def _copy_output(agent: subprocess.Popen[bytes]) -> None:
    """Up to a bound: the file is on a disk that many share."""
    assert agent.stdout is not None
    left = OUTPUT_BYTES_MAX
    for line in agent.stdout:
        if left > 0:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        left -= len(line)


def _follow(path: Path, folder: Path) -> None:
    """Copies the newest word on when this ends to where the agent reads it: the supplier's, or the
    batch script's when Slurm has sent it a notice."""
    known: EndNote | None = None
    while True:
        found = newest_end(_text(path.with_suffix(".ends")), _text(path.with_suffix(".notice")))
        if found is not None and found != known and folder.is_dir():
            with contextlib.suppress(OSError):  # the next look tries again
                write_end(folder, found.at, found.why)
                known = found
        time.sleep(LOOK_S)


def newest_end(planned: str, notice: str) -> EndNote | None:
    """`planned`: an EndNote as JSON; `notice`: when Slurm sent its signal. Pure."""
    found: list[EndNote] = []
    with contextlib.suppress(msgspec.MsgspecError):  # there is none
        found.append(msgspec.json.decode(planned, type=EndNote))
    if notice.strip().isdigit():
        found.append(EndNote(int(notice) + NOTICE_S, "Slurm gave notice that it ends this job"))
    return min(found, key=lambda one: one.at) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
