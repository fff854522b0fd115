"""Makes the home of one released version, by running that version; README.md in `homes` says when.

    python tests/golden/make_home.py PYTHON [SOURCE...]

PYTHON is an interpreter that has that version's dependencies; each SOURCE is a folder for its
PYTHONPATH, such as `src` of a checkout of the release. The cluster runs in a folder that is the
same on every machine, gets one of everything that the version knows, and is then killed. The files
that it leaves become `homes/VERSION/home.tar.xz`, and `homes/VERSION/facts.json` says what must be
found there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

HOMES = Path(__file__).parent / "homes"
ROOT = Path("/srv/shoal-golden")  # neutral: it is in the database and in some files
HOME = ROOT / "home"
# Not kept: what only lives with processes, what is large, and logs with this machine's paths.
LEFT_OUT = ("spare", "gateway", "controller.log", "checkpoints", "replays", "volumes")
LEFT_OUT_ENDS = (".sock", ".lock", "agent.log", "-shm")
SINCE = {"people": (0, 2), "secrets": (0, 2), "labels": (0, 3), "flows": (0, 4)}
WAIT_S = 120.0

POLICY = """
base: fair
tenants:
  research: {weight: 2, quota_gpus: 2}
  vision: {parent: research, quota_gpus: 1, budget_gpu_hours: 5000}
"""
SUPPLY = """
supply:
  - {engine: slurm, name: spot, partition: gpu, gpus: 8, most: 2, idle: 10m}
"""
PRICES = """
currency: EUR
gpus:
  "*": {per_hour: 1.50, idle_watts: 30, busy_watts: 250}
pue: 1.25
co2_g_per_kwh: 380
"""
WORKFLOW = """
jobs:
  first: {command: [sh, -c, "exit 0"]}
  last: {command: [sleep, "1000"], after: first, gpus: 2, members: 4}
"""


class Cluster:
    def __init__(self, python: str, sources: list[str]) -> None:
        # Their paths are in the environment of jobs and the commands of maps.
        for number, source in enumerate(sources):
            shutil.copytree(source, ROOT / f"source{number}")
        sources = [str(ROOT / f"source{number}") for number in range(len(sources))]
        (ROOT / "venv").symlink_to(Path(python).absolute().parent.parent)
        self._python = str(ROOT / "venv/bin/python")
        self._env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(ROOT),
            "PYTHONPATH": os.pathsep.join(sources),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
        }
        self.version = self._run("-c", "import shoal; print(shoal.__version__)").strip()
        self.number = tuple(map(int, self.version.split(".")))

    def has(self, what: str) -> bool:
        return self.number >= SINCE[what]

    def __call__(self, *words: str, stdin: str = "") -> str:
        at = words.index("--") if "--" in words else len(words)
        mine = (*words[:at], "--home", str(HOME), *words[at:])
        return self._run("-m", "shoal.main", *mine, stdin=stdin).strip()

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def _run(self, *words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [self._python, *words],
            env=self._env,
            cwd="/tmp",  # where jobs run, so it has to exist where the home is opened
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def until(self, job: str, *states: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = {one["id"]: one["state"] for one in rows(self.json("ps", "-a"))}
            if found.get(job) in states:
                return
            time.sleep(0.2)
        raise SystemExit(f"{job} is {found.get(job)}, not one of {states}")

    def kill(self) -> None:
        """As a power cut would: first the head, then its nodes."""
        head = [int((HOME / "supervisor.lock").read_text().split()[0])]
        head.append(json.loads((HOME / "controller.json").read_bytes())["pid"])
        agents = [json.loads(one.read_bytes())["pid"] for one in HOME.glob("nodes/*/agent.json")]
        for pid in (*head, *agents):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._run("-m", "shoal.gateway", "stop", str(HOME / "gateway"))


def rows(found: Any) -> list[dict[str, Any]]:
    return list(found["jobs"]) if isinstance(found, dict) else list(found)


def written(name: str, text: str) -> str:
    (ROOT / name).write_text(text.lstrip())
    return str(ROOT / name)


def fill(shoal: Cluster) -> dict[str, Any]:
    """One of everything; returns what a newer version must find."""
    jobs: dict[str, str] = {}
    policy = POLICY + (SUPPLY if shoal.has("flows") else "")
    shoal("policy", "set", written("policy.yaml", policy))
    shoal("prices", "set", written("prices.yaml", PRICES))
    facts: dict[str, Any] = {"version": shoal.version, "tenants": ["research", "vision"]}

    def run(state: str, *words: str) -> str:
        job = shoal("run", *words).split()[-1]
        jobs[job] = state
        return job

    good = run("succeeded", "-g", "1", "--name", "good", "--", "sh", "-c", "echo hello; sleep 2")
    bad = run("failed", "-g", "1", "--tenant", "vision", "--", "sh", "-c", "echo no; exit 7")
    shoal.until(good, "succeeded")
    shoal.until(bad, "failed")
    if shoal.has("people"):
        people(shoal, facts)
    if shoal.has("secrets"):
        shoal("secret", "set", "key", stdin="hush-hush")
        facts["secrets"] = {"key": "hush-hush"}
        keeps = run("succeeded", "--secret", "key=KEY", "--", "sh", "-c", 'test "$KEY" = hush-hush')
        shoal.until(keeps, "succeeded")
    if shoal.has("labels"):
        shoal("label", "n1", "pool=a")
        facts["node_labels"] = {"n1": {"pool": "a"}}
    many = "8" if shoal.has("flows") else "1"  # eight can only be had from the supply
    gone = run("cancelled", "-g", many, "--", "sleep", "1000")
    shoal("cancel", gone)
    shoal.until(gone, "cancelled")
    items = written("items.jsonl", "".join(f"{number}\n" for number in range(20)))
    module = written("double.py", "def double(item):\n    return 2 * item\n")
    result = str(ROOT / "doubled.jsonl")
    shoal("map", f"{module}:double", items, "-o", result, "--cluster", "-n", "2")
    for one in rows(shoal.json("ps", "-a")):
        jobs.setdefault(one["id"], one["state"])  # the map's
    shoal("serve", "site", "--replicas", "1", "--", "sh", "-c", "exec python3 -m http.server $PORT")
    facts["services"] = ["site"]
    if shoal.has("flows"):
        flows(shoal, facts, run)
    running = run("running", "-g", "1", "--name", "long", "--", "sh", "-c", "echo on; sleep 1000")
    shoal.until(running, "running")
    # Three GPUs are free now; the first of these waits for four, and runs when `long` is cancelled.
    waits = run("waiting", "-n", "2", "-g", "2", "--", "sh", "-c", "echo late")
    run("waiting", "--tenant", "vision", "-g", "2", "-n", "2", "--", "sleep", "1000")
    facts |= {"jobs": jobs, "good": good, "bad": bad, "running": running, "waits": waits}
    return facts


def people(shoal: Cluster, facts: dict[str, Any]) -> None:
    for tenant in ("research", "vision"):
        shoal("tenant", "add", tenant)
    shoal("user", "add", "ann", "--tenant", "vision")
    token = shoal("token", "add", "ann", "--expires", "never").splitlines()[-1].split()[-1]
    facts["users"] = {"ann": token}


def flows(shoal: Cluster, facts: dict[str, Any], run: Any) -> None:
    array = run("succeeded", "--array", "0-3", "--", "sh", "-c", "echo {index}")
    shoal.until(array, "succeeded")
    shoal("label", array, "run=a")
    shoal("note", array, "four at once")
    facts["labels"] = {array: {"run": "a"}}
    facts["array"] = array
    shoal("schedule", "add", "nightly", "--cron", "0 3 * * *", "--", "sh", "-c", "exit 0")
    facts["schedules"] = ["nightly"]
    shoal("run", "-f", written("flow.yaml", WORKFLOW))
    facts["workflow"] = "flow"
    shoal("notify", "add", "failed=https://example.com/hook")
    facts["notices"] = 1


def keep(facts: dict[str, Any]) -> Path:
    target: Path = HOMES / facts["version"]
    target.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for path in sorted(HOME.rglob("*")):
            name = path.relative_to(HOME)
            if any(part in LEFT_OUT for part in name.parts) or path.is_socket():
                continue
            if str(name).endswith(LEFT_OUT_ENDS) or name.name.startswith("beats"):
                continue
            archive.add(path, str(name), recursive=False, filter=nobodys)
    (target / "home.tar.xz").write_bytes(packed.getvalue())
    (target / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return target / "home.tar.xz"


def nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    ROOT.mkdir(mode=0o700)
    shoal = Cluster(sys.argv[1], sys.argv[2:])
    try:
        shoal("up", "--nodes", "2", "--gpus", "2", "--cpus", "8", "--memory", "4G", "--port", "0")
        try:
            facts = fill(shoal)
            facts["report"] = shoal.json("report")
        finally:
            shoal.kill()
        made = keep(facts)
    finally:
        shutil.rmtree(ROOT)
    print(f"{made}: {made.stat().st_size} bytes")


if __name__ == "__main__":
    main()
