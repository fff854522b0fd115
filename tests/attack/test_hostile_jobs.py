"""A tenant whose jobs attack the cluster and the jobs of another tenant, with real processes.

Each test names what stops the attack. Printing without end is in test_printing_neighbor.py, and
attacks over the network are in test_stranger.py, test_connections.py and test_tls.py.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.client import ShoalError
from shoal.model.job import JobSpec, MemberRef
from tests.live.cluster import Live, live_cluster
from tests.needs import need_cgroups, need_root

PROCESSES_MAX = 60
GOOD, EVIL = 61_911, 61_912  # Unix users of the two tenants
DEVICES = f"/dev/shoal-test-{os.getpid()}-gpu"
CANARY = "only the agent may write here\n"

# Evil's scripts begin with this: `told` collects what happened to each attempt.
PRELUDE = """
import ctypes, errno, json, os, signal, socket, subprocess, sys, time
told = {}
def tries(name, act):
    try:
        told[name] = repr(act())
    except OSError as error:
        told[name] = errno.errorcode.get(error.errno, "?")
    except BaseException as error:
        told[name] = type(error).__name__
facts = json.loads(os.environ["FACTS"])
"""
# The victim: its environment, its memory, its files and its checkpoint hold a word of its own.
VICTIM = """
import os, time
word = "its-" + "word"
memory = (word * 1000).encode()
for folder in ("/tmp", os.environ["SHOAL_SCRATCH"], os.environ["SHOAL_CHECKPOINT_DIR"]):
    with open(folder + "/mine", "w") as file:
        file.write(word)
print(word, os.environ["SHOAL_SECRETS"], flush=True)
time.sleep(1000)
"""
# Processes that leave their session, their parents, their environment and their namespace.
LEAVES = """
import os, subprocess, sys, time
for way in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for handle in range(3):
                os.close(handle)
            if way == 2:
                os.execvp("unshare", ["unshare", "-Ur", "sleep", "1000"])
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        os._exit(0)
    os.wait()
time.sleep(0.3)
print("gone", flush=True)
"""


class Scene:
    """A cluster with two tenants, and a victim that runs."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.victim = self.run("good", VICTIM, secrets=("key",))
        assert live.wait(self.victim, "running") == "running"
        until(lambda: "its-word" in live.output(self.victim), more=lambda: self.view(self.victim))
        self.member = live.home.node("n1") / "members" / f"{self.victim}.1.0"
        self.pid = next(pid for pid in owned(GOOD) if b"its-" in cmdline(pid))

    def run(self, tenant: str, script: str, **fields: Any) -> str:
        spec = self.live.spec(sys.executable, "-c", script, tenant=tenant, **fields)
        return self.live.client.submit(spec).id

    def attack(self, script: str, facts: object = None, **fields: Any) -> dict[str, str]:
        """What evil's job prints last: how each of its attempts ended."""
        env = {"FACTS": json.dumps(facts)}
        script = f"{PRELUDE}{script}\nprint(json.dumps(told))\n"
        job = self.run("evil", script, env=env, **fields)
        state = self.live.wait(job)
        assert state == "succeeded", (self.view(job), self.live.output(job))
        found: dict[str, str] = json.loads(self.live.output(job).splitlines()[-1])
        assert found
        return found

    def view(self, job: str) -> str:
        return self.live.client.job(job).why


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    need_root()
    need_cgroups()
    for number, minor in enumerate((5, 7)):  # as /dev/zero and /dev/full
        os.mknod(f"{DEVICES}{number}", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.chmod(f"{DEVICES}{number}", 0o666)
    os.environ["SHOAL_GPU_DEVICES"] = f"{DEVICES}*"
    try:
        with live_cluster(nodes=1, gpus=2) as live:
            policy = live.client.policy()
            live.client.set_policy(msgspec.structs.replace(policy, processes_max=PROCESSES_MAX))
            live.client.add_tenant("good", uid=GOOD)
            live.client.add_tenant("evil", uid=EVIL)
            live.client.set_secret("key", b"its-secret", tenant="good")
            yield Scene(live)
    finally:
        del os.environ["SHOAL_GPU_DEVICES"]
        for number in range(2):
            os.unlink(f"{DEVICES}{number}")


def owned(uid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found.append(int(name))
            except OSError:
                continue
    return found


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def on_terminal(*words: str) -> bytes:
    """What a command of ours prints on a terminal."""
    master, slave = pty.openpty()
    shoal = str(Path(sys.executable).with_name("shoal"))
    subprocess.run([shoal, *words], stdout=slave, stderr=slave, check=True, timeout=60)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while data := os.read(master, 65_536):
            shown += data
    os.close(master)
    return shown


def only(told: dict[str, str], *allowed: str) -> None:
    """Every attempt ended in one of these ways."""
    assert set(told.values()) <= set(allowed), told


def test_files_of_others_cannot_be_read(scene: Scene) -> None:
    """Stopped by: Unix users, and folders of the cluster that no other user may enter."""
    home, member = scene.live.home, scene.member
    secrets = scene.live.output(scene.victim).split()[1]
    paths = [
        *(home.token, home.database, home.logs, home.config, home.path / "secrets.key"),
        *(home.logs / scene.victim / "1.0.log", home.checkpoints / scene.victim / "mine"),
        *(member / "output", member / "scratch" / "mine", member / "tmp" / "mine"),
        *(home.node("n1") / "tenants" / str(GOOD), home.node("n1") / "agent.log"),
        *(Path("/root"), Path(secrets) / "key", Path(secrets).parent / f"shm-{GOOD}"),
    ]
    there = [str(path) for path in paths if path.exists()]
    assert len(there) > 12, "the attack is on files that exist"
    told = scene.attack(
        """
for path in facts:
    tries(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
    if not path.startswith("/dev/shm/"):  # there it would write to its own
        tries(path + " to write", lambda: open(path, "a").close())
tries("/tmp/mine", lambda: open("/tmp/mine").read())
""",
        there,
    )
    if told["/root"] != "EACCES":  # covered by a folder that holds Python alone, if it is there
        assert not {".ssh", ".bashrc", ".shoal"} & set(ast.literal_eval(told.pop("/root")))
    only(told, "EACCES", "ENOENT", "EISDIR", "EROFS", "EPERM")


def test_environment_and_memory_of_others_cannot_be_read(scene: Scene) -> None:
    """Stopped by: Unix users; the kernel asks for the right to trace a process."""
    agent = scene.live.agent_pid("n1")
    told = scene.attack(
        """
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
def attach(pid):
    if libc.ptrace(16, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
for pid in facts:
    for name in ("environ", "mem", "maps", "stack"):
        tries(f"{name} {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    for name in ("root", "cwd", "fd", "exe"):
        tries(f"{name} {pid}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    tries(f"trace {pid}", lambda: attach(pid))
    tries(f"file {pid}", lambda: os.pidfd_open(pid) and open(f"/proc/{pid}/fd/1"))
""",
        [scene.pid, agent, scene.live.controller_pid(), 1],
    )
    only(told, "EACCES", "EPERM", "ENOENT")


def test_sockets_of_the_cluster_answer_to_nobody_else(scene: Scene) -> None:
    """Stopped by: folders that no other user may enter, the token, and a beat's sender, for whom
    the kernel vouches."""
    live = scene.live
    facts = {
        "paths": [str(live.home.socket), str(live.home.node("n1") / "agent.sock")],
        "url": live.client.url,
        "victim": str(MemberRef(scene.victim, 1, 0)),
    }
    told = scene.attack(
        """
import urllib.error, urllib.request
for path in facts["paths"]:
    tries(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
def ask(path):
    try:
        return urllib.request.urlopen(facts["url"] + path).status
    except urllib.error.HTTPError as error:
        raise OSError(errno.EACCES if error.code == 401 else error.code, "refused")
for path in ("/v1/jobs", "/v1/status", "/v1/nodes"):
    tries(path, lambda: ask(path))
beats = os.environ["SHOAL_BEATS"]
os.environ["SHOAL_REF"] = facts["victim"]
from shoal.model.progress import Beat
import msgspec
beat = Beat(ref=facts["victim"], step=12345, steps=12345)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
    link.sendto(msgspec.msgpack.encode(beat), b"\\0" + beats.encode())
""",
        facts,
    )
    only(told, "EACCES", "ENOENT", "ECONNREFUSED")
    assert live.client.job(scene.victim).progress is None, "a forged beat counts for nothing"


def test_processes_of_others_cannot_be_killed(scene: Scene) -> None:
    """Stopped by: Unix users. A signal to every process reaches the sender's own user alone."""
    live = scene.live
    agent = live.agent_pid("n1")
    keeper = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    pids = [agent, keeper, live.controller_pid(), scene.pid, 1, os.getpid()]
    told = scene.attack("for pid in facts: tries(str(pid), lambda: os.kill(pid, 9))", pids)
    only(told, "EPERM")
    job = scene.run("evil", "import os; os.kill(-1, 9)")
    live.wait(job)
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_fork_bomb_ends_at_the_limit_and_leaves_nothing(scene: Scene) -> None:
    """Stopped by: the cgroup's limit on processes, and its end with all that is in it."""
    job = scene.run("evil", "import os\nwhile True: os.fork()")
    until(lambda: scene.live.client.job(job).state != "waiting")
    other = scene.run("good", "print('well')")
    assert scene.live.wait(other) == "succeeded", "beside the bomb"
    assert scene.live.wait(job) == "failed"
    assert "more than its 60 processes and threads (processes)" in scene.view(job)
    until(lambda: not owned(EVIL))


def test_memory_beyond_the_limit_ends_the_job_and_nobody_else(scene: Scene) -> None:
    """Stopped by: the cgroup's limit on memory, with files in memory counted."""
    fill = "open('/dev/shm/big', 'wb').write(bytes(200 << 20))"
    for script in ("bytearray(300 << 20)", fill):
        job = scene.run("evil", script, memory_mb=100)
        assert scene.live.wait(job) == "failed"
        why = "it used more than its 100 MB of memory and was ended (memory)"
        assert why in scene.view(job)
        assert why in scene.live.output(job)
    assert os.path.exists(f"/proc/{scene.pid}")


def test_what_a_job_writes_goes_with_it(scene: Scene) -> None:
    """A disk has no limit for each user here, but scratch and /tmp do not stay."""
    job = scene.run(
        "evil",
        "import os\nfor place in ('/tmp', os.environ['SHOAL_SCRATCH']):\n"
        "    open(place + '/big', 'wb').write(bytes(1 << 20))\n"
        "    os.makedirs(place + '/a/b'); os.chmod(place + '/a', 0)\n"
        "assert os.path.samefile('/tmp', '/var/tmp')",
    )
    assert scene.live.wait(job) == "succeeded", scene.live.output(job)
    member = scene.live.home.node("n1") / "members" / f"{job}.1.0"
    until(lambda: not member.exists())


@pytest.mark.parametrize("tenant", ["evil", ""])
def test_a_gpu_that_was_not_given_cannot_be_opened(scene: Scene, tenant: str) -> None:
    """Stopped by: the device cgroup, for root's jobs as well. CUDA counts what it can open."""
    script = f"""
import errno, os, stat
def opens(path):
    try:
        return os.close(os.open(path, os.O_RDONLY)) or "open"
    except OSError as error:
        return errno.errorcode[error.errno]
print(*(opens("{DEVICES}%d" % gpu) for gpu in (0, 1)), os.environ["CUDA_VISIBLE_DEVICES"])
if os.getuid():
    try:
        os.mknod("/tmp/gpu", stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    fields: dict[str, Any] = {"tenant": tenant} if tenant else {}
    spec = scene.live.spec(sys.executable, "-c", script, gpus=1, **fields)
    holder = scene.live.run("sleep 1000", gpus=1)  # it gets the first
    assert scene.live.wait(holder, "running") == "running"
    job = scene.live.client.submit(spec).id
    assert scene.live.wait(job) == "succeeded", scene.live.output(job)
    scene.live.client.cancel(holder)
    scene.live.wait(holder)
    assert scene.live.output(job).split()[:3] == ["EPERM", "open", "0"]
    assert scene.live.output(job).split()[3:] == (["EPERM"] if tenant else [])


def test_a_job_that_ignores_the_request_to_end_is_killed(scene: Scene) -> None:
    """Stopped by: SIGKILL to its cgroup when the grace time is over."""
    ignore = "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\n"
    job = scene.run("evil", f"{ignore}print('deaf', flush=True); time.sleep(1000)", stop_grace_ms=0)
    until(lambda: "deaf" in scene.live.output(job))
    scene.live.client.cancel(job)
    assert scene.live.wait(job) == "cancelled"
    until(lambda: not owned(EVIL))


def test_nothing_outlives_its_job(scene: Scene) -> None:
    """Stopped by: the cgroup, which no session, fork, namespace or name leaves."""
    job = scene.run("evil", LEAVES)
    assert scene.live.wait(job) == "succeeded", scene.live.output(job)
    assert scene.live.output(job) == "gone\n"
    until(lambda: not owned(EVIL), more=lambda: [cmdline(pid) for pid in owned(EVIL)])


def test_no_program_gives_a_job_more_rights(scene: Scene) -> None:
    """Stopped by: no_new_privs."""
    folder = Path(f"/opt/shoal-test-{os.getpid()}")
    folder.mkdir(mode=0o755)
    try:
        program = shutil.copy("/usr/bin/id", folder / "id")
        os.chmod(program, 0o4755)
        told = scene.attack(
            "tries('id', lambda: subprocess.check_output([facts, '-u']).decode().strip())\n"
            "tries('su', lambda: subprocess.check_call(['su', '-c', 'true'], stderr=-3))\n"
            "tries('setuid', lambda: os.setuid(0))",
            str(program),
        )
    finally:
        shutil.rmtree(folder)
    assert told == {"id": repr(str(EVIL)), "su": "CalledProcessError", "setuid": "EPERM"}


def test_mounts_of_its_own_show_a_job_nothing_that_is_covered(scene: Scene) -> None:
    """Stopped by: mounts of another namespace cannot be taken apart, and Unix users below them."""
    told = scene.attack(
        """
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *words):
    if getattr(libc, name)(*words) != 0:
        raise OSError(ctypes.get_errno(), name)
tries("umount", lambda: call("umount2", b"/tmp", 2))
tries("chroot", lambda: os.chroot("/tmp"))
uid = os.getuid()
call("unshare", 0x10000000 | 0x00020000)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
for place in ("/tmp", "/dev/shm", facts["cover"]):
    tries("umount " + place, lambda: call("umount2", place.encode(), 2))
os.mkdir("/tmp/all")
tries("bind", lambda: call("mount", b"/", b"/tmp/all", None, 4096, None))
libc.mount(b"/", b"/tmp/all", None, 4096 | 16384, None)
for path in (facts["token"], "/tmp/all" + facts["token"], "/proc/1/root" + facts["token"]):
    tries(path, lambda: open(path).read())
""",
        {"token": str(scene.live.home.token), "cover": "/root"},
    )
    only(told, "EPERM", "EINVAL", "EACCES", "ENOENT")


def test_a_job_inherits_no_open_file(scene: Scene) -> None:
    """Stopped by: all that the agent and the launcher hold is closed before the program starts."""
    listed = (
        "for n in os.listdir('/proc/self/fd'): tries(n, lambda: os.readlink(f'/proc/self/fd/{n}'))"
    )
    told = scene.attack(listed)
    assert told.pop("0") == repr("/dev/null")
    assert told.pop("1").endswith("/output'") and told.pop("2").endswith("/output'")
    assert len(told) == 1, f"the listing itself, and nothing else: {told}"


def test_the_agent_follows_no_link_that_a_job_has_made(scene: Scene, tmp_path: Path) -> None:
    """Stopped by: the agent writes only where no member can."""
    canary = tmp_path / "canary"
    canary.write_text(CANARY)
    canary.chmod(0o600)
    told = scene.attack(
        """
places = [os.environ["SHOAL_SCRATCH"], os.environ["SHOAL_CHECKPOINT_DIR"], os.environ["HOME"],
          "/tmp", "/dev/shm"]
for place in places:
    for name in ("output", "exit", ".exit", "secrets", ".writable", "mine", "tmp", "scratch"):
        if not os.path.lexists(place + "/" + name):
            os.symlink(facts, place + "/" + name)
    folder = os.path.dirname(place)
    tries("replace " + place, lambda: os.rename(place, folder + "/other"))
    tries("link beside " + place, lambda: os.symlink(facts, folder + "/exit"))
""",
        str(canary),
    )
    only(told, "EPERM", "EACCES", "EROFS", "EBUSY", "EXDEV")
    assert canary.read_text() == CANARY and canary.stat().st_uid == 0


def test_a_link_in_shared_memory_does_not_lead_the_launcher_away(
    scene: Scene, tmp_path: Path
) -> None:
    """Stopped by: the launcher follows no link when it makes the mounts of the next member."""
    scene.live.client.set_secret("mine", b"secret", tenant="evil")
    victim = tmp_path / "etc"
    victim.mkdir()
    name = Path(scene.live.output(scene.victim).split()[1]).parent.name
    stays = scene.run(
        "evil",
        f"import os, time\nos.symlink({str(victim)!r}, '/dev/shm/{name}')\n"
        "print('linked', flush=True); time.sleep(1000)",
    )
    until(lambda: "linked" in scene.live.output(stays))
    job = scene.run("evil", "print(1)", secrets=("mine",))
    assert scene.live.wait(job) == "failed"
    assert "Not a directory" in scene.view(job)
    assert not list(victim.iterdir())
    scene.live.client.cancel(stays)
    scene.live.wait(stays)
    job = scene.run("evil", "import os; print(os.listdir('/dev/shm'))")
    assert scene.live.wait(job) == "succeeded"
    assert scene.live.output(job) == "[]\n", "what was in memory went with the last member"


def test_escapes_reach_no_terminal_through_names_and_reasons(scene: Scene) -> None:
    """Stopped by: the pattern of names, reasons that hold printable characters alone, and `shoal
    logs`, which leaves only colors in what it prints on a terminal."""
    named = JobSpec(command=("true",), name="\x1b]0;owned\x07", tenant="evil")
    with pytest.raises(ShoalError, match="name"):
        scene.live.client.submit(named)
    job = scene.run("evil", "print('\\x1b[2J\\x1b]52;c;AAAA\\x07 bye \\u202e\\x9b31m'); exit(3)")
    assert scene.live.wait(job) == "failed"
    why = scene.view(job)
    assert "bye" in why and all(character.isprintable() for character in why), repr(why)
    shown = on_terminal("logs", job, "--home", str(scene.live.home.path))
    assert b"bye" in shown
    assert not any(escape in shown for escape in (b"\x1b[2J", b"\x1b]52", b"\x9b", b"\x07")), shown


def test_the_node_is_well_and_the_victim_lives(scene: Scene) -> None:
    """Last: after all this, nothing is left of the attacker, and the victim never noticed."""
    assert os.path.exists(f"/proc/{scene.pid}")
    assert scene.live.client.job(scene.victim).state == "running"
    until(lambda: not owned(EVIL))
    assert [node.state for node in scene.live.client.nodes()] == ["ready"]
    os.kill(scene.pid, signal.SIGKILL)
