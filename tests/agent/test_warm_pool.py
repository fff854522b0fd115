"""When warm interpreters are made, given up and gone without, shown with a small stand-in that
looks like a heavy library from outside."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from shoal.agent.warm import pool
from shoal.agent.warm.pool import WarmPool
from shoal.agent.warm.rules import recipe, shadowed, wanted_modules
from shoal.model.commands import Prepare
from shoal.model.job import MemberRef
from tests.agent.rig import Rig, marked, patient_rig

HEAVY = """
import mmap, os
with open(os.path.join(os.path.dirname(__file__), "lib.so"), "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
made_by = os.getpid()
"""
SCRIPT = """
import os, sys, time
import torch, numpy
print("warm" if torch.made_by != os.getpid() else "cold")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with a `torch` and a `numpy` of our own."""
    folder = tmp_path / "site-packages"
    for name in ("torch", "numpy"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(HEAVY)
        (folder / name / "lib.so").write_bytes(b"x" * 4096)
    (tmp_path / "script.py").write_text(SCRIPT)
    return folder


def start(node: Rig, site: Path, attempt: int, **env: str) -> MemberRef:
    ref = MemberRef("j1", attempt, 0)
    over = str(site.parent / f"over{attempt}")
    variables = {"PYTHONPATH": str(site), **env}
    script = str(site.parent / "script.py")
    node.launch(ref, sys.executable, script, over, env=variables)
    return ref


def finish(node: Rig, site: Path, ref: MemberRef) -> str:
    (site.parent / f"over{ref.attempt}").touch()
    assert node.exit(ref).code == 0, node.text(ref)
    return node.text(ref).strip()


def test_a_library_that_changed_on_disk_is_loaded_anew(site: Path) -> None:
    with patient_rig() as node:
        first = start(node, site, 1)
        node.logs("is warm after")
        second = start(node, site, 2)
        assert finish(node, site, second) == "warm"
        with (site / "torch" / "__init__.py").open("a") as file:
            file.write("# a newer version\n")
        third = start(node, site, 3)
        assert finish(node, site, third) == "cold"
        assert "torch/__init__.py has changed" in node.log()
        node.until(lambda: node.log().count("is warm after") == 2)
        fourth = start(node, site, 4)
        assert finish(node, site, fourth) == "warm", "from one with the newer version"
        assert finish(node, site, first) == "cold"


def test_a_module_that_starts_threads_is_left_out(site: Path) -> None:
    with (site / "numpy" / "__init__.py").open("a") as file:
        file.write("import threading, time\n")
        file.write("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n")
    with patient_rig() as node:
        start(node, site, 1)
        node.logs("numpy starts threads")
        node.logs("is warm after")
        second = start(node, site, 2)
        assert finish(node, site, second) == "warm", "torch was held all the same"
        third = start(node, site, 3)
        node.says(third, "warm")
        three = marked(node.directory)
        assert len(three) == 3, "two members and the interpreter"
        groups = [Path(f"/proc/{pid}/autogroup") for pid in three]
        if groups[0].exists():  # else the kernel does not share CPUs between sessions
            nice = sorted(int(group.read_text().split()[-1]) for group in groups)
            assert nice[0] == nice[1] < nice[2] == 19, "only the interpreter's session is modest"
        os.kill(json.loads((node.directory / "agent.json").read_text())["pid"], signal.SIGKILL)
        node.keeper.wait(120)
        assert marked(node.directory) == [], "it dies with its agent, however that dies"


def test_there_are_never_more_than_two(site: Path) -> None:
    with patient_rig() as node:
        for attempt in (1, 2, 3):
            start(node, site, attempt, KIND=str(attempt))
        node.until(lambda: node.log().count("is warm after") == 2)
        warm = [start(node, site, 10 + kind, KIND=str(kind)) for kind in (1, 2, 3)]
        kinds = [finish(node, site, ref) for ref in warm]
        assert sorted(kinds) == ["cold", "warm", "warm"]


def test_no_interpreter_is_kept_when_memory_is_short_or_nobody_needs_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"PYTHONPATH": str(site)}
    argv = (sys.executable, str(site.parent / "script.py"))
    found = recipe(sys.executable, argv, env, str(tmp_path))
    assert found is not None
    kept = WarmPool(str(tmp_path))
    monkeypatch.setattr(pool, "available_memory_mb", lambda: pool.START_MEMORY_MB - 1)
    kept.want(found, ("torch",))
    assert not kept.pids(), "not even begun"
    monkeypatch.setattr(pool, "available_memory_mb", lambda: pool.START_MEMORY_MB + 1)
    for shortage in ("available_memory_mb", "UNUSED_S"):
        kept.want(found, ("torch",))
        (pid,) = kept.pids()
        kept.tend()
        assert kept.pids() == {pid}
        with monkeypatch.context() as moment:
            moment.setattr(pool, shortage, (lambda: 1) if shortage.islower() else -1.0)
            kept.tend()
        assert not kept.pids()
        os.waitpid(pid, 0)


def test_which_starts_can_be_warm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "packed.py").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    python = sys.executable
    where = str(tmp_path)

    def kind(*argv: str, **env: str) -> str:
        found = recipe(python, (python, *argv), env, where)
        return "cold" if found is None else found.target

    assert kind("train.py", "--x") == "train.py"
    assert kind("-u", "train.py") == "train.py"
    assert kind("-m", "some.module") == "some.module"
    for argv in (
        ("packed.py",),
        ("none.py",),
        ("-c", "1"),
        (),
        ("-",),
        ("-m",),
        ("-i", "train.py"),
    ):
        assert kind(*argv) == "cold", argv
    assert kind("train.py", PYTHONINSPECT="1") == "cold"
    assert recipe("/bin/sh", ("sh", "train.py"), {}, where) is None


def test_only_what_shoal_sets_may_differ_between_starts_from_one_interpreter(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("pass\n")

    def key(where: Path = tmp_path, **env: str) -> str:
        found = recipe(sys.executable, ("python", str(tmp_path / "train.py")), env, str(where))
        assert found is not None
        return found.key

    other = tmp_path / "other"
    other.mkdir()
    assert key(RANK="0", SHOAL_ATTEMPT="1") == key(RANK="1", SHOAL_ATTEMPT="2", WORLD_SIZE="4")
    assert key(LANG="C") != key(LANG="C.UTF-8")
    assert key() == key(other)
    assert key(PYTHONPATH="lib") != key(other, PYTHONPATH="lib"), "it is relative to the place"
    assert key(PYTHONPATH="/lib") == key(other, PYTHONPATH="/lib")


def test_what_to_preload_is_read_from_the_maps() -> None:
    line = "7f00-7f01 r-xp 00000000 fe:00 1 /x/lib/python3.11/site-packages/{}\n"
    torch = line.format("torch/lib/libtorch_cpu.so")
    numpy = line.format("numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so")
    assert wanted_modules(numpy) == (), "not worth it alone"
    assert "numpy" in wanted_modules(numpy + torch)
    assert "torch._dynamo" in wanted_modules(torch)
    assert "numpy" not in wanted_modules(torch)


def test_files_beside_a_script_that_hide_what_is_loaded_are_found(tmp_path: Path) -> None:
    names = frozenset(("numpy", "torch"))
    (tmp_path / "train.py").touch()
    assert shadowed(str(tmp_path), names) == ""
    (tmp_path / "numpy").mkdir()
    assert shadowed(str(tmp_path), names) == "numpy"


def test_the_memory_of_a_container_counts_where_it_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CONTAINER", tmp_path)
    alone = pool.available_memory_mb()
    assert alone > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert pool.available_memory_mb() > 0
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{70 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {20 << 20}\n")
    assert pool.available_memory_mb() == 50


def test_a_node_that_was_told_of_a_job_is_warm_before_its_first_member(site: Path) -> None:
    with patient_rig() as node:
        argv = (sys.executable, str(site.parent / "script.py"))
        env = {"PYTHONPATH": str(site)}
        incarnation = node.ask().incarnation
        node.order(
            Prepare(node="n1", incarnation=incarnation, job="j1", argv=argv, env=env, workdir="")
        )
        node.logs("is warm after")
        assert node.ask().prepared == ("j1",)
        first = start(node, site, 1)
        assert finish(node, site, first) == "warm"
