"""Members of tenants that are kept apart, on a node whose agent is root."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.agent.confine.launcher import Bound, Covered, Mounts, Order, Shown, mounts, steps
from shoal.agent.confine.limits import renumbered, unenforced
from shoal.agent.confine.tenant import Binding
from shoal.agent.inherited import for_tenant
from shoal.machine.cgroups import Cgroups
from shoal.machine.exits import MEMBERS
from shoal.model.commands import Acknowledge
from shoal.model.job import MemberRef
from shoal.model.node import unenforced_lines
from tests.agent.rig import WITHOUT_JOIN, Rig, rig, rig_of
from tests.needs import need_root

UID = 61_901
ME = MemberRef("j1", 1, 0)
LOOK = """
import json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
    "privileges": int(status["NoNewPrivs"]), "caps": int(status["CapEff"], 16),
    "files": sorted(os.listdir("/proc/self/fd")), "tmp": os.listdir("/tmp"),
    "cwd": os.getcwd(), "env": dict(os.environ),
    "limits": [resource.getrlimit(which) for which in (4, 7)],
    "home": [os.stat(os.environ["HOME"]).st_uid, oct(os.stat(os.environ["HOME"]).st_mode)],
}))
open("/tmp/mine", "w"); open(os.environ["SHOAL_SCRATCH"] + "/mine", "w")
open(os.environ["SHOAL_CHECKPOINT_DIR"] + "/mine", "w"); open("/dev/stderr", "a").write("said")
"""


def test_the_first_folder_that_the_user_may_not_enter_is_covered() -> None:
    shown = [
        Shown("/root/.shoal/nodes/n1/members/j1/scratch", "/x/scratch", "/root", writable=True),
        Shown("/root/.pyenv/3.11", "/root/.pyenv/3.11.7", "/root"),
        Shown("/usr/lib/python3", "/usr/lib/python3"),
        Shown("/tmp/home/packages/a", "/tmp/home/packages/a", "/tmp/home"),
        Shown("/tmp/home/packages/a/src", "/tmp/home/packages/a/src", "/tmp/home"),
    ]
    assert mounts(shown, {"/tmp": "/x/tmp"}, {"/dev/gpu1": "/x/none"}) == Mounts(
        (Bound("/x/tmp", "/tmp"),),
        (Covered("/root"),),
        (
            Bound("/root/.pyenv/3.11.7", "/root/.pyenv/3.11", writable=False),
            Bound("/x/scratch", "/root/.shoal/nodes/n1/members/j1/scratch"),
            Bound("/tmp/home/packages/a", "/tmp/home/packages/a", writable=False),
            Bound("/x/none", "/dev/gpu1", file=True),
        ),
    )


def test_of_two_barriers_on_one_way_the_outer_one_is_covered() -> None:
    shown = [Shown("/a/b/c/d", "/a/b/c/d", "/a/b"), Shown("/a/e", "/a/e", "/a")]
    assert mounts(shown, {}, {}).covered == (Covered("/a"),)


def test_below_tmp_the_first_folder_is_covered_in_the_members_own_tmp() -> None:
    shown = [
        Shown("/tmp/home/n1/j1/scratch", "/tmp/home/n1/j1/scratch"),
        Shown("/tmp/python", "/tmp/python"),
        Shown("/tmp/other/a", "/tmp/other/a"),
    ]
    found = mounts(shown, {"/tmp": "/x/tmp"}, {}, (), ("/tmp/home", "/tmp/python"))
    assert found.covered == (Covered("/tmp/home"),)
    assert [one.path for one in found.bound] == sorted(one.path for one in shown)


def test_the_operators_account_does_not_reach_a_tenant() -> None:
    env = {
        "PATH": "/root/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/root/lib",
        "https_proxy": "http://proxy:3128",
        "NCCL_DEBUG": "INFO",
    }
    assert for_tenant(env, "/home/a", "a", lambda path: not path.startswith("/root")) == {
        "HOME": "/home/a",
        "USER": "a",
        "LOGNAME": "a",
        "SHELL": "/bin/sh",
        "TORCHINDUCTOR_CACHE_DIR": "/home/a/.cache/torchinductor",
        "PATH": "/usr/bin",
        "https_proxy": "http://proxy:3128",
        "NCCL_DEBUG": "INFO",
    }


@pytest.fixture(scope="module", params=["", WITHOUT_JOIN], ids=["join", "python"])
def node(request: pytest.FixtureRequest) -> Iterator[Rig]:
    need_root()
    with rig_of(0, {}, script=request.param) as made:
        yield made


def test_a_member_runs_as_its_tenants_user_with_folders_of_its_own(node: Rig) -> None:
    node.launch(ME, sys.executable, "-c", LOOK, uid=UID, tenant="physics")
    exit_ = node.exit(ME)
    assert exit_.code == 0, node.text(ME)
    line, _, rest = node.text(ME).partition("\n")
    seen = json.loads(line)
    assert seen["ids"] == [UID, UID, UID, []]
    assert seen["privileges"] == 1 and seen["caps"] == 0
    assert seen["files"] == ["0", "1", "2", "3"], "3 is the folder that it lists"
    ours = Path(sys.prefix).parts[2] if sys.prefix.startswith("/tmp/") else None  # a clone in /tmp
    strange = [one for one in seen["tmp"] if not one.startswith("shoal-agent-") and one != ours]
    assert strange == []
    assert seen["limits"][0] == [0, 0] and seen["limits"][1][1] <= 65_536
    assert seen["home"] == [UID, "0o40700"]
    assert seen["env"]["USER"] == "physics" and "XDG_CACHE_HOME" not in seen["env"]
    assert rest == "said"
    kept = node.directory / "kept" / "j1"
    assert os.stat(kept).st_uid == os.stat(kept / "mine").st_uid == UID
    assert os.stat(kept).st_mode & 0o777 == 0o700
    assert not os.path.exists("/tmp/mine")


LEAVE = """
import os, sys
for folder in (os.environ["SHOAL_SCRATCH"], os.environ["SHOAL_CHECKPOINT_DIR"], "/tmp"):
    seen = os.stat(folder)
    ours = sys.prefix.split("/")[2]  # a clone in /tmp
    print(seen.st_ino, seen.st_uid, oct(seen.st_mode), sorted({*os.listdir(folder)} - {ours}))
    if "file" in sys.argv:
        open(folder + "/.left", "w")
    if "mode" in sys.argv:
        os.chmod(folder, 0o777)
if os.getuid():
    compiled = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.makedirs(compiled, exist_ok=True)
    print("compiled by", *os.listdir(compiled))
    open(f"{compiled}/{os.getuid()}", "w")
"""


def test_what_a_tenant_leaves_in_its_folders_reaches_no_other_tenant() -> None:
    """Folders are used again, by members of the same tenant, if they are as new. The node is not
    below /tmp, where its own folders would be mounted inside the members'."""
    need_root()
    with rig_of(0, {}, below="/run") as node:
        seen: list[tuple[int, list[str]]] = []
        users = (UID, UID + 1, 0, UID, UID, UID + 1, UID)
        leaves = ("", "", "", "file", "mode", "", "")
        for number, (uid, left) in enumerate(zip(users, leaves, strict=True)):
            ref = MemberRef(f"j{number}", 1, 0)
            env = (
                {"SHOAL_MEMBERS": "1", "SHOAL_SCRATCH": "."} if not uid else {"SHOAL_MEMBERS": "1"}
            )
            node.launch(ref, sys.executable, "-c", LEAVE, left, env=env, uid=uid)
            assert node.exit(ref).code == 0, node.text(ref)
            lines = node.text(ref).splitlines()
            if uid:
                earlier = f" {uid}" if uid in users[:number] else ""
                assert lines.pop() == f"compiled by{earlier}", "the next job of the same tenant"
                assert all(line.split(" ", 1)[1] == f"{uid} 0o40700 []" for line in lines), lines
            seen.append((uid, [line.split()[0] for line in lines[:2]]))
            acknowledge = Acknowledge(node="n1", incarnation=node.ask().incarnation, ref=ref)
            node.order(acknowledge)
            gone = node.directory / MEMBERS / str(ref)
            node.wait(lambda folder=gone: not folder.exists())  # type: ignore[misc]
        assert seen[0][1] == seen[3][1], "used again"
        for uid, inodes in seen:
            assert not any(set(inodes) & set(others) for user, others in seen if user != uid)


def test_join_gets_the_steps_in_the_order_in_which_they_hold() -> None:
    """What is shown is opened before anything is covered, and the user comes last."""
    shape = Mounts(
        (Bound("/x/tmp", "/tmp"),),
        (Covered("/root"),),
        (Bound("/x/scratch", "/root/s"), Bound("/x/tmp", "/root/p", writable=False)),
        ("/data",),
    )
    order = Order("/bin/ls", ("ls", "--"), {}, "/root/s", UID, 9, shape, ("/sys/a",))
    text = f"+ j /sys/a s o /x/tmp o /x/scratch p 0 /tmp c /root w 1 /root/s r 0 /root/p v /data \
k /root u {UID} 9 7  /root/s -- /bin/ls ls --"
    assert steps(order, 7) == text.split(" ")
    bare = Order("/bin/ls", ("ls",), {}, "/", UID, 9, Mounts(), terminal=True)
    assert steps(bare, 7) == f"+ u {UID} 9 7 terminal / -- /bin/ls ls".split()


def test_a_program_that_cannot_start_or_enter_its_folder_says_so(node: Rig) -> None:
    script = node.directory / "script"
    script.write_text("#!/nowhere/at/all\n")
    script.chmod(0o755)
    node.directory.chmod(0o755)
    ref = MemberRef("j60", 1, 0)
    node.launch(ref, str(script), uid=UID, tenant="a", workdir="/usr")
    end = node.exit(ref)
    assert end.code in (126, 127) and str(script) in end.why and "cannot start" in end.why


STOPS = """
import os, signal
print("up", flush=True)
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""


def test_a_tenant_that_stops_all_its_processes_does_not_stop_the_agent() -> None:
    """Not even one that is about to become its program, for which nobody waits."""
    need_root()
    with rig() as node:
        stops = MemberRef("j70", 1, 0)
        node.launch(stops, sys.executable, "-c", STOPS, uid=UID, tenant="a")
        assert node.says(stops, "up")
        for number in range(71, 76):
            other, own = MemberRef(f"j{number}", 1, 0), MemberRef(f"j{number}", 1, 1)
            node.launch(other, "sleep", "600", uid=UID, tenant="a")
            node.launch(own, "true")
            assert node.exit(own).code == 0


@pytest.mark.parametrize(
    ("workdir", "why"),
    [
        ("/root/work", f"the user {UID} of tenant a may not enter /root, so not /root/work"),
        ("/tmp", "/tmp is not there, as tenants have their own /tmp"),
    ],
)
def test_a_folder_that_the_tenants_user_cannot_reach_is_named(
    node: Rig, workdir: str, why: str
) -> None:
    ref = MemberRef(f"j{len(workdir)}", 1, 0)
    node.launch(ref, "true", uid=UID, tenant="a", workdir=workdir)
    assert node.exit(ref).why == f"{why}; send the directory with the job: shoal run --pack"


def test_an_environment_is_built_by_the_tenants_own_user(node: Rig) -> None:
    """A package can run code while it is installed: root must not run it."""
    script = "import os, sys; print(sys.prefix, os.stat(sys.prefix).st_uid, 'read-only')"
    for job in ("j50", "j51"):
        ref = MemberRef(job, 1, 0)
        node.launch(ref, "python", "-c", script, uid=UID, tenant="a", requirements="--no-index\n")
        assert node.exit(ref).code == 0, node.text(ref)
        assert "/environments/" in node.text(ref)
        assert node.text(ref).endswith(f" {UID} read-only\n")
    assert "building the environment" not in node.text(ref)


CLOSED = """
import os, sys
from pathlib import Path
from shoal.agent.confine.tenant import Apart, Task, own
from shoal.machine.cgroups import Cgroups
from shoal.machine.kernel import reap_orphans
reap_orphans()
node, device, uid = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
apart = Apart(node, Cgroups("", {}, {}, (), unified=True))
apart._home(uid)
own(node / "tmp", uid)
words = ("sh", "-c", f"head -c 1 {device} | wc -c; head -c 1 /dev/zero | wc -c; ls -l /dev/null")
task = Task(uid, words, "/bin/sh", {"PATH": "/bin:/usr/bin"}, "/", {}, f"{node}/tmp", "", (device,))
os.waitpid(apart.start(task, 1, None), 0)
"""


def test_without_a_device_cgroup_a_file_that_cannot_be_opened_covers_a_gpu(tmp_path: Path) -> None:
    need_root()
    device = f"/dev/shoal-test-{os.getpid()}-covered"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    try:
        os.chmod(device, 0o666)
        words = [sys.executable, "-c", CLOSED, str(tmp_path), device, str(UID)]
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    finally:
        os.unlink(device)
    refused, *sizes = said.stdout.splitlines()
    assert refused.endswith("Permission denied") and sizes[:2] == ["0", "1"], said


def test_cuda_counts_only_the_gpus_that_a_member_can_open() -> None:
    assert renumbered("2,3", range(4), (0, 1)) == "0,1"
    assert renumbered("3", range(4), (0, 1)) == "1"
    assert renumbered("", range(4), range(4)) == ""


def test_nodes_that_are_alike_share_a_line() -> None:
    lacks = ("memory (no writable cgroup)", "tenants (the agent is not root)")
    assert unenforced_lines({"n1": (), "n2": ()}) == []
    assert unenforced_lines({"n1": lacks, "n2": lacks}) == [f"on all nodes: {'; '.join(lacks)}"]
    found = unenforced_lines({"n1": (), **{f"n{number}": lacks[:1] for number in range(2, 9)}})
    assert found == ["on n2, n3, n4, n5 and 3 more: memory (no writable cgroup)"]


def test_a_node_with_real_gpus_says_whose_jobs_could_open_others() -> None:
    second = Cgroups("", {}, {"devices": "there is none"}, (), unified=True)
    assert unenforced(second, False, "", "") == ()
    by_whom = "GPUs of others, by the operator's jobs (no device cgroup)"
    assert unenforced(second, True, "", "") == (by_whom,)
    ports = f"tenants' ports, which others may bind first ({Binding(None).problem})"
    assert unenforced(second, False, "", Binding(None).problem) == (ports,)
    all_of_it = ("GPUs of others (no device cgroup)", "tenants (why)")
    assert unenforced(second, True, "tenants (why)", "no BPF") == all_of_it


def test_an_ordinary_user_runs_tenants_jobs_as_itself_and_says_so() -> None:
    need_root()  # to become an ordinary user
    with rig_of(65_534, {}) as node:
        assert node.report is not None
        what = node.report.spec.unenforced
        assert what[0] == "memory, CPUs, processes (no writable cgroup)"
        assert what[-1] == "tenants apart from each other (the agent is not root)"
        script = "id -u; touch $SHOAL_CHECKPOINT_DIR/a; echo $HOME"
        node.launch(ME, "sh", "-c", script, uid=UID, memory_mb=64)
        assert node.exit(ME).code == 0, node.text(ME)
        assert node.text(ME) == f"65534\n{node.directory}/members/{ME}\n"


# Also in namespaces of its own, where it has every right but that over mounts it was given.
WRITES = """
touch $SHOAL_VOLUME_DATA/a
unshare -Urm sh -c "mount -o remount,bind,rw $SHOAL_VOLUME_DATA; umount $SHOAL_VOLUME_DATA; \\
    touch $SHOAL_VOLUME_DATA/b"
ls $SHOAL_VOLUME_DATA
"""


@contextlib.contextmanager
def volume(place: str) -> Iterator[Path]:
    """A folder that anybody may write to."""
    with tempfile.TemporaryDirectory(dir=place) as made:
        os.chmod(made, 0o777)
        yield Path(made)


def test_a_tenant_cannot_write_to_a_read_only_volume(node: Rig) -> None:
    ref = MemberRef("j88", 1, 0)
    with volume("/run") as folder:
        volumes = (f"{folder}:data:ro",)
        node.launch(ref, "sh", "-c", WRITES, uid=UID, tenant="physics", volumes=volumes)
        assert node.exit(ref).code == 0, node.text(ref)
        assert "Read-only file system" in node.text(ref)
        assert list(folder.iterdir()) == []


def test_an_ordinary_users_job_cannot_write_to_a_read_only_volume() -> None:
    need_root()  # to become an ordinary user
    with rig_of(65_534, {}) as node, volume("/tmp") as folder:
        node.launch(ME, "sh", "-c", f"id -u; {WRITES}", volumes=(f"{folder}:data:ro",))
        end = node.exit(ME)
        if "read-only on this node" in end.why:  # a kernel without user namespaces for users
            assert "name an image, or leave out :ro" in end.why
        else:
            assert end.code == 0 and node.text(ME).startswith("65534\n"), node.text(ME)
            assert "Read-only file system" in node.text(ME)
        assert list(folder.iterdir()) == []
