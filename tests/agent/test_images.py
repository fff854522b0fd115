"""Members in containers, on a real agent with a real podman."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.agent.confine import rdma
from shoal.agent.confine.limits import Device
from shoal.model.commands import Limits
from shoal.model.job import Fault, MemberRef
from shoal.model.node import RDMA_OPEN, RDMA_ROOT
from shoal.model.secret import SecretsOf, SecretValue
from tests.agent.rig import Rig, rig
from tests.agent.test_packages import package
from tests.needs import need_cgroups, need_root
from tests.podman import IMAGE, Podman, podman

FOREVER = "echo up; exec sleep 1000"
UID = 70_123


@pytest.fixture(scope="module")
def store() -> Iterator[Podman]:
    with podman() as made:
        yield made


@pytest.fixture(scope="module")
def node(store: Podman) -> Iterator[Rig]:
    """One node for all tests that leave it as it was."""
    with rig(**store.env) as made:
        yield made


numbers = iter(range(1, 1000))


def fresh() -> MemberRef:
    return MemberRef(f"j{next(numbers)}", 1, 0)


def script(node: Rig, text: str, **fields: object) -> MemberRef:
    ref = fresh()
    node.launch(ref, "sh", "-c", text, image=IMAGE, **fields)  # type: ignore[arg-type]
    return ref


def number_in(node: Rig, ref: MemberRef, name: str) -> int:
    """The id of the first process of a container (`pid`), or of podman's monitor (`conmon`)."""
    (file,) = (node.directory / "containers").glob(f"*-{ref}/{name}")
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# -- the same as outside -----------------------------------------------------------------------


def test_a_member_runs_in_its_image_and_the_exit_code_is_its_own(node: Rig) -> None:
    """125 is what podman itself exits with when it fails."""
    ref = script(node, "ls / && echo $SHOAL_REF in $PWD && exit 125")
    exit_ = node.exit(ref)
    assert (exit_.code, exit_.fault) == (125, Fault.NONE)
    assert node.text(ref).split("\n")[-2] == f"{ref} in {node.directory}/members/{ref}"
    assert "work" not in os.listdir("/") or "work" not in node.text(ref).split("\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("absent", "x"), "no program 'absent' in the image"),
        (("/etc/passwd",), "/etc/passwd cannot be executed in the image"),
    ],
)
def test_a_program_that_the_image_lacks_is_named(
    node: Rig, argv: tuple[str, ...], why: str
) -> None:
    ref = fresh()
    node.launch(ref, *argv, image=IMAGE)
    assert node.exit(ref).why == why


def test_an_image_that_was_removed_behind_the_agent_s_back_is_found_missing(
    node: Rig, store: Podman
) -> None:
    store.run("tag", IMAGE, "localhost/other:1")
    ref, again, third = fresh(), fresh(), fresh()
    node.launch(ref, "true", image="localhost/other:1")
    assert node.exit(ref).code == 0
    store.run("untag", "localhost/other:1")
    node.launch(again, "true", image="localhost/other:1")
    exit_ = node.exit(again)
    assert exit_.fault is Fault.MISSING
    assert exit_.why.startswith("its container could not start: ")
    node.launch(third, "true", image="localhost/other:1")
    assert node.exit(third).why == "there is no image localhost/other:1 on this node"
    store.run("tag", store.run("images", "--quiet").split()[0], IMAGE)


def test_variables_reach_the_command_and_no_command_line(node: Rig) -> None:
    env = {"PLAIN": "s3cr=t # '\"", "LINES": "one\ntwo", "PATH": "/bin", "EMPTY": ""}
    ref = script(node, 'echo "$PLAIN|$LINES|$EMPTY|$HOME"; exec sleep 1000', env=env)
    node.says(ref, "s3cr=t # '\"|one\ntwo||/root\n")
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                assert b"s3cr=t" not in Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
    node.stop(ref)
    node.exit(ref)


def test_a_container_sees_its_folders_and_no_others(node: Rig, tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    (tmp_path / "hidden").touch()
    ref = script(
        node,
        "touch made $SHOAL_CHECKPOINT_DIR/saved && ls .. && ls /dev/shm >/dev/null && echo good",
        workdir=str(tmp_path / "a,b"),
    )
    assert node.exit(ref).code == 0
    assert node.text(ref) == "a,b\ngood\n"
    assert (tmp_path / "a,b" / "made").exists()
    assert (node.directory / "kept" / ref.job / "saved").exists()


def test_a_package_is_read_only_and_scratch_is_not(node: Rig) -> None:
    sha, data = package()
    node.packages[sha] = data
    text = "cat code; touch x || touch $SHOAL_SCRATCH/x && echo; pwd"
    ref = script(node, text, package=sha, workdir="sub")
    assert node.exit(ref).code == 0
    assert "Read-only file system" in node.text(ref)
    assert node.text(ref).endswith(f"{node.directory}/packages/{sha}/sub\n")


def test_a_node_can_be_told_to_run_no_images() -> None:
    with rig(SHOAL_CONTAINERS="none") as own:
        assert own.report is not None
        assert own.report.spec.containers == ""
        ref = MemberRef("j1", 1, 0)  # the controller would not send it
        own.launch(ref, "true", image=IMAGE)
        assert own.exit(ref).why == "nothing on this node can run images"


def test_secrets_are_files_and_variables_in_a_container(node: Rig) -> None:
    ref = fresh()
    values = (SecretValue("key", b"of a file"), SecretValue("token", b"of a variable", "TOKEN"))
    node.secrets[ref] = SecretsOf(ref, values)
    text = "grep -c file $SHOAL_SECRETS/key; echo ${#TOKEN}; touch $SHOAL_SECRETS/x || echo no"
    node.launch(ref, "sh", "-c", text, image=IMAGE, secrets=("key", "token=TOKEN"))
    assert node.exit(ref).code == 0
    assert node.text(ref).split("\n")[:2] == ["1", str(len("of a variable"))]
    assert node.text(ref).endswith("no\n")


# -- the end -----------------------------------------------------------------------------------


def test_sigterm_reaches_every_process_and_default_actions_count(node: Rig) -> None:
    """The first process of a container ignores what it does not handle, unlike outside."""
    loop = "while true; do sleep 0.1; done"
    ref = script(node, f"(trap 'echo child; exit' TERM; {loop}) & {FOREVER}")
    node.says(ref, "up")
    node.stop(ref, grace_ms=60_000)
    assert node.exit(ref).code == 128 + signal.SIGTERM
    assert "child" in node.text(ref)
    ref = script(node, f"trap 'echo bye; exit 7' TERM; echo up; {loop}")
    node.says(ref, "up")
    node.stop(ref, grace_ms=60_000)
    assert node.exit(ref).code == 7


def test_what_ignores_sigterm_is_killed_after_the_grace_time(node: Rig, store: Podman) -> None:
    ref = script(node, "trap '' TERM; echo up; (setsid sleep 1000 &); sleep 1000")
    node.says(ref, "up")
    first = number_in(node, ref, "pid")
    node.stop(ref, grace_ms=100)
    assert node.exit(ref).code == 128 + signal.SIGKILL
    assert is_gone(first)
    node.wait(lambda: not store.containers())


def test_a_container_that_is_stopped_while_it_is_made_leaves_nothing(
    node: Rig, store: Podman
) -> None:
    """Podman's client ends with 0 then, though the command never ran."""
    for _ in range(6):
        ref = script(node, FOREVER)
        node.until(lambda ref=ref: ref in node.ask().alive)  # type: ignore[misc]
        node.wait(lambda ref=ref: bool(making(node, ref)))  # type: ignore[misc]
        node.stop(ref, grace_ms=5_000)
        assert node.exit(ref).code == 128 + signal.SIGTERM
    node.wait(lambda: not store.containers())


def making(node: Rig, ref: MemberRef) -> list[Path]:
    return list((node.directory / "containers").glob(f"*-{ref}"))


@pytest.mark.parametrize("victim", ["client", "conmon", "pid"])
def test_whatever_of_a_container_is_killed_the_rest_ends_with_it(
    node: Rig, store: Podman, victim: str
) -> None:
    ref = script(node, FOREVER)
    node.says(ref, "up")
    first = number_in(node, ref, "pid")
    name = os.fsencode(f"--name={container_name(node, ref)}")
    killed = number_in(node, ref, victim) if victim != "client" else with_word(name)
    os.kill(killed, signal.SIGKILL)
    assert node.exit(ref).code == 128 + signal.SIGKILL
    node.wait(lambda: is_gone(first))
    node.wait(lambda: not store.containers())
    node.wait(lambda: not list((node.directory / "containers").glob(f"*-{ref}")))


def container_name(node: Rig, ref: MemberRef) -> str:
    (folder,) = (node.directory / "containers").glob(f"*-{ref}")
    return folder.name


def with_word(word: bytes) -> int:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if word in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    return int(name)
            except OSError:
                continue
    raise AssertionError(f"no process has {word!r} on its command line")


@pytest.mark.parametrize("both", [False, True], ids=["agent", "agent and keeper"])
def test_no_container_outlives_its_node(store: Podman, both: bool) -> None:
    with rig(**store.env) as own:
        ref = MemberRef("j1", 1, 0)
        own.launch(ref, "sh", "-c", FOREVER, image=IMAGE)
        own.says(ref, "up")
        first = number_in(own, ref, "pid")
        if both:
            agent = own.agent_pid()
            own.keeper.kill()
            own.wait(lambda: is_gone(agent))
        own.restart(signal.SIGKILL)
        own.wait(lambda: is_gone(first))
        own.wait(lambda: not store.containers())
        again = MemberRef("j1", 2, 0)
        own.launch(again, "sh", "-c", FOREVER, image=IMAGE)
        own.says(again, "up")
    assert not store.containers(), "`shoal down` leaves no container"


# -- limits and tenants ------------------------------------------------------------------------


def test_more_memory_than_asked_for_ends_it_with_a_reason(node: Rig) -> None:
    need_cgroups()
    text = "x=$(dd if=/dev/zero bs=1M count=200 | tr '\\0' x); echo ${#x}"
    ref = script(node, text.replace("tr", "/bin/busybox tr"), memory_mb=64)
    exit_ = node.exit(ref)
    assert exit_.code != 0
    assert exit_.why == "it used more than its 64 MB of memory and was ended (memory)"


def test_more_processes_than_the_policy_allows_are_refused(node: Rig) -> None:
    need_cgroups()
    text = "for i in $(seq 50); do sleep 100 & done; echo all"
    ref = script(node, text, limits=Limits(processes=20))
    exit_ = node.exit(ref)
    assert exit_.code != 0
    assert "can't fork" in node.text(ref)


def test_a_tenant_s_container_has_its_user_and_no_rights(node: Rig) -> None:
    need_root()
    ref = script(
        node,
        "id; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; touch /made",
        uid=UID,
        tenant="red",
    )
    node.exit(ref)
    text = node.text(ref)
    assert f"uid={UID}" in text
    assert "CapEff:\t0000000000000000" in text
    assert "CapBnd:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert "touch: /made: Permission denied" in text


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where every user may go; pytest's own folders are for one user."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_tenant_gets_no_folder_that_it_could_not_enter(node: Rig, open_folder: Path) -> None:
    need_root()
    own, shut = open_folder / "own", open_folder / "shut"
    for folder in (own, shut, shut / "inside"):
        folder.mkdir()
    shut.chmod(0o700)
    os.chown(own, UID, UID)
    (own / "link").symlink_to(shut / "inside")
    good = script(node, "touch here", workdir=str(own), uid=UID, tenant="red")
    assert node.exit(good).code == 0
    assert (own / "here").exists()
    for name in ("shut/inside", "own/link"):
        ref = script(node, "ls", workdir=str(open_folder / name), uid=UID, tenant="red")
        assert f"may not enter {shut}" in node.exit(ref).why


def test_its_stacks_are_those_of_the_container(node: Rig) -> None:
    ref = script(node, FOREVER)
    node.says(ref, "up")
    node.stop(ref, dump=True)
    node.exit(ref)
    assert "sleep 1000" in node.text(ref)


def test_a_container_leaves_no_group_in_any_hierarchy(node: Rig) -> None:
    """Podman makes one in each hierarchy of version 1, and removes only its own."""
    need_cgroups()
    ref = script(node, FOREVER)
    node.says(ref, "up")
    own = Path(f"/proc/{number_in(node, ref, 'pid')}/cgroup").read_text().splitlines()
    names = {line.rpartition(":")[2].rpartition("/")[0] for line in own}
    (name,) = (name for name in names if name.endswith(f"/{ref}"))

    def left() -> list[Path]:
        return [*Path("/sys/fs/cgroup").glob(f"*{name}"), *Path("/sys/fs/cgroup").glob(name[1:])]

    assert left()
    node.stop(ref)
    node.exit(ref)
    node.wait(lambda: not left())


# -- network cards -------------------------------------------------------------------------------

TRY = "import resource; print(resource.getrlimit(8)); open('{}', 'rb').read(1); print('opened')"


@pytest.fixture(scope="module")
def cards(store: Podman) -> Iterator[tuple[Rig, str]]:
    """A node with an InfiniBand card, whose files are those of /dev/zero."""
    need_root()
    root = f"/dev/shoal-test-{os.getpid()}-cards"
    os.makedirs(f"{root}/{rdma.CARDS}/mlx5_0")
    os.makedirs(f"{root}/{rdma.FILES}")
    for name in ("uverbs0", "rdma_cm", "umad0"):
        os.mknod(f"{root}/{rdma.FILES}/{name}", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.chmod(f"{root}/{rdma.FILES}/{name}", 0o666)
    try:
        with rig(**store.env, **{rdma.ROOT: root}) as made:
            yield made, f"{root}/{rdma.FILES}/uverbs0"
    finally:
        shutil.rmtree(root)


def _locked(node: Rig) -> str:
    """Of memory, in the words of `ulimit`: all of it, unless this test may not raise its limit."""
    assert node.report is not None
    if node.report.spec.rdma == RDMA_OPEN:
        return "unlimited"
    most = str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] >> 10)
    assert f"only {most} KiB" in str(node.report.spec.rdma)
    return most


def test_a_container_gets_the_cards_and_may_lock_memory(cards: tuple[Rig, str]) -> None:
    node, _ = cards
    locked = _locked(node)
    look = "ls /dev/infiniband; ulimit -l; dd if=/dev/infiniband/uverbs0 bs=1 count=1 | cat"
    for uid in (0, UID):
        ref = script(node, look, uid=uid)
        assert node.exit(ref).code == 0
        assert node.text(ref).split()[:3] == ["rdma_cm", "uverbs0", locked], node.text(ref)
    ref = script(node, look, uid=UID, limits=Limits(rdma=False))
    node.exit(ref)
    assert node.text(ref).startswith("ls: /dev/infiniband: No such file"), node.text(ref)


def test_a_tenant_opens_a_card_only_if_the_policy_lets_it(cards: tuple[Rig, str]) -> None:
    node, path = cards
    words = (sys.executable, "-c", TRY.format(path))
    for allowed in (True, False):
        ref = fresh()
        node.launch(ref, *words, uid=UID, tenant="physics", limits=Limits(rdma=allowed))
        code = node.exit(ref).code
        node.says(ref, "opened" if allowed else "PermissionError")
        assert (code == 0) is allowed
        most = -1 if _locked(node) == "unlimited" else int(_locked(node)) << 10
        assert node.text(ref).startswith(f"({most}, {most})"), "it may lock what the agent may"


def test_a_node_says_why_its_cards_are_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rdma.ROOT, str(tmp_path))
    monkeypatch.setattr(rdma, "_unlocked", lambda: 8 << 20)
    assert rdma.look() == ""
    (tmp_path / rdma.CARDS / "mlx5_0").mkdir(parents=True)
    assert "load ib_uverbs" in rdma.look()
    device = Device(str(tmp_path / "uverbs0"), 1, 5)
    (tmp_path / "uverbs0").touch(0o600)
    monkeypatch.setattr(rdma, "files", lambda: [device])
    assert "only 8192 KiB of memory" in rdma.look()
    monkeypatch.setattr(rdma, "_unlocked", lambda: -1)
    assert rdma.look() == RDMA_ROOT
