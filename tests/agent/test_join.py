"""What comes before every member's program: the group is joined, and it dies with the agent."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.agent.confine import limits
from shoal.agent.confine.limits import joining

FOLDER = Path(limits.__file__).parent
MACHINES = {"x86_64": 62, "aarch64": 183}  # as in the header of a program
BY_SHELL = pytest.param(False, id="shell and setpriv")


class Entrances:
    """Of a group; files do, because a member writes there and no more."""

    def __init__(self, *files: Path) -> None:
        self.entrances = [str(file) for file in files]


@pytest.fixture(params=[pytest.param(True, id="join"), BY_SHELL])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(limits, "JOIN", "")
        monkeypatch.setattr(limits, "DYING", ["/usr/bin/setpriv", "--pdeathsig", "KILL", "--"])
    return bool(request.param)


def before(*files: Path, words: tuple[str, ...] = ()) -> list[str]:
    return joining(Entrances(*files), {}, words)  # type: ignore[arg-type]


def test_both_programs_are_built_from_the_source_that_is_beside_them() -> None:
    source = hashlib.sha256((FOLDER / "join.c").read_bytes()).hexdigest().encode()
    for machine, number in MACHINES.items():
        program = FOLDER / f"join-{machine}"
        content = program.read_bytes()
        assert content[:4] == b"\x7fELF" and content[18] == number, machine
        assert b"source " + source in content, f"{program.name} is older than join.c: make join"
        assert program.stat().st_mode & stat.S_IXOTH


def test_this_machine_uses_its_own() -> None:
    assert Path(limits.JOIN).name in {f"join-{machine}" for machine in MACHINES}


def test_it_joins_every_group_and_becomes_the_program(way: bool, tmp_path: Path) -> None:
    groups = [tmp_path / "memory", tmp_path / "cpu"]
    for group in groups:
        group.write_text("")
    argv = [*before(*groups), "/bin/sh", "-c", 'echo "$PPID $1"', "sh", "a  b"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.getpid()} a  b\n", "no process stays in between"
    assert [group.read_text().strip() for group in groups] == ["0", "0"]


def test_the_program_sees_the_environment_that_was_given(way: bool, tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.write_text("")
    env = {"PATH": "/usr/bin:/bin", "A": "1"}
    argv = [*before(group), "/usr/bin/env"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    assert sorted(done.stdout.splitlines()) == ["A=1", "PATH=/usr/bin:/bin"]


def test_nothing_starts_outside_of_a_group_that_cannot_be_joined(way: bool, tmp_path: Path) -> None:
    argv = [*before(tmp_path / "none" / "group"), "/bin/echo", "outside"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (126, "")
    assert "none/group" in done.stderr


def test_a_program_that_cannot_start_says_so(way: bool, tmp_path: Path) -> None:
    for path, code in ((tmp_path / "nothing", 127), (tmp_path, 126)):
        argv = [*before(), str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, str(path) in done.stderr) == (code, True)


def test_no_signal_of_the_c_library_stays_ignored() -> None:
    shown = ["/bin/sh", "-c", "grep SigIgn /proc/self/status"]
    read, write = os.pipe()
    for words in (shown, [*before(), *shown]):
        streams = [(os.POSIX_SPAWN_DUP2, write, 1)]
        os.waitpid(os.posix_spawn(words[0], words, os.environ, file_actions=streams), 0)
    os.close(write)
    with open(read) as file:
        spawned, joined = (int(line.split()[1], 16) >> 31 & 3 for line in file)
    if not spawned:
        pytest.skip("this C library leaves none ignored in what it spawns")
    assert not joined


def test_a_script_without_a_first_line_is_the_shells(way: bool, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1"\n')
    script.chmod(0o700)
    argv = [*before(), str(script), "hello"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "hello\n"


@pytest.mark.parametrize("words", [(), ("/usr/bin/env", "B=2")], ids=["plain", "words between"])
def test_it_dies_with_the_agent(way: bool, words: tuple[str, ...]) -> None:
    member = [*before(words=words), "/bin/sleep", "600"]
    script = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)"
    )
    agent = subprocess.Popen([sys.executable, "-c", script, *member], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"/bin/sleep\x00600\x00")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    agent.stdout.close()
    until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
