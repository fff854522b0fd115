"""Members in docker's containers, on a real agent with a real daemon: what differs from podman."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.model.commands import Limits
from shoal.model.job import Fault, MemberRef
from shoal.model.secret import SecretsOf
from tests.agent.rig import Rig, rig
from tests.docker import Docker, docker
from tests.podman import IMAGE
from tests.registry import registry

FOREVER = "echo up; exec sleep 1000"
UID = 70_123
numbers = iter(range(1, 1000))


@pytest.fixture(scope="module")
def store() -> Iterator[Docker]:
    with docker() as made:
        yield made


@pytest.fixture(scope="module")
def node(store: Docker) -> Iterator[Rig]:
    with rig(**store.env) as made:
        yield made


def script(node: Rig, text: str, **fields: object) -> MemberRef:
    ref = MemberRef(f"j{next(numbers)}", 1, 0)
    node.launch(ref, "sh", "-c", text, image=IMAGE, **fields)  # type: ignore[arg-type]
    return ref


def first_process(store: Docker, ref: MemberRef) -> int:
    (name,) = (name for name in store.containers() if name.endswith(f"-{ref}"))
    return int(store.run("inspect", "--format={{.State.Pid}}", name))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_code_of_the_command_is_not_taken_for_one_of_docker(node: Rig, store: Docker) -> None:
    for code in (0, 3, 125, 126, 127):
        exit_ = node.exit(script(node, f"exit {code}"))
        assert (exit_.code, exit_.fault, exit_.why) == (code, Fault.NONE, "")
    for argv, why in (
        (("absent", "x"), "no program 'absent' in the image"),
        (("/etc/passwd",), "/etc/passwd cannot be executed in the image"),
    ):
        ref = MemberRef(f"j{next(numbers)}", 1, 0)
        node.launch(ref, *argv, image=IMAGE)
        assert node.exit(ref).why == why
    store.run("tag", IMAGE, "localhost/other:1")
    again = MemberRef(f"j{next(numbers)}", 1, 0)
    for ref, removes in ((MemberRef("j9000", 1, 0), False), (again, True)):
        if removes:  # behind the agent's back
            store.run("rmi", "localhost/other:1")
        node.launch(ref, "true", image="localhost/other:1")
        exit_ = node.exit(ref)
    assert exit_.fault is Fault.MISSING
    assert exit_.why.startswith("its container could not start: docker: Error response from")
    node.wait(lambda: not store.containers())


def test_sigterm_ends_it_at_once_also_while_it_is_made(node: Rig, store: Docker) -> None:
    """The kernel keeps the signal from a first process that has no handler for it."""
    ref = script(node, f"(trap 'echo child; exit' TERM; while :; do sleep 0.1; done) & {FOREVER}")
    node.says(ref, "up")
    node.stop(ref, grace_ms=60_000)
    assert node.exit(ref).code == 128 + signal.SIGTERM
    assert "child" in node.text(ref)
    early = script(node, FOREVER)
    node.until(lambda: early in node.ask().alive)
    node.stop(early, grace_ms=5_000)
    assert node.exit(early).code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    node.wait(lambda: not store.containers())


def test_limits_are_docker_s_and_named_as_ours(node: Rig) -> None:
    fills = "x=$(dd if=/dev/zero bs=1M count=200 | /bin/busybox tr '\\0' x); echo ${#x}"
    exit_ = node.exit(script(node, fills, memory_mb=64))
    assert exit_.why == "it used more than its 64 MB of memory and was ended (memory)"
    forks = script(node, "for i in $(seq 50); do sleep 9 & done", limits=Limits(processes=20))
    assert node.exit(forks).code != 0
    assert "can't fork" in node.text(forks)


def test_whatever_is_killed_the_container_ends_and_is_removed(node: Rig, store: Docker) -> None:
    for victim in ("client", "first"):
        ref = script(node, FOREVER)
        node.says(ref, "up")
        first = first_process(store, ref)
        os.kill(first if victim == "first" else client_of(ref), signal.SIGKILL)
        assert node.exit(ref).code == 128 + signal.SIGKILL
        node.wait(lambda first=first: is_gone(first))  # type: ignore[misc]
        node.wait(lambda: not store.containers())


def client_of(ref: MemberRef) -> int:
    """The client of docker that runs it."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"docker") and any(w.endswith(f"-{ref}".encode()) for w in words):
            return int(name)
    raise AssertionError(f"{ref} has no client")


def test_no_container_outlives_its_agent_and_its_keeper(store: Docker) -> None:
    with rig(**store.env) as own:
        ref = MemberRef("j1", 1, 0)
        own.launch(ref, "sh", "-c", FOREVER, image=IMAGE)
        own.says(ref, "up")
        first, agent = first_process(store, ref), own.agent_pid()
        own.keeper.kill()
        own.wait(lambda: is_gone(agent))
        own.restart(signal.SIGKILL)
        own.wait(lambda: is_gone(first))
        own.wait(lambda: not store.containers())
        again = MemberRef("j1", 2, 0)
        own.launch(again, "sh", "-c", FOREVER, image=IMAGE)
        own.says(again, "up")
    assert not store.containers(), "`shoal down` leaves no container"


ESCAPES = {
    "the node's folders": "cat {node}/agent.json",
    "another member's folder": "cat {node}/members/of-another",
    "docker itself": "ls /var/run/docker.sock || ls {socket}",
    "a mount": "/bin/busybox mount -t tmpfs x /tmp",
    "a device": "/bin/busybox mknod /tmp/disk b 7 0",
    "another root": "/bin/busybox chroot / true",
    "processes of the node": "kill -9 {agent}",
    "settings of the kernel": "echo 1 > /proc/sys/kernel/panic",
    "memory of the machine": "dd if=/dev/mem of=/dev/null count=1",
    "its own limits": "echo 0 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
    "root, by a program of root's": "/bin/busybox su -c true",
    "the image": "touch /bin/new",
}


def test_a_tenant_does_not_get_out_of_its_container(node: Rig, store: Docker) -> None:
    (node.directory / "members/of-another").write_text("hidden")
    put = {"node": node.directory, "socket": f"{store.folder}/socket", "agent": node.agent_pid()}
    tries = [
        f'{{ {text.format(**put)}; }} >/dev/null 2>&1 && echo "got {what}"'
        for what, text in ESCAPES.items()
    ]
    rights = "grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status"
    ref = script(node, "; ".join(["id", rights, *tries, "echo done"]), uid=UID, tenant="red")
    assert node.exit(ref).code == 0
    assert node.text(ref).replace("\t", " ").splitlines() == [
        f"uid={UID} gid={UID} groups={UID}",
        "CapEff: 0000000000000000",
        "CapBnd: 0000000000000000",
        "NoNewPrivs: 1",
        "Seccomp: 2",
        "done",
    ]


def test_a_tenant_pulls_with_its_own_password_what_is_here_already(
    node: Rig, store: Docker
) -> None:
    with registry(store.layer) as images:
        images.login = "red:pass:word"
        images.open.set()
        with_it, without = (MemberRef(f"j{next(numbers)}", 1, 0) for _ in range(2))
        node.secrets[with_it] = SecretsOf(with_it, registry=b"red:pass:word\n")
        node.launch(with_it, "id", image=images.image, uid=UID, tenant="red")
        assert node.exit(with_it).code == 0
        node.launch(without, "id", image=images.image, uid=UID + 1, tenant="blue")
        assert "is there a secret registry-127.0.0.1-" in node.exit(without).why
        assert "pass:word" not in node.log()


def test_a_daemon_that_is_killed_ends_the_member_and_is_named(node: Rig, store: Docker) -> None:
    """The last test here."""
    ref = script(node, FOREVER)
    node.says(ref, "up")
    first = first_process(store, ref)
    store.daemon.kill()
    store.daemon.wait()
    exit_ = node.exit(ref)
    assert (exit_.fault, "error waiting for container" in exit_.why) == (Fault.NONE, True)
    node.wait(lambda: is_gone(first))
    other = MemberRef(f"j{next(numbers)}", 1, 0)
    node.launch(other, "true", image="localhost/new:1")
    assert node.exit(other).why.startswith("docker's daemon does not answer on this node")
