"""A member that starts warm is what it would have been cold, only sooner."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.model.job import MemberRef
from shoal.model.secret import SecretsOf, SecretValue
from tests.agent.rig import Rig, marked, patient_rig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

# Everything that a script could see of how it was started.
PROBE = '''
"""A probe."""
import json, os, resource, signal, stat, sys, threading
early = sorted(sys.modules)
import random
me = sys.modules["__main__"]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix, "cwd": os.getcwd(),
    "environ": {k: v for k, v in sorted(os.environ.items()) if k not in ("SHOAL_REF", "RANK")},
    "main": {k: repr(v) for k, v in sorted(vars(me).items())
             if k.startswith("__") and k not in ("__builtins__", "__loader__")},
    "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
    "builtins": type(__builtins__).__name__,
    "leader": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "parent": os.getppid(), "umask": os.umask(0o22), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "handlers": {n: repr(signal.getsignal(n)).split(" at ")[0]
                 for n in sorted(signal.valid_signals())},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    # Some builds of torch never close what they read of the CPU's caches under /sys.
    "fds": [fd for fd in sorted(os.listdir("/proc/self/fd"), key=int)
            if os.path.lexists(f"/proc/self/fd/{fd}")
            and not os.readlink(f"/proc/self/fd/{fd}").startswith("/sys/")],
    "stdin": os.readlink("/proc/self/fd/0"),
    "outputs": [os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in (1, 2)],
    "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding(),
                  sys.stdout.write_through, sys.stdout.isatty()],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource)
               if n.startswith("RLIMIT")},
    "oom": open("/proc/self/oom_score_adj").read(),
    "threads": threading.active_count(),
    "main thread": threading.current_thread() is threading.main_thread(),
    "ignored": [line for line in open("/proc/self/status") if line.startswith("SigIgn")],
}
unlike = {
    "random": random.random(), "rank": os.environ["RANK"], "ref": os.environ["SHOAL_REF"],
    "proc environ": {entry.partition("=")[0]: entry.partition("=")[2]
                     for entry in open("/proc/self/environ").read().split(chr(0)) if "=" in entry},
    "cmdline": open("/proc/self/cmdline").read(), "warm": "torch" in early,
}
import numpy
unlike["numpy"] = float(numpy.random.random())
print(json.dumps([seen, unlike]))
if os.environ["RANK"] == "0":
    import torch, time
    print("torch is loaded")
    time.sleep(600)
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "probe.py").write_text(PROBE)
    (folder / "beside.py").write_text("name = 'beside'\n")
    return folder


# A warm interpreter imports torch only with what others leave of the CPU.
IMPORTS_S = 480.0


class Warm:
    """A node with a warm interpreter, and what the probe saw when it started cold."""

    def __init__(self, node: Rig, work: Path) -> None:
        self.node = node
        self.work = work
        self.count = 0

    def start(
        self,
        *argv: str,
        rank: int = 1,
        env: dict[str, str] | None = None,
        secrets: tuple[SecretValue, ...] = (),
    ) -> MemberRef:
        self.count += 1
        ref = MemberRef("j1", self.count, rank)
        variables = {"RANK": str(rank), "PATH": os.environ["PATH"], **(env or {})}
        self.node.secrets[ref] = SecretsOf(ref, secrets)
        self.node.launch(
            ref,
            sys.executable,
            *argv,
            env=variables,
            workdir=str(self.work),
            secrets=tuple(f"{one.name}={one.variable}" for one in secrets),
        )
        return ref

    def script(self, text: str, *args: str, name: str = "script.py") -> MemberRef:
        (self.work / name).write_text(textwrap.dedent(text))
        return self.start(name, *args)

    def was_warm(self, ref: MemberRef) -> bool:
        return f"{ref} starts warm" in self.node.log()


@pytest.fixture(scope="module")
def warm(work: Path) -> Iterator[tuple[Warm, list[Any]]]:
    with patient_rig(OPERATOR_TOKEN="canary-of-the-operator") as node:
        made = Warm(node, work)
        cold = made.start("./probe.py", "--flag", "two words", rank=0)
        node.says(cold, "torch is loaded")
        assert not made.was_warm(cold)
        node.logs("is warm after", IMPORTS_S)
        yield made, json.loads(node.text(cold).splitlines()[0])


def test_a_script_cannot_tell_that_it_started_warm(warm: tuple[Warm, list[Any]]) -> None:
    made, (cold, cold_own) = warm
    first = made.start("./probe.py", "--flag", "two words", rank=1)
    second = made.start("./probe.py", "--flag", "two words", rank=2)
    seen = []
    for ref, rank in ((first, 1), (second, 2)):
        assert made.node.exit(ref).code == 0, made.node.text(ref)
        assert made.was_warm(ref)
        same, own = json.loads(made.node.text(ref))
        assert same == cold
        assert own["warm"] and not cold_own["warm"]
        assert (own["rank"], own["ref"]) == (str(rank), str(ref))
        assert own["proc environ"]["SHOAL_REF"] == str(ref), "its marks can be read from outside"
        assert own["proc environ"]["RANK"] == str(rank)
        assert "probe.py --flag two words" in own["cmdline"]
        seen.append(own)
    assert seen[0]["random"] != seen[1]["random"], "members must not draw the same numbers"
    assert seen[0]["numpy"] != seen[1]["numpy"]


ENDINGS = [
    "import sys; print('out'); sys.exit(3)",
    "import sys; sys.exit('a message')",
    "def f():\n    raise ValueError('wrong')\nf()",
    "raise KeyboardInterrupt",
    "def f(:\n    pass",
    "import no_such_module",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "import atexit; atexit.register(print, 'late'); print('early')",
    "import beside, sys; print(beside.name); raise SystemExit",
    "import sys; sys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno); 1 / 0",
    "import threading\nthreading.Timer(0.2, print, ['late']).start()\nprint('early')",
    "import multiprocessing as m\ndef f(x): return x + 1\n"
    "if __name__ == '__main__':\n    print(m.get_context('spawn').Pool(1).map(f, [1, 2]))",
    "import pickle\nclass C: pass\nprint(pickle.loads(pickle.dumps(C())).__class__)",
]


def test_ends_and_errors_are_those_of_a_cold_start(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    pairs = []
    for number, text in enumerate(ENDINGS):
        name = f"ending{number}.py"
        (made.work / name).write_text(text)
        pairs.append((text, made.start(name), made.start(name, env={"COLD": "1"})))
    for text, ref, other in pairs:
        ended, expected = made.node.exit(ref), made.node.exit(other)
        assert made.was_warm(ref) and not made.was_warm(other), text
        assert (ended.code, made.node.text(ref)) == (expected.code, made.node.text(other)), text


def test_no_warm_interpreter_gets_or_keeps_a_secret(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    (made.work / "secret.py").write_text("import os; print(len(os.environ['TOKEN']))")
    ref = made.start("secret.py", secrets=(SecretValue("token", b"canary-4471", "TOKEN"),))
    assert made.node.exit(ref).code == 0
    assert made.was_warm(ref)
    assert made.node.text(ref) == "11\n"
    zygotes = [pid for pid in marked(made.node.directory) if b"zygote.py" in read(pid, "cmdline")]
    assert zygotes
    for pid in zygotes:
        seen = memory(pid) + read(pid, "environ")
        assert b"canary-4471" not in seen
        assert b"canary-of-the-operator" not in seen


def read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def memory(pid: int) -> bytes:
    """The heap and the stack of a process, as far as they can be read."""
    found = b""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        for line in read(pid, "maps").decode().splitlines():
            if "[heap]" in line or "[stack]" in line:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                file.seek(begin)
                found += file.read(end - begin)
    return found


def test_modules_run_warm_too(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    package = made.work / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name)\n1 / 0\n"
    )
    ref = made.start("-m", "package.work", "x")
    other = made.start("-m", "package.work", "x", env={"COLD": "1"})
    assert made.node.exit(ref).code == made.node.exit(other).code == 1
    assert made.was_warm(ref) and not made.was_warm(other)
    assert made.node.text(ref) == made.node.text(other)


def test_a_script_with_an_interpreter_line_runs_warm(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    tool = made.work / "tool"
    tool.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:], sys.orig_argv)\n")
    tool.chmod(0o755)
    env = {"RANK": "1", "PATH": os.environ["PATH"]}
    texts = []
    for attempt, extra in ((901, {}), (902, {"COLD": "1"})):
        ref = MemberRef("j1", attempt, 0)
        made.node.launch(ref, "./tool", "a", env={**env, **extra}, workdir=str(made.work))
        assert made.node.exit(ref).code == 0
        assert made.was_warm(ref) == (not extra)
        texts.append(made.node.text(ref))
    assert texts[0] == texts[1]


def test_what_would_not_be_the_same_starts_cold(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    (made.work / "plain.py").write_text("print('done')\n")
    assert made.node.exit(warmed := made.start("plain.py")).code == 0
    assert made.was_warm(warmed)
    for argv, env in (
        (("plain.py",), {"PYTHONHASHSEED": "1"}),
        (("plain.py",), {"OMP_NUM_THREADS": "1"}),
        (("-X", "utf8", "plain.py"), {}),
        (("-c", "print('done')"), {}),
        (("-O", "plain.py"), {}),
    ):
        ref = made.start(*argv, env=env)
        assert made.node.exit(ref).code == 0
        assert made.node.text(ref) == "done\n"
        assert not made.was_warm(ref), argv
    hiding = made.work / "hiding"
    hiding.mkdir()
    (hiding / "numpy.py").write_text("print('my own numpy')\n")
    (hiding / "own.py").write_text("import numpy\n")
    ref = made.start("hiding/own.py")
    assert made.node.exit(ref).code == 0
    assert (made.node.text(ref), made.was_warm(ref)) == ("my own numpy\n", False)


def test_a_warm_member_is_stopped_and_swept_like_any_other(warm: tuple[Warm, list[Any]]) -> None:
    made, _ = warm
    ref = made.script(
        """
        import os, signal, subprocess, time
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", child.pid)
        time.sleep(600)
        """,
        name="stubborn.py",
    )
    made.node.says(ref, "ready")
    assert made.was_warm(ref)
    descendants = carrying(f"SHOAL_REF={ref}")
    assert len(descendants) == 3, "itself, what it started, and what left it by forking twice"
    made.node.stop(ref, grace_ms=200)
    assert made.node.exit(ref).code == 128 + signal.SIGKILL
    made.node.until(lambda: not carrying(f"SHOAL_REF={ref}"))


def test_when_the_warm_interpreter_dies_the_next_start_is_cold(
    warm: tuple[Warm, list[Any]],
) -> None:
    """The last test here: it takes what the others need."""
    made, _ = warm
    zygote = int(
        made.node.log().partition("starting a warm interpreter: process ")[2].split(",")[0]
    )
    os.kill(zygote, signal.SIGKILL)
    ref = made.script("print('well')")
    assert made.node.exit(ref).code == 0
    assert (made.node.text(ref), made.was_warm(ref)) == ("well\n", False)


def carrying(entry: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if entry.encode() + b"\0" in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found
