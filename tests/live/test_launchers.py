"""Other projects' launchers and scripts run under `shoal run` as their makers document them.

`SHOAL_NANOGPT=DIR` names a checkout of nanoGPT, to run its own `train.py` as well.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.app import call
from tests.live.cluster import MARK, Live, all_pids, live_cluster
from tests.needs import need, need_program

need("torch")


SCRIPTS = Path(__file__).parent / "launched"
EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
DECIDES, FAILS = str(SCRIPTS / "decides.py"), str(SCRIPTS / "fails.py")


@pytest.fixture(scope="module")
def gym() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=2) as live:
        yield live


class Terminal:
    """A shell in the folder of the examples, with the launchers on its path."""

    def __init__(self, live: Live, capfd: pytest.CaptureFixture[str]) -> None:
        self._live, self._capfd = live, capfd

    def run(self, words: str, *more: str) -> str:
        """`shoal run --wait ...` must succeed; returns what the job wrote."""
        self._capfd.readouterr()
        code = call(["run", "--wait", *self._env(), *words.split(), *more])
        told = self._capfd.readouterr()
        assert code == 0, told.out + told.err
        return told.out

    def fail(self, words: str, *more: str) -> str:
        """The same must fail; returns what the command says about it."""
        self._capfd.readouterr()
        code = call(["run", "--wait", *self._env(), *words.split(), *more])
        told = self._capfd.readouterr()
        assert code, told.out + told.err
        job = re.search(r"\[(j\d+) submitted", told.err)
        assert job, told.err
        assert call(["explain", job[1]]) == 0
        return told.err + self._capfd.readouterr().out

    def begin(self, words: str) -> Running:
        """The same as a program of its own."""
        return Running(["run", "--wait", *self._env(), *words.split()])

    def _env(self) -> list[str]:
        return [f"--env={MARK}={self._live.home.path}"]


class Running:
    """A `shoal run --wait` in a terminal of its own."""

    def __init__(self, words: list[str]) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "shoal.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._program.stderr is not None
        first = self._program.stderr.readline()
        found = re.match(r"\[(j\d+) submitted", first)
        assert found, first + self._program.stderr.read()
        self.job = found[1]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.kill()
        self._program.communicate()

    def read_until(self, text: str) -> None:
        out, said = self._program.stdout, self._program.stderr
        assert out is not None and said is not None
        assert any(text in line for line in out), said.read()

    def succeed(self) -> str:
        """What the job wrote from here on."""
        out, said = self._program.communicate(timeout=500)
        assert self._program.returncode == 0, out + said
        return out


@pytest.fixture
def terminal(
    gym: Live, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setenv("SHOAL_HOME", str(gym.home.path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(EXAMPLES)
    return Terminal(gym, capfd)


def test_a_script_that_looks_for_a_rank_is_alone_when_it_is_alone(terminal: Terminal) -> None:
    assert "alone" in terminal.run(f"-g 1 -- python {DECIDES}")


@pytest.mark.soak  # ddp.py, below, is a world of two as well
def test_a_script_that_looks_for_a_rank_joins_the_others(terminal: Terminal) -> None:
    assert "world of 2, local ranks" in terminal.run(f"-n 2 -g 1 -- python {DECIDES}")


@pytest.mark.outside("torch and the launchers of others meet on a port by clocks of their own")
def test_torchrun_makes_one_world_of_all_members_and_their_gpus(terminal: Terminal) -> None:
    """Its processes ask no library who they are, so that only torchrun itself imports torch."""
    out = terminal.run(f"-n 2 -g 2 -- torchrun {SCRIPTS / 'asks.py'}")
    wanted = [
        f"[{n // 2}] rank {n} of 4, local rank {n % 2}: the others meet here" for n in range(4)
    ]
    assert sorted(line for line in out.splitlines() if "meet here" in line) == wanted


@pytest.mark.soak  # the same with a group of torch's
def test_processes_of_torchrun_form_one_group(terminal: Terminal) -> None:
    out = terminal.run(f"-n 2 -g 2 -- torchrun {DECIDES}")
    assert out.count("world of") == 1 and "world of 4, local ranks [0, 1, 0, 1]" in out


@pytest.mark.parametrize(
    "words",
    [
        f"-g 2 -- torchrun {FAILS}",
        *(
            pytest.param(words, marks=pytest.mark.soak)
            for words in (
                f"-n 2 -g 2 -- torchrun {FAILS}",
                f"-n 2 -- python {FAILS}",
                f"-n 2 --launcher -- mpirun -n 2 python {FAILS}",
                f"-g 2 -- deepspeed --no_local_rank --num_gpus 2 {FAILS}",
            )
        ),
    ],
)
def test_the_reason_of_a_failure_is_the_failing_ranks(terminal: Terminal, words: str) -> None:
    said = terminal.fail(words)
    assert "the learning rate became nan at step 17" in said
    assert "https://pytorch.org" not in said and "ChildFailedError" not in said


@pytest.mark.soak
def test_torchrun_obeys_its_own_flags(terminal: Terminal) -> None:
    """As its makers document them: alone on a node, and with a rendezvous of its own choice."""
    assert "world of 2" in terminal.run(f"-- torchrun --standalone --nproc-per-node 2 {DECIDES}")
    meet = '--rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"'
    launch = f"exec torchrun --nnodes 2 --nproc-per-node 1 {meet} {DECIDES}"
    assert "world of 2" in terminal.run("-n 2 -- sh -c", launch)


ACCELERATE = (
    "exec accelerate launch --cpu --num_machines 2 --num_processes 2 --machine_rank $RANK"
    " --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
)


@pytest.mark.outside("torch and the launchers of others meet on a port by clocks of their own")
def test_accelerate_launches_on_several_machines(terminal: Terminal) -> None:
    """Only the launcher imports torch. tests/train/test_examples.py trains with Accelerate."""
    need("accelerate")
    out = terminal.run("-n 2 -- sh -c", f"{ACCELERATE} {SCRIPTS / 'meets.py'}")
    for rank in (0, 1):
        assert f"rank {rank} of 2 has met the others" in out


@pytest.mark.soak
def test_what_accelerate_launches_on_several_machines_trains(terminal: Terminal) -> None:
    need("accelerate")
    small = "accelerated.py --epochs 1 --samples 64"
    out = terminal.run("-n 2 -- sh -c", f"{ACCELERATE} {small}")
    assert out.count("epoch 0 done") == 1


@pytest.mark.soak
def test_lightning_alone_is_alone(terminal: Terminal) -> None:
    need("lightning")
    assert "rank 0 of 1 on node 0: 2 steps" in terminal.run(f"-- python {SCRIPTS / 'lit.py'} 1 1")


@pytest.mark.outside("torch and the launchers of others meet on a port by clocks of their own")
def test_lightning_runs_on_two_nodes_with_a_device_on_each(terminal: Terminal) -> None:
    """Both members would fit on one node, where the second would have local rank 1."""
    need("lightning")
    out = terminal.run(f"--nodes 2 -- python {SCRIPTS / 'lit.py'} 2 1")
    for rank in (0, 1):
        assert f"rank {rank} of 2 on node {rank}: 2 steps" in out
    # Its other way to count is by nodes, wrong as soon as ranks are not in the order of nodes.
    assert out.count("ranks are TorchElasticEnvironment's") == 2


@pytest.mark.soak  # one launcher that starts processes of its own, accelerate, is enough here
def test_deepspeeds_own_launcher_starts_its_script(terminal: Terminal) -> None:
    need("deepspeed")
    launch = "exec deepspeed --no_local_rank --num_gpus 2 --master_port $PET_MASTER_PORT"
    out = terminal.run("-g 2 -- sh -c", f"{launch} deepspeeded.py --epochs 1 --samples 64")
    assert out.count("epoch 0 done") == 1


@pytest.mark.soak  # tests/netns/test_launchers.py has mpirun with ranks on two hosts
def test_mpirun_starts_torchrun_on_each_node(terminal: Terminal) -> None:
    need_program("mpirun")
    out = terminal.run(f"-n 2 -g 2 --launcher -- mpirun -N 1 torchrun {DECIDES}")
    assert out.count("world of") == 1 and "world of 4, local ranks [0, 1, 0, 1]" in out


@pytest.mark.soak
def test_deepspeed_starts_its_processes_on_all_nodes_of_the_hostfile(terminal: Terminal) -> None:
    need("deepspeed")
    flags = "--hostfile $SHOAL_HOSTFILE --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
    launch = f"exec deepspeed {flags} --no_local_rank {DECIDES}"
    out = terminal.run("-n 2 -g 2 --launcher -- sh -c", launch)
    assert out.count("world of") == 1 and "world of 4, local ranks [0, 1, 0, 1]" in out


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torch", "-n 2 --retries 1 -- python ddp.py"),
        # The others are killed without a cluster in `make test`, and with one in `make long`.
        pytest.param("torch", "-n 2 --retries 1 -- python fsdp2.py", marks=pytest.mark.soak),
        pytest.param(
            "accelerate", "-n 2 --retries 1 -- python accelerated.py", marks=pytest.mark.soak
        ),
    ],
)
def test_a_script_that_knows_nothing_of_shoal_goes_on_when_a_member_was_killed(
    package: str, command: str, gym: Live, terminal: Terminal
) -> None:
    """Killed when the first epoch is saved; then Shoal runs it again, to its end."""
    need(package)
    job, out = kill_once(terminal, f"{command} --epochs 6 --samples 256", "epoch 0 done")
    went_on = {int(epoch) for epoch in re.findall(r"goes on with epoch (\d+)", out)}
    assert len(went_on) == 1 and went_on.pop() >= 1, out
    assert out.count("epoch 5 done") == 1, out
    view = gym.client.job(job)
    assert (view.attempt, view.failures) == (2, 1)
    script = EXAMPLES / command.split()[-1]
    assert "import shoal" not in script.read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("package", "command", "saved", "reporter"),
    [
        ("deepspeed", "-n 2 -- python deepspeeded.py --epochs 40 --samples 64", "epoch 4", 0),
        ("megatron", "-n 2 -- python megatron_gpt.py --steps 100", "step 6", 0),
        ("torch", "-n 4 -- python tensor_pipeline.py --steps 100", "step 6", 3),
    ],
    ids=("deepspeed", "megatron", "tensor_pipeline"),
)
def test_a_framework_whose_member_was_killed_has_the_losses_of_an_undisturbed_run(
    package: str, command: str, saved: str, reporter: int, gym: Live, terminal: Terminal
) -> None:
    need(package)
    calm = losses(terminal.run(command))
    job, _ = kill_once(terminal, f"--retries 1 {command}", f"{saved} done")
    before, after = (
        losses(gym.output(job, member=reporter, attempt=attempt)) for attempt in (1, 2)
    )
    went_on = re.findall(r"goes on with \w+ (\d+)", gym.output(job, attempt=2))
    print(f"went on at {went_on}: {calm}; {before}; {after}")  # pytest -rP shows it
    assert [min(after)] == [int(number) for number in went_on] and 0 < min(after) <= max(before) + 1
    assert calm | before == pytest.approx(calm, rel=1e-4, abs=1e-5)
    assert calm | after == pytest.approx(calm, rel=1e-4, abs=1e-5)
    assert max(after) == max(calm)


def losses(out: str) -> dict[int, float]:
    lines = re.findall(r"(?:step|epoch) (\d+) done: loss ([\d.]+)", out)
    return {int(number): float(loss) for number, loss in lines}


def kill_once(terminal: Terminal, command: str, when: str) -> tuple[str, str]:
    """The job, and what it wrote after a member was killed."""
    with terminal.begin(command) as running:
        running.read_until(when)
        rank = random.randrange(2)  # whichever it is, all begin again
        os.kill(pid_of(running.job, rank), signal.SIGKILL)
        return running.job, running.succeed()


def pid_of(job: str, member: int) -> int:
    """The process that writes the output of a member of the first attempt."""
    folder = f"/members/{job}.1.{member}/"
    return next(pid for pid in all_pids() if folder in output_of(pid))


def output_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1")
    return ""


@pytest.mark.parametrize(
    ("package", "command", "said"),
    [
        ("torch", "-n 2 -- python fsdp2.py --epochs 1 --samples 64", "epoch 0 done"),
        ("fsspec", "-- python chars.py --steps 2 --batch 4", "loss"),
        ("fsspec", "-n 2 -- python chars.py --steps 2 --batch 4", "loss"),
        ("fsspec", "-n 2 -- python images.py --epochs 1 --samples 64", "of new images right"),
    ],
    ids=lambda value: re.sub(r" --(epochs|steps).*", "", value),
)
# For Shoal all of them are what ddp.py is, above. tests/train/test_examples.py runs what they do.
@pytest.mark.soak
def test_an_example_runs_as_its_first_lines_say(
    package: str, command: str, said: str, terminal: Terminal
) -> None:
    need(package)
    assert said in terminal.run(command)


@pytest.mark.soak
def test_shards_of_a_volume_are_read_as_the_example_says(
    terminal: Terminal, tmp_path: Path
) -> None:
    need("fsspec")
    shards = tmp_path / "digits"
    words = [sys.executable, "shards.py", "--write", str(shards), "--samples", "640"]
    subprocess.run(words, cwd=EXAMPLES, check=True)
    said = terminal.run(f"-n 2 --volume {shards}:digits -- python shards.py --epochs 1")
    assert "steps/s" in said


def test_each_training_example_is_run_here() -> None:
    libraries = {"data.py", "model.py", "plain.py"}
    here = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in libraries or f"-- python {path.name}" in here


def test_nanogpt_trains_by_its_own_command_line(terminal: Terminal, tmp_path: Path) -> None:
    checkout = os.environ.get("SHOAL_NANOGPT", "")
    if not checkout:
        pytest.skip("SHOAL_NANOGPT names no checkout of nanoGPT")
    folder = tmp_path / "nanoGPT"
    shutil.copytree(checkout, folder)
    data = folder / "data" / "shakespeare_char"
    for name in ("train.bin", "val.bin"):  # its own `prepare.py` asks the network for a text
        (data / name).write_bytes(array("H", [n * n % 65 for n in range(4000)]).tobytes())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "stoi": {}, "itos": {}}))
    # Its README's for a machine without a GPU, but smaller. Its distributed branch needs CUDA.
    flags = (
        "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 "
        "--log_interval=1 --block_size=16 --batch_size=4 --n_layer=1 --n_head=1 --n_embd=16 "
        "--max_iters=2 --lr_decay_iters=2 --dropout=0.0 --gradient_accumulation_steps=2"
    )
    assert "iter 2: loss" in terminal.run(f"--workdir {folder} -g 1 -- python {flags}")
