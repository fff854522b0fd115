"""The parts of `make gpu` (see `gpu_checks.py`): `python -m bench.gpu_parts NAME [--virtual]`.

Each check prints one line when it is over. A check that fails does not keep the next from running.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from bench import gpu_shares
from bench import sleep as naps
from bench.gpu_checks import FAILED, LINE, NOT_RUN, PASSED, ROOT, Row
from bench.sleep_cluster import Cluster
from shoal.core.state.events.runs import JobBegan
from shoal.model.job import JobSpec, Restart

EXAMPLES = ROOT / "examples" / "train"
POLL_S = 0.05
JOULES_WRONG_PERCENT_MAX = 5
UNSEEN_J = (
    130  # a second at rest: the start and the end of the process, which it does not see itself
)
STARTUP_WRONG_S_MAX = 4.0  # a sample every two seconds, and a report each second
SHORT_TURNS: dict[str, Any] = {
    "turn_s": 5.0,
    "turns_s": 30.0,
    "turn_percent": 20,
}  # a change costs 1 s


class CannotRun(Exception):
    """Something is not here that the check needs. The text is one line."""


@contextlib.contextmanager
def check(name: str, met: str) -> Iterator[Row]:
    row = Row(name, met, PASSED)
    try:
        yield row
    except CannotRun as why:
        row.outcome, row.figure = NOT_RUN, str(why)
    except Exception as error:  # the next check still counts
        traceback.print_exc()
        first = str(error).strip().splitlines()[:1] or [""]
        row.outcome, row.figure = FAILED, f"{type(error).__name__}: {first[0]}"
    print(LINE + msgspec.json.encode(row).decode(), flush=True)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise CannotRun(f"no {package} installed")


def _version(package: str) -> str:
    need(package)
    return metadata.version(package)


def need_driver(cluster: Cluster) -> None:
    if cluster.virtual:
        raise CannotRun("a virtual GPU has no driver")


class Run:
    """One job of a command of its own."""

    def __init__(self, cluster: Cluster, command: tuple[str, ...], **fields: Any) -> None:
        self._client = cluster.client
        env = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        }
        spec = JobSpec(command=command, env=env | fields.pop("env", {}), **{"gpus": 1, **fields})
        self.submitted = time.time()
        self.id = self._client.submit(spec).id

    def output(self) -> str:
        return self._client.logs(self.id).data.decode()

    def until(self, text: str) -> str:
        """Its output, when this is in it."""
        while text not in (output := self.output()):
            if self._client.job(self.id).finished_ms is not None:
                raise RuntimeError(f"{self.id} ended: {self.why()}\n{self.output()[-2_000:]}")
            time.sleep(POLL_S)
        return output

    def end(self) -> str:
        """Its state, when it has ended."""
        while (
            view := self._client.job(self.id, wait_for="finished", wait_s=10)
        ).finished_ms is None:
            pass
        return view.state

    def succeed(self) -> str:
        if self.end() != "succeeded":
            raise RuntimeError(f"{self.id}: {self.why()}\n{self.output()[-2_000:]}")
        return self.output()

    def why(self) -> str:
        return self._client.why(self.id).why

    def said(self, word: str) -> float:
        """The number after this word in its output."""
        lines = [line.split() for line in self.output().splitlines() if line.startswith(word)]
        return float(lines[-1][1])


# -- one job, as anybody would start it ------------------------------------------------------

# Knows nothing of Shoal. Before its first kernel it imports, and works for the CPU alone.
PLAIN = """
import time
import torch
began = time.time()
while time.time() < began + 6:
    sum(range(10_000))
x = torch.randn(8192, 8192, device="DEVICE", dtype=torch.bfloat16)
ballast = torch.ones(4 << 28, device="DEVICE")
print("kernel", time.time(), flush=True)
until = time.time() + 12
while time.time() < until:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""
LOOK = """
import ctypes, os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print("sees", 0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


def job(cluster: Cluster) -> None:
    with check("GPU found", "a plain cluster of this machine") as row:
        (node,) = cluster.client.nodes()
        assert node.gpus >= 1, f"{node.id} has {node.gpus} GPUs"
        row.figure = f"{node.gpus} x {node.gpu_model or 'virtual'}, {node.gpu_memory_mb} MB"
    _tree(cluster)
    plain = (
        None
        if cluster.virtual
        else Run(cluster, (sys.executable, "-c", PLAIN.replace("DEVICE", "cuda")))
    )
    with check("use and memory of a job", "NVML while an unmodified script works") as row:
        need_driver(cluster)
        assert plain is not None
        plain.until("kernel")
        most = (0, 0)
        while most[0] < 500 or most[1] < 4_000:
            view = next(one for one in cluster.client.jobs() if one.id == plain.id)
            most = max(most, (view.gpu_busy_milli or 0, view.gpu_used_mb or 0))
            assert view.state == "running", f"{view.state}: seen were at most {most}"
            time.sleep(0.2)
        row.figure = f"{most[0] // 10} % busy, {most[1]} MB (it has 4.1 GiB)"
    with check("start-up learned", "the same script: imports, 6 s of CPU, then kernels") as row:
        need_driver(cluster)
        assert plain is not None
        plain.succeed()
        events = cluster.client.events(job=plain.id).events
        began = [one.event for one in events if isinstance(one.event, JobBegan)]
        assert began, "no event says when it began to work"
        view = cluster.client.job(plain.id)
        own_s = plain.said("kernel") - (view.running_ms or 0) / 1000
        row.figure = (
            f"{began[0].startup_ms / 1000:.1f} s by {began[0].by}; the script itself: {own_s:.1f} s"
        )
        assert began[0].by == "gpu"
        assert abs(began[0].startup_ms / 1000 - own_s) < STARTUP_WRONG_S_MAX
    with check("device rules", "a job without GPUs that asks the driver") as row:
        need_driver(cluster)
        bare = Run(cluster, (sys.executable, "-c", LOOK), gpus=0)
        bare.succeed()
        (node,) = cluster.client.nodes()
        reasons = [why for why in node.unenforced if "GPU" in why]
        seen = int(bare.said("sees"))
        row.figure = f"sees {seen} GPUs; not enforced: {'; '.join(reasons) or 'nothing'}"
        assert not seen or reasons, "it sees a GPU that it may not use, and nobody says so"


NAMES = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHOAL_GPUS", "SHOAL_JOB_GPUS")
# As scripts for torchrun choose their GPU.
CHOOSES = f"""
import os, torch
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
total = float(torch.ones(8, device=device).sum())
print("found", *[f"{{name}}={{os.environ.get(name)}}" for name in {NAMES}],
      torch.cuda.device_count(), total)
"""


def _tree(cluster: Cluster) -> None:
    with check("tree", "NVML and sysfs, as `shoal nodes --tree` shows them") as row:
        need_driver(cluster)
        (node,) = cluster.client.nodes()
        lines = cluster.client.node_tree(node.id).lines
        gpus = [line for line in lines if line.strip().startswith("GPU ")]
        row.figure = "; ".join(line.strip() for line in lines)
        assert len(gpus) == node.gpus, f"{len(gpus)} GPUs in: {row.figure}"
    with check("variables of a member", "elastic gangs of one, without and with --per-node") as row:
        need_driver(cluster)
        found = []
        for each in (0, 1):
            fields = {"members": 1, "members_max": 2, "members_per_node": each}
            gang = Run(cluster, (sys.executable, "-c", CHOOSES), **fields)
            output = gang.succeed()
            found.append(next(line for line in output.splitlines() if line.startswith("found")))
        row.figure = " / ".join(line.removeprefix("found ") for line in found)
        for line in found:
            assert "LOCAL_RANK=0" in line, line
            assert "SHOAL_JOB_GPUS=None" in line, line
            assert line.endswith(" 1 8.0"), line


# -- sleep -----------------------------------------------------------------------------------


def sleep(cluster: Cluster) -> None:
    size = naps.VIRTUAL if cluster.virtual else naps.GPU
    with check("lent and returned", "8.8 GB asleep while another takes 120 GB") as row:
        found = naps.interrupted(cluster, cluster.run("train", size.step_s, size.train_mb), size)
        row.figure = f"lent after {found['lend_s']} s, back after {found['return_s']} s"
        assert not found["steps_lost"]
        assert not found["steps_skipped"]
        assert found["same_process"]
        assert found["sound"]
    with check("sharing refused", "two processes that share CUDA memory") as row:
        need_driver(cluster)
        found = naps.refuse(cluster, size)
        row.figure = found["why"]
        assert (found["slept"], found["lives"], found["steps_lost"]) == (False, True, 0)
    with check("killed asleep", "SIGKILL of a process whose memory is on the host") as row:
        row.figure = _killed(cluster, size, woken=False)
    with check("killed awake", "stopped right after it was woken (moved out again first)") as row:
        row.figure = _killed(cluster, size, woken=True)


def _killed(cluster: Cluster, size: naps.Size, *, woken: bool) -> str:
    """Its GPU is free again at once, and works for the next job."""
    sleeper = cluster.run("train", size.step_s, size.turn_mb)
    sleeper.stepped(5)
    naps.wait_known(cluster, sleeper)
    cluster.client.sleep(sleeper.id)
    sleeper.until("asleep")
    if woken:
        cluster.client.wake(sleeper.id)
        sleeper.until("running")
    at = time.time()
    if woken:
        sleeper.end()
    else:
        os.kill(sleeper.marks()[-1].pid, signal.SIGKILL)
        sleeper.until("failed", "waiting", "starting", "running")
        sleeper.end()
    gone_s = time.time() - at
    other = cluster.run("train", size.step_s, size.turn_mb)
    other.stepped(5)
    other.end()
    return f"over after {gone_s:.1f} s; the next job does its steps"


def turns(cluster: Cluster) -> None:
    size = naps.VIRTUAL if cluster.virtual else naps.GPU._replace(**SHORT_TURNS)
    with check("turns", "two jobs and one GPU, turns of at least 5 s") as row:
        found = naps.turns(cluster, size)
        row.figure = f"{found['ratio']} of the steps of one alone, {found['changes']} changes"
        assert found["changes"] >= 1
        assert found["ratio"] > 0.5


# -- frameworks ------------------------------------------------------------------------------

LIT = """
import torch
try:
    import lightning
except ImportError:
    import pytorch_lightning as lightning
from torch.utils.data import DataLoader, TensorDataset
class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = lightning.Trainer(devices=1, max_steps=20, **dict.fromkeys(quiet, False))
trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2))
print("steps", trainer.global_step, trainer.strategy.root_device)
"""
NCCL = """
import torch, torch.distributed as dist
backend = "nccl" if torch.cuda.is_available() else "gloo"
device = "cuda" if backend == "nccl" else "cpu"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1 << 24, device=device)
for _ in range(20):
    dist.all_reduce(x)
print("sum", x.sum().item(), backend, torch.cuda.nccl.version() if backend == "nccl" else "")
dist.destroy_process_group()
"""
LONE = (
    "env",
    "RANK=0",
    "WORLD_SIZE=1",
    "LOCAL_RANK=0",
    "MASTER_ADDR=127.0.0.1",
    "MASTER_PORT=29511",
)


def train(cluster: Cluster) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    with check("DDP, killed", "torchrun, examples/train/ddp.py") as row:
        row.met = f"torch {_version('torch')}, {row.met}"
        row.figure = _continued(cluster, launcher, "ddp.py")
    with check("FSDP2, killed", "examples/train/fsdp2.py") as row:
        row.met = f"torch {_version('torch')}, {row.met}"
        row.figure = _continued(cluster, (*LONE, sys.executable), "fsdp2.py")


def frameworks(cluster: Cluster) -> None:
    with check("accelerate", "examples/train/accelerated.py") as row:
        row.met = f"accelerate {_version('accelerate')}, {row.met}"
        script = str(EXAMPLES / "accelerated.py")
        output = Run(cluster, (sys.executable, script, "--epochs", "3")).succeed()
        row.figure = output.strip().splitlines()[-1]
        assert "epoch 2 done" in output
    with check("Lightning", "20 steps with `devices=1`") as row:
        there = importlib.util.find_spec("lightning") is not None
        row.met = f"Lightning {_version('lightning' if there else 'pytorch_lightning')}, {row.met}"
        lit = Run(cluster, (sys.executable, "-c", LIT))
        lit.succeed()
        row.figure = next(line for line in lit.output().splitlines() if line.startswith("steps"))
        assert int(lit.said("steps")) == 20
        assert cluster.virtual or "cuda" in row.figure
    with check("NCCL", "all_reduce of one rank, 64 MiB, 20 times") as row:
        nccl = Run(cluster, (sys.executable, "-c", NCCL))
        nccl.succeed()
        row.figure = next(line for line in nccl.output().splitlines() if line.startswith("sum"))
        assert nccl.said("sum") == float(1 << 24)


def _continued(cluster: Cluster, launcher: tuple[str, ...], script: str) -> str:
    """Its process gets SIGKILL after it has saved; the next attempt goes on from there."""
    folder = Path(tempfile.mkdtemp())
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, folder)
    command = (*launcher, str(folder / script), "--epochs", "8", "--samples", "8000")
    run = Run(cluster, command, restart=Restart.ON_FAILURE, retries=2)
    before = _losses(run.until("epoch 1 done"))
    os.kill(_worker(folder / script), signal.SIGKILL)
    killed = time.time()
    run.until("goes on with epoch")
    back_s = time.time() - killed
    output = run.succeed()
    goes_on = next(line for line in output.splitlines() if line.startswith("goes on with epoch"))
    assert int(goes_on.split()[-1]) >= 2, goes_on
    assert "epoch 7 done" in output
    losses = f"{', '.join(before)}, killed, {', '.join(_losses(output))}"
    return f"{goes_on} {back_s:.1f} s after SIGKILL; losses {losses}"


def _losses(output: str) -> list[str]:
    return [line.partition("loss ")[2] for line in output.splitlines() if " done: " in line]


def _worker(script: Path) -> int:
    """The process that trains, not its launcher."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(script) in words and "torch.distributed.run" not in words and words[0] != "env":
                return int(folder.name)
    raise RuntimeError(f"nobody runs {script}")


# -- shares, energy, warm starts, tests, containers ------------------------------------------


def shares(virtual: bool) -> None:
    """A tenth of the GPU, of which somebody takes 40 GB."""
    cases = (
        ("MPS limit", "torch", True),
        ("MPS limit, plain CUDA", "plain CUDA", True),
        ("torch's limit", "torch", False),
        ("agent's limit", "plain CUDA", False),
    )
    cluster: gpu_shares.Cluster | None = None
    for name, kind, mps in cases:
        with check(name, f"{kind}, {'MPS' if mps else 'no MPS'}, a tenth takes 40 GB") as row:
            if virtual:
                raise CannotRun("a virtual GPU has no memory")
            if mps and not shutil.which(gpu_shares.DAEMON):
                raise CannotRun(f"no {gpu_shares.DAEMON} here")
            if cluster is None or cluster.mps != mps:
                if cluster is not None:
                    cluster.close()
                cluster = gpu_shares.Cluster(mps=mps)
            taker = cluster.submit("0.1", "-c", gpu_shares.GREEDY[kind].format(gb=40))
            output, why = cluster.end(taker)
            row.figure = _refusal(output) or why
            if name == "agent's limit":  # it has it until the agent looks
                assert "MB of GPU 0, but asked for" in why, why
            else:
                assert _refusal(output), why
    if cluster is not None:
        cluster.close()


def _refusal(output: str) -> str:
    """The sentence with which CUDA or torch refused memory."""
    lines = [line for line in output.splitlines() if "out of memory" in line or "error 2" in line]
    return lines[-1].partition(". ")[0] if lines else ""


def energy(virtual: bool) -> None:
    """The ledger beside the counter of NVML, which each job reads first and last."""
    found: dict[str, tuple[float, float]] = {}
    for name, part in (("energy of jobs", "job"), ("energy of the node", "node")):
        with check(name, "NVML's counter, hungry and modest jobs of 6 s") as row:
            if virtual:
                raise CannotRun("a virtual GPU has no counter")
            if not found:
                words = [sys.executable, "-m", "bench.energy", "--seconds", "6"]
                done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
                print(done.stdout, done.stderr, flush=True)
                found = json.loads(done.stdout.splitlines()[-1])["joules"]
            kinds = {
                kind: pair for kind, pair in found.items() if (kind == "node") == (part == "node")
            }
            told = [f"{kind} {ledger} of {counter} J" for kind, (counter, ledger) in kinds.items()]
            row.figure = f"ledger {', '.join(told)}"
            for counter, ledger in kinds.values():
                beyond = max(0.0, abs(ledger - counter) - UNSEEN_J)
                assert beyond <= counter * JOULES_WRONG_PERCENT_MAX / 100, row.figure


def warm(cluster: Cluster) -> None:
    """A server's first answer, cold and from an interpreter that is kept warm."""
    with check("warm start", "an interpreter with torch is kept ready") as row:
        took = {}
        for kind in ("cold", "first", "warm"):
            begun = cluster.run("take", 60, 1_024, cold=kind == "cold")
            took[kind] = begun.seen("holds").at - begun.submitted
            if kind == "first":
                cluster.wait_until_warm(begun)
            begun.end()
        row.figure = f"1 GiB held after {took['warm']:.1f} s, cold {took['cold']:.1f} s"
        assert cluster.virtual or took["warm"] < took["cold"]


def tests(virtual: bool) -> None:
    names = (
        "tests/agent/test_sleep_cuda.py::test_on_a_real_gpu_a_process_goes_on_where_it_was",
        "tests/probes/test_probe.py::test_real_gpus_compute_and_copy",
    )
    with check("tests that need a GPU", "pytest") as row:
        need("pytest")
        if virtual:
            raise CannotRun("they skip without a driver")
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            *names,
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
        print(done.stdout, done.stderr, flush=True)
        row.figure = done.stdout.strip().splitlines()[-1]
        assert not done.returncode, row.figure
        assert "skipped" not in row.figure


def container(virtual: bool) -> None:
    with check("GPU in a container", "podman, docker or apptainer") as row:
        if virtual:
            raise CannotRun("a virtual GPU has no driver")
        runtime = next(filter(None, map(shutil.which, ("podman", "docker", "apptainer"))), None)
        if runtime is None:
            raise CannotRun("no container runtime here")
        row.met = runtime
        raise CannotRun("no image here, and nothing is fetched")


def bound(virtual: bool) -> None:
    from bench.sleep_driver import bounds

    found: dict[str, Any] = {}
    with check("rate of sleep", "8 GB, the driver alone") as row:
        if virtual:
            raise CannotRun("a virtual GPU has no driver")
        found = bounds(8)
        row.figure = f"out {found['out_gb_s']} GB/s, in {found['in_gb_s']} GB/s"
    with check("what bounds it", "threads of the process, and this host") as row:
        if not found:
            raise CannotRun("nothing was measured")
        row.figure = ", ".join(f"{name} {found[name]}" for name in found["bounds"])
    with check("with huge pages", "the same with transparent_hugepage=always") as row:
        if not found:
            raise CannotRun("nothing was measured")
        with _huge_pages():
            again = bounds(8, host=False)
        row.figure = f"out {again['out_gb_s']} GB/s, in {again['in_gb_s']} GB/s"


@contextlib.contextmanager
def _huge_pages() -> Iterator[None]:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        before = file.read_text().partition("[")[2].partition("]")[0]
        file.write_text("always")
    except OSError as error:
        raise CannotRun(f"cannot be set here: {error.strerror}") from None
    try:
        yield
    finally:
        file.write_text(before)


WITH_A_CLUSTER: dict[str, Callable[[Cluster], None]] = {
    "job": job,
    "sleep": sleep,
    "train": train,
    "frameworks": frameworks,
    "warm": warm,
    "turns": turns,
}
ALONE: dict[str, Callable[[bool], None]] = {
    "shares": shares,
    "energy": energy,
    "bound": bound,
    "tests": tests,
    "container": container,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*WITH_A_CLUSTER, *ALONE])
    parser.add_argument("--virtual", action="store_true")
    asked = parser.parse_args()
    if asked.part in ALONE:
        ALONE[asked.part](asked.virtual)
        return
    with Cluster(virtual=asked.virtual) as cluster:
        try:
            WITH_A_CLUSTER[asked.part](cluster)
        finally:
            print(cluster.log(), flush=True)


if __name__ == "__main__":
    main()
